"""The engine core: one thread that turns queued requests into forward steps.

Everything from outside (submit, abort, the answers of the handoff side) is put into an inbox and taken up
between two steps; nothing else touches requests or blocks. So an abort takes effect at the next step
boundary, in whatever stage the request is: waiting, loading, inside its prompt, or decoding.

**Who owns a block, and until when** (rules 2 and 4). A block is re-issued when nobody has a reference on it.

- *The running request* holds one reference on each of its blocks, from admission until it ends or is
  preempted. It writes only behind the tokens it has: never to a published block, nor to what an offer covers.
- *The handoff side* holds references in four cases, and returns them through `release_blocks`. An offer: one
  on each block of the prompt, taken before the request that computed it gives up its own; of a growing offer
  block by block, and those stay lent when the rest is not offered any more. A retained turn: one on each full
  block, taken before the request's end. A load under way: the request's own references on the awaited blocks,
  which become the request's again with `load_finished`. A load that failed, or whose request ended meanwhile:
  those same references, until its fence. The engine never takes any of them back by itself, and no timeout of
  the engine's does: only the handoff side knows the fence. It only tells when it is short of blocks.
- *The prefix cache* holds no references. A full block is published once every token in it has been computed
  here, or loaded and verified; the block with the last prompt token only after the step that computed that
  token, if one does. A published block without references keeps its content until an allocation takes it.

So after the last request has ended and the handoff side has returned what it held, every block is free or
cached: the pool is at its baseline.

What fails stays small: a request whose logits are no numbers ends alone; when the model raises, the requests
of that step end with an error and the engine goes on. Anything else that is raised here, a hook's exception
included, leaves the ownership of blocks unknown: the engine stops, says so in `healthy`, and ends everything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Any

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.errors import unavailable
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import EngineRequest, ModelRunner, TokenOutput
from kvhandoff.embedded.limits import check_request
from kvhandoff.embedded.outlet import EngineFault, Outlet
from kvhandoff.embedded.pool import BlockPool
from kvhandoff.embedded.request_state import RequestState, Stage
from kvhandoff.embedded.scheduler import Scheduler
from kvhandoff.embedded.stepper import Stepper, StepResults
from kvhandoff.engine.api import KVHooks

logger = logging.getLogger(__name__)

_SHORT_AGAIN_S = 0.5
"""Seconds after which an idle engine that is short of blocks says so again (`events.MemoryShort`)."""


class EngineCore:
    """Implements `Engine`: continuous batching of requests over one `ModelRunner`.

    `start` runs it on its own thread; without, whoever calls `step` is the engine thread (tests do).
    `num_blocks` is the number of blocks in the runner's memory. `hooks` may be set later, but before the
    first request that needs them. Raises ConfigError for bounds that are not positive.
    """

    def __init__(
        self,
        runner: ModelRunner,
        hooks: KVHooks | None = None,
        *,
        num_blocks: int,
        clock: Clock = monotonic,
        max_num_seqs: int = 16,
        max_step_tokens: int = 512,
        prefix_cache: bool = True,
    ) -> None:
        self.layout = runner.layout
        pool = BlockPool(num_blocks, runner.layout.block_size, prefix_cache=prefix_cache)
        self.max_model_len = min(runner.max_context, num_blocks * pool.block_size)
        self._runner = runner
        self._clock = clock
        self._pool = pool
        self._scheduler = Scheduler(pool, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
        self._stepper = Stepper(runner, self._scheduler, clock)
        self._outlet = Outlet(hooks, self.abort)

        self._wake = Condition()
        # Guarded by _wake, since other threads use them:
        self._inbox: deque[Callable[[], None]] = deque()
        self._queued = 0  # submits in the inbox
        self._closing = self._failed = False
        self._counts: dict[str, int] = {}

        self._thread: Thread | None = None
        self._steps = 0
        self._short = False  # whether the last plan lacked blocks
        self._publish_counts()

    @property
    def hooks(self) -> KVHooks | None:
        """The handoff side; without, only plain requests are taken."""
        return self._outlet.hooks

    @hooks.setter
    def hooks(self, hooks: KVHooks | None) -> None:
        self._outlet.hooks = hooks

    # -- Engine: any thread ---------------------------------------------------------------------------------

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain:
        """The token chain of `token_ids` in this engine. Pure; about 0.5 ms for 16k tokens."""
        return TokenChain.of(self._root(cache_salt), self.layout.block_size, token_ids)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises RequestError: 400 for parameters out of range, an empty prompt, unknown token ids or a request
        that is too long; 503 when the engine has stopped. Raises EngineFault for what only a caller's mistake
        can bring: an id in use, a load, an offer or a turn to retain without hooks, a growing offer that is
        none, a chain that is not the prompt's.
        """
        if (request.load or request.offer or request.retain) and self.hooks is None:
            raise EngineFault(
                f"request {request.request_id} asks for a load, an offer or to be retained; no hooks are set"
            )
        if request.grow and not request.offer:
            raise EngineFault(f"request {request.request_id} is to grow an offer, but makes none")
        check_request(request, vocab_size=self._runner.vocab_size, max_model_len=self.max_model_len)
        chain = request.chain or self.chain(request.prompt_token_ids, request.cache_salt)
        if (chain.block_size, chain.n_tokens) != (self.layout.block_size, len(request.prompt_token_ids)):
            raise EngineFault(
                f"request {request.request_id}: a chain of {chain.n_tokens} tokens in blocks of "
                f"{chain.block_size} for a prompt of {len(request.prompt_token_ids)} in blocks of "
                f"{self.layout.block_size}"
            )
        with self._wake:
            if not self.healthy:
                raise unavailable("the engine has stopped", code="engine_stopped")
            self._outlet.open(request)
            self._queued += 1
            self._post(partial(self._on_submit, request, chain))

    def abort(self, request_id: str) -> None:
        """End a request at the next step boundary with finish_reason `abort`. Unknown: no-op."""
        self._post(partial(self._on_abort, request_id))

    def load_finished(self, request_id: str, tokens: int, first_token: int | None = None) -> None:
        """The KV of the first `tokens` prompt tokens is in the request's blocks, verified. `first_token`:
        what was sampled after the whole prompt where it was computed."""
        self._post(partial(self._on_load_finished, request_id, tokens, first_token))

    def load_failed(self, request_id: str, reason: Reason) -> None:
        """Nothing was loaded; the prompt is computed in other blocks."""
        self._post(partial(self._on_load_failed, request_id, reason))

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Return references that an offer, a retained turn, or a failed or abandoned load left with the
        handoff side."""
        self._post(partial(self._on_release, tuple(blocks)))

    def live(self) -> list[str]:
        """The requests that have not had their last output."""
        return self._outlet.live()

    def load(self) -> dict[str, Any]:
        """`running`, `waiting`, `loading` requests, `blocks_total`, `blocks_free`, `blocks_cached`, and the
        model `steps` done, as of one moment between two steps or before a step's model run."""
        with self._wake:
            return {**self._counts, "waiting": self._counts["waiting"] + self._queued}

    @property
    def healthy(self) -> bool:
        """Whether requests are taken: neither closed nor stopped by a fault."""
        return not (self._closing or self._failed)

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        if self._thread is not None or not self.healthy:
            raise EngineFault("the engine was started or closed before")
        self._thread = Thread(target=self._run, name="kvhandoff-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all requests with finish_reason `abort` and the thread after its current step. Not to be called
        on the engine thread. Memory that peers may still write to is the handoff side's to wait for."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all()

    def _run(self) -> None:
        try:
            busy = False
            while True:
                with self._wake:
                    # All that can happen to an idle engine comes through the inbox. One that is short of
                    # blocks looks again all the same, to say that it still is.
                    while not (busy or self._inbox or self._closing):
                        if not self._wake.wait(_SHORT_AGAIN_S if self._short else None):
                            break
                    if self._closing:
                        break
                busy = self.step()
        except Exception:
            logger.exception("the engine stops: %s", self._describe())
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """The thread's last act: every request gets its end, and every load and growing offer is told."""
        with self._wake:
            aborted = self._closing
            self._failed = not aborted
            self._inbox.clear()
            self._queued = 0
        ending = self._outlet.live()
        for request_id in ending:
            state = self._scheduler.requests.get(request_id)
            try:
                self._outlet.abandon(request_id, loading=state is not None and state.stage is Stage.LOADING)
            except Exception:
                logger.exception("the handoff side could not be told of the end of %s", request_id)
            if state is not None and aborted:  # after a fault the bookkeeping is not to be trusted
                self._stepper.forget(state)
        self._publish_counts()
        stopped = unavailable("the engine has stopped", code="engine_stopped")
        for request_id in ending:
            if aborted:
                self._outlet.emit(TokenOutput(request_id, None, finish_reason="abort"))
            else:
                self._outlet.emit(TokenOutput(request_id, None, finish_reason="error", error=stopped))

    # -- engine thread: one step ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Take up what came in, run the model once, give out the tokens. For the engine thread only.

        Returns whether the model ran; if not, nothing changes until something new comes in, save how long the
        engine has been short of blocks.
        """
        self._take_inbox()
        plan = self._scheduler.plan(self._clock())
        self._publish_counts()
        self._short = plan.short > 0
        self._outlet.tell_plan(plan)
        if not plan.chunks:
            self._check_progress()
            return False
        results = self._stepper.run(plan.chunks)
        self._steps += 1
        self._tell(results)
        return True

    def _tell(self, results: StepResults) -> None:
        self._publish_counts()
        self._outlet.tell(results)

    def _check_progress(self) -> None:
        """The watchdog against a deadlock: an idle engine with requests must have something to wait for."""
        scheduler = self._scheduler
        awaits = scheduler.loading or scheduler.lent
        if (scheduler.running or scheduler.waiting) and not awaits:
            raise EngineFault(f"no progress is possible: {self._describe()}")

    # -- engine thread: the inbox ---------------------------------------------------------------------------

    def _take_inbox(self) -> None:
        while True:
            with self._wake:
                if not self._inbox:
                    return
                event = self._inbox.popleft()
            event()  # may post another, e.g. an abort by whoever takes a first token

    def _on_submit(self, request: EngineRequest, chain: TokenChain) -> None:
        with self._wake:
            self._queued -= 1
            self._counts["waiting"] += 1
        self._stepper.add(request, self._root(request.cache_salt), chain)

    def _on_abort(self, request_id: str) -> None:
        state = self._scheduler.requests.get(request_id)
        if state is None:
            return
        loading = state.stage is Stage.LOADING
        results = self._stepper.abort(state)
        self._publish_counts()
        self._outlet.abandon(request_id, loading=loading)
        self._outlet.tell(results)

    def _on_load_finished(self, request_id: str, tokens: int, first_token: int | None) -> None:
        state = self._loading(request_id)
        if state is not None:
            self._tell(self._stepper.load_finished(state, tokens, first_token))

    def _on_load_failed(self, request_id: str, reason: Reason) -> None:
        state = self._loading(request_id)
        if state is not None:
            logger.info("request %s computes its prompt: its load failed (%s)", request_id, reason)
            self._scheduler.load_failed(state, self._clock())

    def _on_release(self, blocks: Sequence[int]) -> None:
        strangers = self._scheduler.take_back(blocks)
        if strangers:
            logger.error("release_blocks: blocks %s were not at the handoff side; ignored", strangers)

    def _loading(self, request_id: str) -> RequestState | None:
        """The request, if its load is still awaited; an answer after its end is ignored."""
        state = self._scheduler.requests.get(request_id)
        return state if state is not None and state.stage is Stage.LOADING else None

    # -- small things ---------------------------------------------------------------------------------------

    def _root(self, cache_salt: str) -> bytes:
        return chain_root(self._runner.model_fingerprint, self.layout.fingerprint(), cache_salt)

    def _post(self, event: Callable[[], None]) -> None:
        with self._wake:
            if self.healthy:
                self._inbox.append(event)
                self._wake.notify()

    def _publish_counts(self) -> None:
        scheduler, pool = self._scheduler, self._pool
        counts = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "loading": len(scheduler.loading),
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free,
            "blocks_cached": pool.cached,
            "steps": self._steps,
        }
        with self._wake:
            self._counts = counts

    def _describe(self) -> str:
        """The state in one line, for logs and faults."""
        counts = ", ".join(f"{name} {count}" for name, count in self._counts.items())
        return f"{counts}, lent references {self._scheduler.lent.total()}"
