"""One step: from the chunks that were planned to the tokens that came out.

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
from kvhandoff.embedded.sampler import RequestSampler
from kvhandoff.embedded.scheduler import Chunk, RequestState, Scheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResults:
    """What a step leaves to be told, offers first."""

    offers: list[tuple[str, list[int]]] = field(default_factory=list)
    """(request id, its prompt's blocks); the references are lent already."""
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

    def end(self, state: RequestState) -> None:
        """Forget a request wherever it is."""
        self._scheduler.end(state)
        del self._samplers[state.request.request_id]

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
            return
        if state.generated == 0:
            state.request.stats.prefilled_at = now
        try:
            sampled = sampler.sample(rows[-1], state.generated)
        except RequestError as error:
            self._fail(state, error, results)
            return
        self._scheduler.append(state, sampled.token_id)
        request, first = state.request, state.generated == 1
        if first and request.offer:
            results.offers.append((request.request_id, self._scheduler.offer(state)))
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
            self.end(state)

    def _fail(self, state: RequestState, error: RequestError, results: StepResults) -> None:
        self.end(state)
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
