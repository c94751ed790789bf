"""What the engine core says: to the handoff side's hooks, and to whoever waits for a request's tokens.

All is said on the engine thread and in the order that `api.py` promises: what a request hands over comes
before its last output, and after that output nothing is said of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from kvhandoff.core.errors import KVHandoffError
from kvhandoff.embedded.api import EngineRequest, TokenOutput
from kvhandoff.embedded.scheduler import Plan
from kvhandoff.embedded.stepper import StepResults
from kvhandoff.engine.api import KVHooks

logger = logging.getLogger(__name__)


class EngineFault(KVHandoffError):
    """The engine found its own bookkeeping wrong; it stops rather than go on with it."""


class Outlet:
    """Knows who has still to be told of what. For the engine thread, except `open`.

    `abort` is called for a request whose output nobody takes. An exception of a hook is passed on.
    """

    def __init__(self, hooks: KVHooks | None, abort: Callable[[str], None]) -> None:
        self.hooks = hooks
        self._abort = abort
        self._lock = Lock()
        # Guarded by _lock:
        self._live: dict[str, EngineRequest] = {}  # until the last output is given out
        self._growing: set[str] = set()  # whose growing offer is neither complete nor abandoned

    def open(self, request: EngineRequest) -> None:
        """From now on the request awaits its outputs. Any thread. Raises EngineFault for an id in use."""
        with self._lock:
            if request.request_id in self._live:
                raise EngineFault(f"request {request.request_id} is in the engine already")
            self._live[request.request_id] = request
            if request.grow:
                self._growing.add(request.request_id)

    def live(self) -> list[str]:
        """Requests without their last output."""
        with self._lock:
            return list(self._live)

    def tell_plan(self, plan: Plan) -> None:
        """What was decided before a step."""
        for state in plan.abandoned:
            self.abandon(state.request.request_id)
        for state in plan.skipped:
            self._hooks.load_skipped(state.request.request_id)
        for state in plan.loading:
            self._hooks.load_allocated(state.request.request_id, tuple(state.blocks), state.cached_blocks)
        for state, blocks in plan.grown:
            self._hooks.offer_grown(state.request.request_id, blocks)
        if plan.short and self.hooks is not None:
            self.hooks.memory_short(plan.short)

    def tell(self, results: StepResults) -> None:
        """What came of a step, or of an event between two steps."""
        for request_id, blocks in results.grown:
            self._hooks.offer_grown(request_id, blocks)
        for request_id, blocks, first_token in results.offers:
            self._closes_offer(request_id)
            self._hooks.offered(request_id, blocks, first_token)
        for request_id, hashes, blocks in results.retained:
            self._hooks.retained(request_id, hashes, blocks)
        for output in results.outputs:
            self.emit(output)

    def abandon(self, request_id: str, *, loading: bool = False) -> None:
        """Nothing will come of a load under way, nor of a growing offer that is not complete."""
        if loading:
            self._hooks.load_abandoned(request_id)
        if self._closes_offer(request_id):
            self._hooks.offer_abandoned(request_id)

    def emit(self, output: TokenOutput) -> None:
        """Give one output out; of a request that has ended already, nothing."""
        last = output.finish_reason is not None
        if last:
            self.abandon(output.request_id)
        with self._lock:
            live = self._live
            request = live.pop(output.request_id, None) if last else live.get(output.request_id)
        if request is None:
            return
        try:
            request.on_output(output)
        except Exception:
            logger.exception("nobody takes the output of request %s; it ends", output.request_id)
            self._abort(output.request_id)

    def _closes_offer(self, request_id: str) -> bool:
        """Whether a growing offer was open; it is not any more."""
        with self._lock:
            was_open = request_id in self._growing
            self._growing.discard(request_id)
        return was_open

    @property
    def _hooks(self) -> KVHooks:
        if self.hooks is None:
            raise EngineFault("no hooks are set")
        return self.hooks
