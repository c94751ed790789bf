"""The scheduler half: vLLM's calls become the handoff side's news, and its answers become vLLM's.

Every method named in `KVHandoffConnector` (`connector.py`) runs on vLLM's main thread; those of `EngineControl`
run on any thread, most often the handoff side's. What may only be done on the main thread (references on blocks)
waits in a queue for the next call of vLLM's, and there is one at least every few milliseconds while any request
is about. Reports of ended loads don't wait for a step: they go out from where they come up.

Nothing that a client sends raises here: an exception on this thread ends the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvhandoff.core.chain import TokenChain, chain_root, next_hash
from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.engine.api import KVHooks
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.engine.offering import descriptor_of
from kvhandoff.handoff.tickets import BadTicket, Ticket
from kvhandoff.vllm.identity import chain_salt, has_token_ids
from kvhandoff.vllm.leg import VllmKVRequest, VllmLeg
from kvhandoff.vllm.progress import Chunk, Progress
from kvhandoff.vllm.references import BlockReferences
from kvhandoff.vllm.requests import LoadAction, LoadEvent, Tracked
from kvhandoff.vllm.shapes import BlockPool, Request, SchedulerOutput

_log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.002
"""With nothing to compute and a load under way vLLM's loop spins; a step then waits this long for news."""

PATIENCE_STEPS = 3
"""So many steps a running request goes without a block, rather than preempting another, while blocks that are
merely kept are being given back."""

_FINISH_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_ERROR": "error",
}
_PROMPT_IS_COMPUTED = frozenset({"FINISHED_STOPPED", "FINISHED_REPETITION", "FINISHED_LENGTH_CAPPED"})


