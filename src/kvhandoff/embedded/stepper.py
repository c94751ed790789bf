"""From what happened to a request (chunks were computed, a load ended, an abort) to what there is to tell.

Nothing is told to anybody here. The results are given out by the engine core once the bookkeeping of the
whole step is complete, so that whoever hears of an end finds the blocks released.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError
from kvhandoff.embedded.api import EngineRequest, FinishReason, ModelRunner, SequenceStep, TokenOutput
from kvhandoff.embedded.request_state import RequestState
from kvhandoff.embedded.sampler import RequestSampler, Sampled
from kvhandoff.embedded.scheduler import Chunk, Scheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResults:
    """What there is to be told, in this order. The references on all blocks in it are lent already."""

    grown: list[tuple[str, list[int]]] = field(default_factory=list)
    """(request id, the next blocks of its growing offer)."""
    offers: list[tuple[str, list[int], int]] = field(default_factory=list)
    """(request id, its prompt's blocks that were not offered before, the first token)."""
    retained: list[tuple[str, list[bytes], list[int]]] = field(default_factory=list)
    """(request id, the hashes of what it has computed, the blocks)."""
    outputs: list[TokenOutput] = field(default_factory=list)


class Stepper:
    """Runs the model on chunks, samples, and books the outcome. Owned by the engine thread."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Clock) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._samplers: dict[str, RequestSampler] = {}

    def add(self, request: EngineRequest, root: bytes, chain: TokenChain) -> None:
        """Queue a request."""
        sampler = RequestSampler(request.params, self._runner.eos_token_ids, request.prompt_token_ids)
        self._samplers[request.request_id] = sampler
        self._scheduler.add(request, root, chain)

    def forget(self, state: RequestState) -> None:
        """End a request wherever it is, with nothing to tell."""
        self._scheduler.end(state)
        del self._samplers[state.request.request_id]

    def abort(self, state: RequestState) -> StepResults:
        """End a request wherever it is."""
        results = StepResults()
        self._end(state, results)
        results.outputs.append(TokenOutput(state.request.request_id, None, finish_reason="abort"))
        return results

    def load_finished(self, state: RequestState, tokens: int, first_token: int | None) -> StepResults:
        """The first `tokens` prompt tokens' KV is in the request's blocks. When that is the whole prompt, and
        the token that was sampled after it elsewhere is the one that would be sampled here, no step is needed
        for it."""
        results, now = StepResults(), self._clock()
        request, reused = state.request, None
        if first_token is not None and tokens >= state.prompt_tokens:
            if not 0 <= first_token < self._runner.vocab_size:
                logger.warning("request %s: first token %d is no token", request.request_id, first_token)
            elif self._samplers[request.request_id].adopt(first_token):
                reused = Sampled(first_token, logprob=None)
        self._scheduler.load_finished(state, tokens, now, first_token=reused is not None)
        if reused is None:
            self._grow_offer(state, results)
        else:
            request.stats.first_token_reused = True
            request.stats.prefilled_at = now
            self._take(state, reused, results)
        return results

    def run(self, chunks: Sequence[Chunk]) -> StepResults:
        """Compute `chunks`. When the model raises, their requests end with an error."""
        results = StepResults()
        steps = [_sequence_step(chunk) for chunk in chunks]
        try:
            logits = self._runner.forward(steps)
        except Exception as error:
            ids = [chunk.state.request.request_id for chunk in chunks]
            logger.exception("the model failed on a step of requests %s", ids)
            for chunk in chunks:
                self._fail(chunk.state, _step_failed(error), results)
            return results
        now = self._clock()
        for chunk, rows in zip(chunks, logits, strict=True):
            self._complete(chunk, rows, now, results)
        return results

    def _complete(self, chunk: Chunk, rows: Any, now: float, results: StepResults) -> None:
        """Book one computed chunk; sample, if the next token is due."""
        state, samples = chunk.state, chunk.reaches_end
        sampler = self._samplers[state.request.request_id]
        if state.needs_prompt_logits:
            sampler.observe_prompt(state.computed, rows)
        self._scheduler.advance(state, chunk.count)
        if not samples:
            self._grow_offer(state, results)
            return
        if state.generated == 0:
            state.request.stats.prefilled_at = now
        try:
            sampled = sampler.sample(rows[-1], state.generated)
        except RequestError as error:
            self._fail(state, error, results)
            return
        self._take(state, sampled, results)

    def _take(self, state: RequestState, sampled: Sampled, results: StepResults) -> None:
        """Book the request's next token."""
        request, sampler = state.request, self._samplers[state.request.request_id]
        self._scheduler.append(state, sampled.token_id)
        first = state.generated == 1
        if state.offers:
            rest = self._scheduler.offer(state)
            results.offers.append((request.request_id, rest, sampled.token_id))
        stops = sampler.stops_at(sampled.token_id, state.generated)
        ends: FinishReason | None = None
        if stops:
            ends = "stop"
        elif state.generated >= request.params.max_tokens:
            ends = "length"
        asked = first and request.params.prompt_logprobs is not None
        output = TokenOutput(
            request.request_id,
            sampled.token_id,
            logprob=sampled.logprob,
            prompt_logprobs=tuple(sampler.prompt_logprobs) if asked else None,
            finish_reason=ends,
            stop_token=sampled.token_id if stops else None,
        )
        results.outputs.append(output)
        if ends is not None:
            self._end(state, results)

    def _grow_offer(self, state: RequestState, results: StepResults) -> None:
        """Offer what is full by now. What the step before the first token fills goes with the whole offer."""
        blocks = self._scheduler.grow_offer(state)
        if blocks:
            results.grown.append((state.request.request_id, blocks))

    def _end(self, state: RequestState, results: StepResults) -> None:
        """Forget a request that did not fail; what it is to retain is lent before."""
        if state.request.retain:
            hashes, blocks = self._scheduler.retain(state)
            if blocks:
                results.retained.append((state.request.request_id, hashes, blocks))
        self.forget(state)

    def _fail(self, state: RequestState, error: RequestError, results: StepResults) -> None:
        self.forget(state)
        output = TokenOutput(state.request.request_id, None, finish_reason="error", error=error)
        results.outputs.append(output)


def _sequence_step(chunk: Chunk) -> SequenceStep:
    state = chunk.state
    wanted: Literal["last", "all"] | None = "last" if chunk.reaches_end else None
    return SequenceStep(
        token_ids=state.tokens[state.computed : state.computed + chunk.count],
        start=state.computed,
        block_table=state.blocks,
        logits="all" if state.needs_prompt_logits else wanted,
    )


def _step_failed(error: Exception) -> RequestError:
    return RequestError(
        f"the model failed while computing this request ({type(error).__name__}); the engine's log has more",
        status=500,
        code="engine_error",
        kind="internal_error",
    )
