"""The scheduler half: vLLM's calls become the handoff side's news, and its answers become vLLM's.

The first group of methods runs on vLLM's main thread, the second one (`EngineControl`) on any, most often
the handoff side's. What may only be done on the main thread (references on blocks) waits in a queue for
vLLM's next call, and there is one every few milliseconds while any request is about. Reports of ended loads
wait for no step: they go out from where they come up.

Nothing that a client sends raises here: an exception on vLLM's main thread ends the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.tickets import BadTicket
from kvhandoff.vllm import outgoing, progress
from kvhandoff.vllm.identity import chain_salt, has_token_ids
from kvhandoff.vllm.idle import IdleWait
from kvhandoff.vllm.leg import VllmKVRequest, VllmLeg
from kvhandoff.vllm.memory import MemoryWatch
from kvhandoff.vllm.references import BlockReferences
from kvhandoff.vllm.requests import LoadAction, LoadEvent, Tracked
from kvhandoff.vllm.shapes import BlockPool, Request, SchedulerOutput
from kvhandoff.vllm.side import Side

_log = logging.getLogger(__name__)

_FINISH_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_ERROR": "error",
}


class SchedulerHalf:
    """Implements `engine.api.EngineControl`."""

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        model_fingerprint: str,
        max_model_len: int,
        *,
        reports_failures: bool,
        prefix_caching: bool = True,
        clock: Clock = monotonic,
    ) -> None:
        """`reports_failures`: this vLLM can be told that a whole load failed; else all its blocks are bad."""
        self.layout = layout
        self.max_model_len = max_model_len
        self.healthy = True
        self._pool = pool
        self._fingerprint = model_fingerprint
        self._reports_failures = reports_failures
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._connected: Side | None = None
        self._references = BlockReferences(pool)
        self._progress = progress.Progress()
        self._memory = MemoryWatch(pool, self._references, layout.block_size)
        self._legs: dict[str, Tracked] = {}
        """Requests with a leg."""
        self._leaders: dict[str, Tracked] = {}
        """Requests with a leg, by ticket."""
        self._idle = IdleWait()
        self._lock = threading.Lock()
        """Guards the loads' states, and these three."""
        self._requests: dict[str, Tracked] = {}
        self._fencing: dict[int, Tracked] = {}
        """By block that something may still land in."""
        self._returned: deque[Sequence[int]] = deque()

    def connect(self, side: Side) -> None:
        """Before any request."""
        self._connected = side

    # ---------------------------------------------------------------------------- vLLM's calls (main thread)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self._drain()
        self._idle.busy()
        tracked = Tracked(request)
        params = request.kv_transfer_params
        signed = params.get("ticket") if isinstance(params, dict) else None
        if signed is not None:
            self._obey(tracked, signed)
        with self._lock:
            self._requests[request.request_id] = tracked
        if tracked.leg is None:
            return
        if self._side.enter(tracked.leg):
            self._legs[request.request_id] = tracked
        else:
            self._make_plain(tracked)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens vLLM should leave to a load, beyond `local_tokens` (whole blocks of its own cache),
        and whether they come while it does something else. None: it asks again."""
        self._drain()
        tracked = self._requests[request.request_id]
        self._notice_preemption(tracked)
        tracked.local_tokens = local_tokens
        if self._prefix_caching and tracked.leader is not None and tracked.leader.load_under_way:
            return None, False
        self._memory.looked_at(tracked)
        external = tracked.external_tokens(local_tokens, self.layout.block_size)
        return external, external > 0

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """vLLM has allocated: for a load of so many tokens, or (0) for a step. `blocks`: all it has now."""
        tracked = self._requests[request.request_id]
        self._memory.placed(request.request_id)
        now = self._clock()
        if tracked.kv is not None:
            tracked.kv.stats.admitted_at = tracked.kv.stats.admitted_at or now
        if external_tokens > 0:
            self._lend(tracked, blocks, external_tokens)
            return
        with self._lock:
            action = tracked.take(LoadEvent.RAN)
        progress.begin(tracked, now)
        if action is LoadAction.SKIP:
            self._side.hooks.load_skipped(request.request_id)
        if tracked.kv is not None:
            there = max(tracked.local_tokens, tracked.loaded_tokens)
            outgoing.grow(tracked, there, blocks, self._side, self._references)

    def planned(self, output: SchedulerOutput) -> int:
        """The next step. Returns the number that goes with it; 0 if it computes nothing."""
        self._drain()
        for tracked in self._legs.values():
            self._notice_preemption(tracked)
        step = self._progress.planned(output, self._legs)
        loads = [tracked for tracked in self._legs.values() if tracked.holds_load]
        self._memory.planned(len(output.num_scheduled_tokens), loads, self._side.hooks)
        if step:
            self._idle.busy()
        elif any(tracked.lends for tracked in loads):
            self._idle.wait()
        return step

    def done(self, step: int) -> None:
        """All steps up to this one have come back: what they computed is in the blocks."""
        self._drain()
        for chunk in self._progress.done(step):
            tracked = chunk.tracked
            if tracked.request.request_id in self._legs:
                outgoing.grow(tracked, chunk.computed, chunk.blocks, self._side, self._references)
                progress.advance(tracked, chunk.computed, self._clock())

    def finished(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """A request has ended. `blocks` hold its computed tokens, and are still its own. Returns what its
        answer carries as `kv_transfer_params`."""
        self._drain()
        request_id = request.request_id
        with self._lock:
            tracked = self._requests.pop(request_id)
            action = tracked.take(LoadEvent.FINISHED)
            for block in tracked.fences:
                self._fencing.pop(block, None)
        self._memory.placed(request_id)
        if action is LoadAction.ABANDON:
            self._side.hooks.load_abandoned(request_id)
        if action in (LoadAction.ABANDON, LoadAction.REPORT_ENDED):
            self._side.report(request_id, failed=False, bad_blocks=())
        if tracked.leg is None:
            return None if tracked.refused is None else {"error": tracked.refused}
        return self._end_leg(tracked, tracked.leg, blocks)

    def frees_are_coming(self) -> bool:
        """A running request lacks a block: whether it should go without for a step, instead of preempting
        another, since some that are merely kept may come back."""
        self._drain()
        return self._memory.lacking(self._side.hooks)

    def reset(self) -> None:
        """Give up all that is merely kept."""
        self._side.hooks.memory_short(self._pool.num_gpu_blocks)

    # ------------------------------------------------------------------------- EngineControl (any thread)

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain:
        """See `EngineControl`."""
        return TokenChain.of(self._root(cache_salt), self.layout.block_size, token_ids)

    def load_finished(self, request_id: str, tokens: int, first_token: int | None = None) -> None:
        """See `EngineControl`. vLLM takes tokens only from its own model: `first_token` has no use."""
        bad: Sequence[int] = ()
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.take(LoadEvent.LOADED) is not LoadAction.REPORT_LOADED:
                return
            self._returned.append(tracked.targets)
            tracked.loaded_tokens = tracked.awaited_tokens
            if tokens < tracked.awaited_tokens:  # the rest is computed in the same blocks
                kept = max(tokens // self.layout.block_size, tracked.cached_blocks)
                tracked.loaded_tokens = kept * self.layout.block_size
                bad = tracked.blocks[kept:]
        self._side.report(request_id, failed=False, bad_blocks=bad)
        self._idle.news()

    def load_failed(self, request_id: str, reason: Reason) -> None:
        """See `EngineControl`. Also for a request that has no blocks yet, and repeatedly."""
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None:
                return
            in_place = not self._reports_failures and tracked.cached_blocks > 0
            action = tracked.take(LoadEvent.MISSED, in_place=in_place)
            if in_place and tracked.lends and not tracked.fences:
                tracked.fences = set(tracked.targets)
                self._fencing.update(dict.fromkeys(tracked.targets, tracked))
        if action is LoadAction.REPORT_FAILED:
            self._report_failed(tracked)

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """See `EngineControl`."""
        fenced: list[Tracked] = []
        with self._lock:
            self._returned.append(blocks)
            for block in blocks:
                tracked = self._fencing.pop(block, None)
                if tracked is None:
                    continue
                tracked.fences.discard(block)
                if not tracked.fences and tracked.take(LoadEvent.FENCED) is LoadAction.REPORT_FAILED:
                    fenced.append(tracked)
        for tracked in fenced:
            self._report_failed(tracked)
        self._idle.news()

    def load(self) -> dict[str, Any]:
        """See `EngineControl`. Idle content counts as free: vLLM tells the two apart only block by block."""
        with self._lock:
            status = [tracked.request.status.name for tracked in self._requests.values()]
            coming = self._references.idle_without(block for blocks in self._returned for block in blocks)
        running, loading = status.count("RUNNING"), status.count("WAITING_FOR_REMOTE_KVS")
        return {
            "running": running,
            "loading": loading,
            "waiting": len(status) - running - loading,
            "blocks_total": self._pool.num_gpu_blocks - 1,  # without the null block
            "blocks_free": self._pool.get_num_free_blocks() + coming,
            "blocks_cached": 0,
            "steps": self._progress.step,
        }

    # ------------------------------------------------------------------------------------------- the rest

    def _obey(self, tracked: Tracked, signed: object) -> None:
        """Make the leg that the ticket asks for, or leave the request a plain one."""
        request = tracked.request
        if isinstance(signed, str) and signed in self._leaders:
            tracked.leader = self._leaders[signed]
            return
        try:
            ticket = self._side.admit(signed)
            if (request.cache_salt or "") != ticket.cache_salt:
                raise BadTicket("the ticket's cache_salt is not the body's")
        except BadTicket as error:
            self._refuse(tracked, "bad_ticket", error.message)
            return
        if not has_token_ids(request):
            self._refuse(tracked, "unsupported_prompt", "its prompt is more, or other, than token ids")
            return
        assert request.prompt_token_ids is not None, "has_token_ids says so"
        tracked.kv = VllmKVRequest(
            request.request_id,
            request.prompt_token_ids,
            cache_salt=chain_salt(request),
            prompt_logprobs=request.skip_reading_prefix_cache,
        )
        tracked.kv.stats.prompt_tokens = len(request.prompt_token_ids)
        tracked.leg = VllmLeg(self._side.host, ticket.key.handoff_id, ticket)
        tracked.leg.prepare(tracked.kv)
        tracked.root = self._root(tracked.kv.cache_salt)
        tracked.offers = tracked.kv.offer
        if tracked.kv.load:
            tracked.want()
        assert isinstance(signed, str), "admitted"
        tracked.ticket = signed
        self._leaders[signed] = tracked

    def _make_plain(self, tracked: Tracked) -> None:
        """Nobody would bring it anything, or take what it offers."""
        if tracked.ticket is not None:
            del self._leaders[tracked.ticket]
        plain = Tracked(tracked.request)
        self._refuse(plain, "handoff_ended", "the handoff side of this engine has ended")
        with self._lock:
            self._requests[plain.request.request_id] = plain

    def _refuse(self, tracked: Tracked, code: str, why: str) -> None:
        _log.warning("request %s is served alone: %s", tracked.request.request_id, why)
        self._side.refused()
        tracked.refused = code

    def _lend(self, tracked: Tracked, blocks: Sequence[int], external_tokens: int) -> None:
        """Hand the awaited blocks to the handoff side."""
        size = self.layout.block_size
        with self._lock:
            tracked.take(LoadEvent.ALLOCATED)
            tracked.cached_blocks = tracked.local_tokens // size
            tracked.awaited_tokens = tracked.local_tokens + external_tokens
            tracked.blocks = list(blocks[: -(-tracked.awaited_tokens // size)])
        self._references.take(tracked.targets)
        request_id = tracked.request.request_id
        self._side.hooks.load_allocated(request_id, tuple(tracked.blocks), tracked.cached_blocks)

    def _report_failed(self, tracked: Tracked) -> None:
        bad = () if self._reports_failures else tracked.targets
        self._side.report(tracked.request.request_id, failed=self._reports_failures, bad_blocks=bad)
        self._idle.news()

    def _notice_preemption(self, tracked: Tracked) -> None:
        """A request that was preempted has lost its blocks."""
        if tracked.kv is None or tracked.preemptions == tracked.request.num_preemptions:
            return
        tracked.preemptions = tracked.kv.stats.preemptions = tracked.request.num_preemptions
        tracked.loaded_tokens = 0
        outgoing.abandon(tracked, self._side)

    def _end_leg(self, tracked: Tracked, leg: VllmLeg, blocks: Sequence[int]) -> dict[str, Any] | None:
        request = tracked.request
        del self._legs[request.request_id]
        if tracked.ticket is not None:
            del self._leaders[tracked.ticket]
        self._notice_preemption(tracked)
        output = request.output_token_ids
        if output and request.status.name in outgoing.PROMPT_IS_COMPUTED:
            # The step that ends a request comes back to it before it comes back as done.
            progress.advance(tracked, request.num_computed_tokens, self._clock())
        answer = outgoing.end(tracked, leg, blocks, self._side, self._references)
        self._side.finish(leg, _FINISH_REASONS[request.status.name], len(output))
        return answer

    def _drain(self) -> None:
        """Give vLLM the references that have ended."""
        with self._lock:
            returned, self._returned = self._returned, deque()
        for blocks in returned:
            strangers = self._references.give_back(blocks)
            if strangers:
                _log.error("blocks %s were not at the handoff side; ignored", strangers)

    def _root(self, cache_salt: str) -> bytes:
        return chain_root(self._fingerprint, self.layout.fingerprint(), cache_salt)

    @property
    def _side(self) -> Side:
        assert self._connected is not None, "connected before any request"
        return self._connected
