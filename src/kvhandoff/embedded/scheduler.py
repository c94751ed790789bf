"""Which request computes what in the next step, and in which blocks.

Pure bookkeeping: no model, no threads, no clock. A request is `waiting` (no blocks), `loading` (its blocks
are allocated, the handoff side fills some of them) or `running` (its blocks are its own). All three keep
their order of arrival, and age decides everywhere:

- **A step** computes the running requests, at most `max_num_seqs`, oldest first: one token of each that
  decodes, and chunks of those whose prompt is not done, up to `max_step_tokens` prompt tokens a step.
- **A chunk** ends at the prompt's end or at a multiple of `max_step_tokens` counted from position 0, whatever
  runs beside it: the same prompt is always computed in the same pieces. A chunk that does not fit in what
  others left of the budget waits for the next step.
- **Admission** takes the waiting requests strictly in order, while there is budget left for their first
  chunk, and allocates all blocks of the prompt at once. It leaves one block for each request that may still
  grow, so that admitting one doesn't force out another right after; an empty engine needs no such reserve.
- **Loads** need no budget. They don't take the places of running requests, so that a peer that doesn't
  answer slows nobody down; there are never more than `max_num_seqs` of them beyond the batch.
- **Preemption**: a request that needs a block when none is to be had takes those of the youngest running one.
  That one keeps its tokens, waits, and is recomputed. A request never gives way to a younger one.
- **Short of blocks** is a plan in which the oldest waiting request finds too few, or which leaves less than
  the reserve. The handoff side is told each time, and gives up what it merely retains. Since the reserve
  counts, it hears of it while there are blocks left for the running ones, before one of them is preempted.

Why nobody waits for ever: the oldest running request can take the blocks of all other running ones, and no
request is accepted that does not fit in the whole pool. What remains are blocks at the handoff side (loads,
offers), and each of those ends by a deadline (rule 3); until then the request keeps its place and its blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain, next_hash
from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded.api import EngineRequest
from kvhandoff.embedded.pool import BlockPool
from kvhandoff.embedded.request_state import RequestState, Stage


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one request, from `state.computed` on, to be computed in the next step."""

    state: RequestState
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last token known so far is among them, so that the next one can be sampled."""
        return self.state.computed + self.count == len(self.state.tokens)


@dataclass(slots=True)
class Plan:
    """What `Scheduler.plan` decided. The hooks hear of all but `chunks` before the step runs."""

    chunks: list[Chunk] = field(default_factory=list)
    loading: list[RequestState] = field(default_factory=list)
    """Requests whose load was admitted."""
    skipped: list[RequestState] = field(default_factory=list)
    """Requests that run without the load they were submitted with."""
    grown: list[tuple[RequestState, list[int]]] = field(default_factory=list)
    """Growing offers whose first blocks are in the prefix cache; the references are lent already."""
    abandoned: list[RequestState] = field(default_factory=list)
    """Requests preempted before their growing offer was complete; they offer nothing more."""
    short: int = 0
    """So many more blocks would have to be free for the oldest waiting request and the reserve."""


class Scheduler:
    """Decides; the engine core acts. Owned by the engine thread.

    Raises ConfigError when a bound is not positive.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int = 16, max_step_tokens: int = 512) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, allowed is 1 or more")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.loading: list[RequestState] = []
        self.running: list[RequestState] = []
        self._queues = {
            Stage.WAITING: self.waiting,
            Stage.LOADING: self.loading,
            Stage.RUNNING: self.running,
        }
        self.lent: Counter[int] = Counter()
        """References that the handoff side holds beyond running loads: offers, retained turns, and failed or
        abandoned loads."""
        self._arrivals = 0

    def add(self, request: EngineRequest, root: bytes, chain: TokenChain) -> RequestState:
        """Queue a request whose prompt has this chain, with this root."""
        state = RequestState(
            request=request,
            arrival=self._arrivals,
            root=root,
            hashes=list(chain.blocks),
            tokens=list(request.prompt_token_ids),
            load_wanted=request.load,
            offers=request.offer,
        )
        self._arrivals += 1
        self.requests[request.request_id] = state
        self.waiting.append(state)
        request.stats.prompt_tokens = state.prompt_tokens
        return state

    def plan(self, now: float) -> Plan:
        """The next step. Changes who has which blocks; nothing is computed yet."""
        plan = Plan()
        budget = self.max_step_tokens
        active = self.running[: self.max_num_seqs]
        for state in active:
            # An older one may have preempted it since.
            decodes = state.stage is Stage.RUNNING and state.computed + 1 == len(state.tokens)
            if decodes and self._make_room(state, plan):
                plan.chunks.append(Chunk(state, 1))
        for state in active:
            if state.stage is Stage.RUNNING and state.computed + 1 < len(state.tokens):
                count = self._chunk_length(state.computed, len(state.tokens))
                if count > budget:
                    budget = 0  # nor does a younger one get what is left
                    break
                plan.chunks.append(Chunk(state, count))
                budget -= count
        self._admit(plan, budget, now)
        plan.short = max(plan.short, self._reserve() - self.pool.available(), 0)
        return plan

    def advance(self, state: RequestState, count: int) -> None:
        """The KV of `count` more tokens is in the request's blocks: full blocks become findable."""
        if state.generated == 0:
            state.request.stats.computed_tokens += count
            state.request.stats.prefill_chunks += 1
        state.computed += count
        self._publish(state)

    def append(self, state: RequestState, token_id: int) -> None:
        """A token was generated."""
        state.tokens.append(token_id)
        size = self.pool.block_size
        if len(state.tokens) % size == 0:
            previous = state.hashes[-1] if state.hashes else state.root
            state.hashes.append(next_hash(previous, state.tokens[-size:]))

    def grow_offer(self, state: RequestState) -> list[int]:
        """The prompt's full blocks that a growing offer was not given yet, one reference on each of them lent
        to the handoff side. None for a request without such an offer."""
        if not state.offer_grows:
            return []
        return self._offer_up_to(state, state.computed // self.pool.block_size)

    def offer(self, state: RequestState) -> list[int]:
        """The prompt's blocks that were not offered yet, one reference on each of them lent. Completes the
        offer."""
        blocks = self._offer_up_to(state, self._blocks_for(state.prompt_tokens))
        state.offers = False
        return blocks

    def retain(self, state: RequestState) -> tuple[list[bytes], list[int]]:
        """The full computed blocks of a request that has its first token, and their hashes; one reference on
        each of them lent. To be called before `end`."""
        full = state.computed // self.pool.block_size if state.generated else 0
        self._lend(state.blocks[:full])
        return state.hashes[:full], state.blocks[:full]

    def load_finished(
        self, state: RequestState, tokens: int, now: float, *, first_token: bool = False
    ) -> None:
        """The awaited blocks are the request's again, and hold the KV of the first `tokens` tokens.

        `first_token`: the token after the whole prompt is known, and is appended next. Otherwise the last
        prompt token is computed here in any case, for its logits.
        """
        most = state.prompt_tokens if first_token else state.prompt_tokens - 1
        state.computed = max(state.computed, min(tokens, most))
        stats = state.request.stats
        stats.transferred_tokens = state.computed - stats.cached_tokens
        stats.runnable_at = now
        self._move(state, Stage.RUNNING)
        self._publish(state)

    def load_failed(self, state: RequestState, now: float) -> None:
        """The awaited blocks stay with the handoff side; the request waits for others."""
        self._release(state)
        state.request.stats.runnable_at = now
        self._move(state, Stage.WAITING)

    def end(self, state: RequestState) -> None:
        """Forget a request; its blocks are released, save those that a load awaits: they are lent."""
        self._release(state)
        self._queues[state.stage].remove(state)
        del self.requests[state.request.request_id]

    def take_back(self, blocks: Sequence[int]) -> list[int]:
        """Release lent references. Returns the blocks that were not lent (any more): nothing is done to
        them, since a second release would take them from an owner."""
        strangers = []
        for block in reversed(blocks):
            if self.lent[block] == 0:
                strangers.append(block)
                continue
            self.lent[block] -= 1
            if self.lent[block] == 0:
                del self.lent[block]
            self.pool.release([block])
        return strangers

    def _admit(self, plan: Plan, budget: int, now: float) -> None:
        while self.waiting:
            state = self.waiting[0]
            if not self._has_place(state):
                return
            cached = self._match(state)
            loads = self._loads(state, len(cached))
            count = self._chunk_length(len(cached) * self.pool.block_size, len(state.tokens))
            if count > budget and not loads:
                return
            plan.short = self._missing(state, cached)
            if plan.short > 0:
                return
            self._allocate(state, cached, now)
            if loads:
                self._move(state, Stage.LOADING)
                plan.loading.append(state)
            else:
                self._move(state, Stage.RUNNING)
                if state.load_wanted:
                    plan.skipped.append(state)
                if len(plan.chunks) < self.max_num_seqs:
                    plan.chunks.append(Chunk(state, count))
                    budget -= count
            state.load_wanted = False
            grown = self.grow_offer(state)
            if grown:
                plan.grown.append((state, grown))

    def _loads(self, state: RequestState, cached_blocks: int) -> bool:
        """Whether its load would gain enough; the last prompt token is computed here in any case."""
        if not state.load_wanted or state.needs_prompt_logits:
            return False
        request, last = state.request, state.prompt_tokens - 1
        reach = last if request.load_tokens is None else min(request.load_tokens, last)
        return reach - cached_blocks * self.pool.block_size >= max(request.load_gain, 1)

    def _has_place(self, state: RequestState) -> bool:
        if state.load_wanted:
            return len(self.running) + len(self.loading) < 2 * self.max_num_seqs
        return len(self.running) < self.max_num_seqs

    def _match(self, state: RequestState) -> list[int]:
        """What the prefix cache has for it; at least the last token is always left to compute."""
        if state.needs_prompt_logits:
            return []
        return self.pool.match(state.hashes[: (len(state.tokens) - 1) // self.pool.block_size])

    def _missing(self, state: RequestState, cached: Sequence[int]) -> int:
        """How many blocks are missing for its admission; none when zero or less."""
        total = self._blocks_for(len(state.tokens))
        reserve = self._reserve()
        if self.running or self.loading:
            reserve += self._may_grow(state, total)
        return total - len(cached) + reserve - self.pool.available(keeping=cached)

    def _reserve(self) -> int:
        """A block for each request that may still grow."""
        return sum(self._may_grow(other, len(other.blocks)) for other in (*self.running, *self.loading))

    def _may_grow(self, state: RequestState, blocks: int) -> bool:
        return state.final_kv_tokens > blocks * self.pool.block_size

    def _allocate(self, state: RequestState, cached: list[int], now: float) -> None:
        self.pool.retain(cached)
        state.blocks = cached + self.pool.allocate(self._blocks_for(len(state.tokens)) - len(cached))
        state.cached_blocks = state.published = len(cached)
        state.computed = len(cached) * self.pool.block_size
        stats = state.request.stats
        if not state.admitted:
            state.admitted = True
            stats.admitted_at = stats.runnable_at = now
        if state.generated == 0:
            # Also after a preemption or a failed load: what counts is what the first token rests on.
            stats.cached_tokens = state.computed
            stats.transferred_tokens = stats.computed_tokens = stats.prefill_chunks = 0

    def _make_room(self, state: RequestState, plan: Plan) -> bool:
        """Make room for one more token, if need be at the cost of younger requests."""
        if state.computed < len(state.blocks) * self.pool.block_size:
            return True
        while not self.pool.can_allocate(1):
            youngest = self.running[-1]
            if youngest is state:
                return False  # the handoff side has the rest, or older requests do: all of them end
            self._preempt(youngest, plan)
        state.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, state: RequestState, plan: Plan) -> None:
        self._release(state)
        self._move(state, Stage.WAITING)
        state.request.stats.preemptions += 1
        if state.offer_grows:
            state.offers = False
            plan.abandoned.append(state)

    def _chunk_length(self, start: int, end: int) -> int:
        boundary = (start // self.max_step_tokens + 1) * self.max_step_tokens
        return min(end, boundary) - start

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _publish(self, state: RequestState) -> None:
        full = state.computed // self.pool.block_size
        for index in range(state.published, full):
            self.pool.publish(state.blocks[index], state.hashes[index])
        state.published = max(state.published, full)

    def _offer_up_to(self, state: RequestState, end: int) -> list[int]:
        blocks = state.blocks[state.offered_blocks : end]
        # After a failed load fewer blocks may be full than were offered: those stay offered.
        state.offered_blocks = max(state.offered_blocks, end)
        self._lend(blocks)
        return blocks

    def _lend(self, blocks: Sequence[int]) -> None:
        self.pool.retain(blocks)
        self.lent.update(blocks)

    def _release(self, state: RequestState) -> None:
        """Give up a request's blocks; those that a load awaits are lent instead."""
        own = state.blocks
        if state.stage is Stage.LOADING:
            own = state.blocks[: state.cached_blocks]
            self.lent.update(state.blocks[state.cached_blocks :])
        self.pool.release(own)
        state.blocks = []
        state.cached_blocks = state.published = state.computed = 0

    def _move(self, state: RequestState, stage: Stage) -> None:
        self._queues[state.stage].remove(state)
        state.stage = stage
        insort(self._queues[stage], state, key=lambda other: other.arrival)