class Handoff(Protocol):
    """What the scheduler half needs of whoever drives the handoff side. Thread-safe, none blocks."""

    @property
    def hooks(self) -> KVHooks: ...
    @property
    def host(self) -> LegHost: ...
    def admit(self, signed: object) -> Ticket:
        """The ticket to a leg. Raises BadTicket."""
        ...

    def refused(self) -> None:
        """A ticket was not obeyed: count it."""
        ...

    def enter(self, leg: VllmLeg) -> None:
        """vLLM has the leg's request."""
        ...

    def finish(self, leg: VllmLeg, finish_reason: str, completion_tokens: int) -> None:
        """vLLM is done with the leg's request. Behind all the hooks' calls for it."""
        ...

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        """Have every worker say that the load has ended."""
        ...


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
        clock: Clock = monotonic,
    ) -> None:
        """`reports_failures`: this vLLM can be told that a whole load failed; else all its blocks are bad."""
        self.layout = layout
        self.max_model_len = max_model_len
        self.healthy = True
        self._pool = pool
        self._fingerprint = model_fingerprint
        self._reports_failures = reports_failures
        self._clock = clock
        self._handoff: Handoff | None = None
        self._references = BlockReferences(pool)
        self._progress = Progress()
        self._lock = threading.Lock()
        """Guards the three below."""
        self._requests: dict[str, Tracked] = {}
        self._fencing: dict[int, Tracked] = {}
        """By block that something may still land in."""
        self._returned: deque[Sequence[int]] = deque()
        self._news = threading.Event()
        self._legs: dict[str, Tracked] = {}
        """Those of `_requests` that have a leg."""
        self._leaders: dict[str, Tracked] = {}
        """By ticket, while their request lives."""
        self._asked: dict[str, Tracked] = {}
        """Requests that vLLM looked at since the last step."""
        self._running = 0
        """Requests of the last step."""
        self._patience = PATIENCE_STEPS
        self._lacking = False
        """Whether a running request lacked a block since the last step."""

    def connect(self, handoff: Handoff) -> None:
        """Before any request."""
        self._handoff = handoff

    # ---------------------------------------------------------------------------- vLLM's calls (main thread)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self.drain()
        tracked = Tracked(request)
        params = request.kv_transfer_params
        signed = params.get("ticket") if isinstance(params, dict) else None
        if signed is not None:
            self._obey(tracked, signed)
        with self._lock:
            self._requests[request.request_id] = tracked
        if tracked.leg is not None:
            self._legs[request.request_id] = tracked
            self._side.enter(tracked.leg)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` (whole blocks, of its own cache) vLLM should leave to a load, and
        whether it comes by and by. None: ask again."""
        self.drain()
        tracked = self._requests[request.request_id]
        self._notice_preemption(tracked)
        tracked.local_tokens = local_tokens
        leader = tracked.leader
        if leader is not None and leader.load_under_way:
            return None, False
        self._asked[request.request_id] = tracked
        external = tracked.external_tokens(local_tokens, self.layout.block_size)
        return external, external > 0

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """vLLM has allocated `blocks`: for a load of so many tokens, or (0) for a step."""
        tracked = self._requests[request.request_id]
        self._asked.pop(request.request_id, None)
        now = self._clock()
        if tracked.kv is not None:
            tracked.kv.stats.admitted_at = tracked.kv.stats.admitted_at or now
        if external_tokens > 0:
            self._lend(tracked, blocks, external_tokens)
            return
        with self._lock:
            action = tracked.take(LoadEvent.RAN)
        if tracked.kv is None:
            return
        self._account(tracked, now)
        if action is LoadAction.SKIP:
            self._side.hooks.load_skipped(request.request_id)
        self._grow(tracked, max(tracked.local_tokens, tracked.loaded_tokens), blocks)

    def planned(self, output: SchedulerOutput) -> int:
        """The next step. Returns the number that goes with it; 0 if it computes nothing."""
        self.drain()
        for tracked in self._legs.values():
            self._notice_preemption(tracked)
        step = self._progress.planned(output, self._legs)
        self._running = len(output.num_scheduled_tokens)
        self._want_memory()
        if not step and self._loads_under_way():
            self._news.wait(IDLE_WAIT_S)
            self._news.clear()
            self.drain()
        return step

    def done(self, step: int) -> None:
        """All steps up to this one have come back: what they computed is in the blocks."""
        self.drain()
        for chunk in self._progress.done(step):
            if chunk.tracked.request.request_id in self._requests:
                self._computed(chunk)

    def finished(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """A request has ended. `blocks`: those of its computed tokens, still its own. Returns what its answer
        carries as `kv_transfer_params`."""
        self.drain()
        with self._lock:
            tracked = self._requests.pop(request.request_id)
            action = tracked.take(LoadEvent.FINISHED)
            for block in tracked.fences:
                self._fencing.pop(block, None)
        self._asked.pop(request.request_id, None)
        self._legs.pop(request.request_id, None)
        if tracked.ticket is not None:
            del self._leaders[tracked.ticket]
        if action is LoadAction.ABANDON:
            self._side.hooks.load_abandoned(request.request_id)
        if action in (LoadAction.ABANDON, LoadAction.REPORT_ENDED):
            self._side.report(request.request_id, failed=False, bad_blocks=())
        if tracked.refused is not None:
            return {"error": tracked.refused}
        if tracked.leg is None:
            return None
        return self._end_leg(tracked, tracked.leg, blocks)

    def frees_are_coming(self) -> bool:
        """A running request lacks a block: whether it should wait for some that are merely kept, instead of
        preempting another."""
        self.drain()
        self._lacking = True
        if not self._references.blocks or self._patience == 0:
            return False
        self._side.hooks.memory_short(max(1, self._running))
        return True

    def reset(self) -> None:
        """Give up all that is merely kept."""
        self._side.hooks.memory_short(self._pool.num_gpu_blocks)

    def drain(self) -> None:
        """Do what had to wait for this thread."""
        with self._lock:
            returned, self._returned = self._returned, deque()
        for blocks in returned:
            strangers = self._references.give_back(blocks)
            if strangers:
                _log.error("blocks %s were not at the handoff side; ignored", strangers)

    # ------------------------------------------------------------------------- EngineControl (any thread)

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain:
        """See `EngineControl`."""
        root = chain_root(self._fingerprint, self.layout.fingerprint(), cache_salt)
        return TokenChain.of(root, self.layout.block_size, token_ids)

    def load_finished(self, request_id: str, tokens: int, first_token: int | None = None) -> None:
        """See `EngineControl`. vLLM takes tokens only from its own model: `first_token` has no use."""
        with self._lock:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.take(LoadEvent.LOADED) is not LoadAction.REPORT_LOADED:
                return
            tracked.loaded_tokens = min(tokens, tracked.awaited_tokens)
            self._returned.append(tracked.targets)
            bad: Sequence[int] = ()
            if tokens < tracked.awaited_tokens:  # the rest is computed in place
                kept = max(tokens // self.layout.block_size, tracked.cached_blocks)
                tracked.loaded_tokens = kept * self.layout.block_size
                bad = tracked.blocks[kept:]
        self._side.report(request_id, failed=False, bad_blocks=bad)
        self._news.set()

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
        self._news.set()

    def load(self) -> dict[str, Any]:
        """See `EngineControl`. Blocks with idle content count as free: vLLM tells them apart only one by one."""
        with self._lock:
            status = [tracked.request.status.name for tracked in self._requests.values()]
            coming = self._references.idle_without(block for blocks in self._returned for block in blocks)
        running, loading = status.count("RUNNING"), status.count("WAITING_FOR_REMOTE_KVS")
        return {
            "running": running,
            "loading": loading,
            "waiting": len(status) - running - loading,
            "blocks_total": self._pool.num_gpu_blocks - 1,
            "blocks_free": self._pool.get_num_free_blocks() + coming,
            "blocks_cached": 0,
        }

    # ------------------------------------------------------------------------------------------- a request

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
            _log.warning("request %s is served alone: %s", request.request_id, error.message)
            self._side.refused()
            tracked.refused = error.code
            return
        if not has_token_ids(request):
            tracked.refused = "unsupported_prompt"
            return
        assert request.prompt_token_ids is not None, "has_token_ids says so"
        tracked.kv = VllmKVRequest(
            request.request_id,
            request.prompt_token_ids,
            cache_salt=chain_salt(request),
            prompt_logprobs=request.skip_reading_prefix_cache,
        )
        tracked.kv.stats.prompt_tokens = len(request.prompt_token_ids)
        leg = tracked.leg = VllmLeg(self._side.host, ticket.key.handoff_id, ticket)
        leg.prepare(tracked.kv)
        tracked.offers = tracked.kv.offer
        if tracked.kv.load:
            tracked.want()
        if isinstance(signed, str):
            tracked.ticket = signed
            self._leaders[signed] = tracked

    def _lend(self, tracked: Tracked, blocks: Sequence[int], external_tokens: int) -> None:
        """Hand the awaited blocks to the handoff side."""
        with self._lock:
            tracked.take(LoadEvent.ALLOCATED)
            size = self.layout.block_size
            tracked.cached_blocks = tracked.local_tokens // size
            tracked.awaited_tokens = tracked.local_tokens + external_tokens
            tracked.blocks = list(blocks[: -(-tracked.awaited_tokens // size)])
        self._references.take(tracked.targets)
        self._side.hooks.load_allocated(
            tracked.request.request_id, tuple(tracked.blocks), tracked.cached_blocks
        )

    def _report_failed(self, tracked: Tracked) -> None:
        bad = () if self._reports_failures else tracked.targets
        self._side.report(tracked.request.request_id, failed=self._reports_failures, bad_blocks=bad)
        self._news.set()

    def _account(self, tracked: Tracked, now: float) -> None:
        """Where the prompt's KV comes from, as far as it is there when the request begins to run."""
        assert tracked.kv is not None, "of legs only"
        stats = tracked.kv.stats
        if stats.prefilled_at:
            return
        stats.runnable_at = now
        stats.cached_tokens = tracked.local_tokens
        loaded = min(tracked.loaded_tokens, stats.prompt_tokens - 1)
        stats.transferred_tokens = max(0, loaded - tracked.local_tokens)
        stats.computed_tokens = stats.prompt_tokens - stats.cached_tokens - stats.transferred_tokens

    def _computed(self, chunk: Chunk) -> None:
        tracked = chunk.tracked
        assert tracked.kv is not None, "of legs only"
        tracked.kv.stats.prefill_chunks += 1
        self._grow(tracked, chunk.computed, chunk.blocks)
        self._prefilled(tracked, chunk.computed)

    def _prefilled(self, tracked: Tracked, computed: int) -> None:
        """The prompt's last token is computed, and the first one after it sampled."""
        kv, leg = tracked.kv, tracked.leg
        assert kv is not None and leg is not None, "of legs only"
        if computed >= kv.stats.prompt_tokens and not kv.stats.prefilled_at:
            kv.stats.prefilled_at = leg.first_token_at = self._clock()

    def _grow(self, tracked: Tracked, computed: int, blocks: Sequence[int]) -> None:
        """Hand over the prompt's next full blocks, of an offer that grows."""
        kv = tracked.kv
        if kv is None or not kv.grow or not tracked.offers:
            return
        full = min(computed, kv.stats.prompt_tokens) // self.layout.block_size
        grown = list(blocks[tracked.offered_blocks : full])
        if grown:
            tracked.offered_blocks = full
            self._references.take(grown)
            self._side.hooks.offer_grown(kv.request_id, grown)

    def _notice_preemption(self, tracked: Tracked) -> None:
        """A request that was preempted has lost its blocks."""
        if tracked.kv is None or tracked.preemptions == tracked.request.num_preemptions:
            return
        tracked.preemptions = tracked.request.num_preemptions
        tracked.loaded_tokens = 0
        tracked.kv.stats.preemptions = tracked.preemptions
        if tracked.kv.grow and tracked.offers:
            tracked.offers = False
            self._side.hooks.offer_abandoned(tracked.kv.request_id)

    def _end_leg(self, tracked: Tracked, leg: VllmLeg, blocks: Sequence[int]) -> dict[str, Any] | None:
        request, kv = tracked.request, tracked.kv
        assert kv is not None, "a leg has it"
        status = request.status.name
        output = request.output_token_ids
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        params = None
        self._notice_preemption(tracked)
        if output and status in _PROMPT_IS_COMPUTED:
            self._prefilled(tracked, computed)
        if tracked.offers:
            if output and status in _PROMPT_IS_COMPUTED and computed >= kv.stats.prompt_tokens:
                params = self._offer(tracked, leg, blocks, output[0])
            elif kv.grow:
                self._side.hooks.offer_abandoned(request.request_id)
        elif leg.role == "prefill":
            params = {"offer": None, "prompt_token_ids": list(kv.prompt_token_ids)}
        if kv.retain and output and status != "FINISHED_ERROR":
            self._retain(tracked, blocks, min(computed, len(request.all_token_ids) - 1))
        self._side.finish(leg, _FINISH_REASONS[status], len(output))
        return params

    def _offer(
        self, tracked: Tracked, leg: VllmLeg, blocks: Sequence[int], first_token: int
    ) -> dict[str, Any]:
        kv = tracked.kv
        assert kv is not None and kv.chain is not None, "prepared"
        tracked.offers = False
        mine = list(blocks[: kv.chain.n_blocks])
        rest = mine[tracked.offered_blocks :]
        self._references.take(rest)
        cached = kv.stats.cached_tokens + kv.stats.transferred_tokens
        offer = descriptor_of(self._side.host, leg.key, kv.chain, mine, first_token, cached)
        self._side.hooks.offered(kv.request_id, rest, first_token)
        return {"offer": msgspec.to_builtins(offer), "prompt_token_ids": list(kv.prompt_token_ids)}

    def _retain(self, tracked: Tracked, blocks: Sequence[int], tokens: int) -> None:
        """Keep the full blocks of prompt and answer for the next turn."""
        kv = tracked.kv
        assert kv is not None and kv.chain is not None, "prepared"
        size = self.layout.block_size
        hashes = list(kv.chain.blocks)
        full = min(tokens // size, len(blocks))
        if not full:
            return
        root = chain_root(self._fingerprint, self.layout.fingerprint(), kv.cache_salt)
        for start in range(len(hashes) * size, full * size, size):
            previous = hashes[-1] if hashes else root
            hashes.append(next_hash(previous, tracked.request.all_token_ids[start : start + size]))
        self._references.take(blocks[:full])
        self._side.hooks.retained(kv.request_id, hashes[:full], list(blocks[:full]))

    # --------------------------------------------------------------------------------------------- memory

    def _want_memory(self) -> None:
        """Have what is merely kept given back, when vLLM's oldest waiting request finds too few blocks, or when
        fewer are left than there are requests that may need one."""
        asked, self._asked = self._asked, {}
        self._patience = max(0, self._patience - 1) if self._lacking else PATIENCE_STEPS
        self._lacking = False
        if not self._references.blocks:
            return
        running, free = self._running, self._pool.get_num_free_blocks()
        short = running - free
        if asked:
            first = next(iter(asked.values()))
            wanted = first.request.num_tokens - first.local_tokens
            short = max(short, -(-wanted // self.layout.block_size) + running - free)
            if not running and not self._loads_under_way():
                short = max(short, 1)  # nothing else will end and make room
        if short > 0:
            self._side.hooks.memory_short(short)

    def _loads_under_way(self) -> bool:
        return any(tracked.lends for tracked in self._legs.values())

    @property
    def _side(self) -> Handoff:
        assert self._handoff is not None, "connected before any request"
        return self._handoff
