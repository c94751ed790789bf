"""vLLM's scheduler as far as a connector sees it, with the rules whose breach ends a real engine.

Blocks have contents: per slot a key that stands for all tokens up to there. A step writes the keys of what it
computes, and fails when one before it isn't the request's own: then a token would have been computed from
wrong KV. A transfer writes into blocks as well, whenever it pleases until it is fenced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvhandoff.vllm.scheduler_half import SchedulerHalf

BLOCK = 4
STEP_TOKENS = 8
SEQS = 4


class Status(Enum):
    """A request's, by vLLM's names."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0
    slots: list[int] = field(default_factory=lambda: [0] * BLOCK)
    cached_as: int | None = None


class FakePool:
    """Blocks with reference counts, a queue of free ones, and a prefix cache; block 0 is the null block."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks + 1
        self.blocks = [FakeBlock(i) for i in range(blocks + 1)]
        self.blocks[0].ref_cnt = 1
        self._free = deque(self.blocks[1:])
        self._cache: dict[int, FakeBlock] = {}

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (self._free.append if block.cached_as is not None else self._free.appendleft)(block)

    def get_new_blocks(self, count: int) -> list[FakeBlock]:
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_cnt = 1
            if block.cached_as is not None:
                del self._cache[block.cached_as]
                block.cached_as = None
        return blocks

    def match(self, keys: Sequence[int]) -> list[FakeBlock]:
        """The cached blocks of a beginning."""
        found = []
        for end in range(BLOCK - 1, len(keys), BLOCK):
            block = self._cache.get(keys[end])
            if block is None:
                break
            found.append(block)
        return found

    def cache(self, blocks: Sequence[FakeBlock], keys: Sequence[int]) -> None:
        """All of these tokens are in these blocks."""
        for i in range(len(keys) // BLOCK):
            key, block = keys[i * BLOCK + BLOCK - 1], blocks[i]
            if block.cached_as is None and key not in self._cache:
                block.cached_as = key
                self._cache[key] = block


def keys_of(tokens: Sequence[int], salt: str) -> list[int]:
    """What the slots of these tokens hold."""
    keys, key = [], hash(tuple(salt.encode()))
    for token in tokens:
        key = hash((key, token))
        keys.append(key)
    return keys


@dataclass(eq=False)
class FakeRequest:
    """One sequence. Its next token follows from those before."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int = 4
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    pooling_params: Any = None
    resumable: bool = False
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    blocks: list[FakeBlock] = field(default_factory=list)
    answer: dict[str, Any] | None = None
    placeholders: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    def keys(self, count: int | None = None) -> list[int]:
        return keys_of(self.all_token_ids[:count], self.cache_salt or "")


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)


@dataclass
class Step:
    number: int = 0
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    work: list[tuple[FakeRequest, int, int, int]] = field(default_factory=list)
    """Request, first token, count, preemptions."""


class FakeScheduler:
    """Schedules on one pool. `depth`: steps under way at once; `recompute_ids`: a vLLM without
    `failed_recving`."""

    def __init__(self, half: SchedulerHalf, pool: FakePool, *, depth: int = 1) -> None:
        self.half = half
        self.pool = pool
        self.depth = depth
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.ended: list[FakeRequest] = []
        self.reports: list[tuple[str, bool, Sequence[int]]] = []
        """What the workers say at the end of their present step."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What other threads do between two calls of the half."""
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._under_way: deque[Step] = deque()
        self._deferred: list[tuple[int, list[FakeBlock]]] = []
        self._planned = self._done = 0

    # ------------------------------------------------------------------------------------- from outside

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.half.on_new_request(request)
        self.meanwhile()
        return request

    def abort(self, request: FakeRequest) -> None:
        if request.status.finished:
            return
        delay = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            delay = request.request_id not in self._finished_recving
            self._finished_recving.discard(request.request_id)
            self._failed_recving.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = Status.FINISHED_ABORTED
        self._free_request(request, delay=delay)

    def preempt(self, request: FakeRequest) -> None:
        """As a reset of the prefix cache does, whatever is under way."""
        self.running.remove(request)
        self._preempt(request)

    @property
    def idle(self) -> bool:
        return not self.requests and not self._under_way

    def step(self) -> None:
        """Plan a step; when as many are under way as may be, one of them comes back."""
        self._under_way.append(self._schedule())
        while len(self._under_way) >= self.depth or (self._under_way and not self.running):
            self._update(self._under_way.popleft())

    # --------------------------------------------------------------------------------------------- a step

    def _schedule(self) -> Step:
        step, budget = Step(), STEP_TOKENS
        preempted = False
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue
            known = request.num_tokens + request.placeholders
            count = min(known - request.num_computed_tokens, budget)
            if count <= 0:
                continue
            added = self._make_room(request, count)
            if added is None:
                preempted = True
                break
            step.scheduled_cached_reqs.req_ids.append(request.request_id)
            step.scheduled_cached_reqs.new_block_ids.append(([b.block_id for b in added],) if added else None)
            self._take(step, request, count)
            budget -= count
        if not preempted:
            self._admit(step, budget)
        self.meanwhile()
        step.number = self.half.planned(step)
        self.meanwhile()
        for request, _, count, _ in step.work:
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            if request.num_computed_tokens == request.num_tokens + request.placeholders:
                request.placeholders += 1
        if step.work:
            self._planned += 1
        return step

    def _take(self, step: Step, request: FakeRequest, count: int) -> None:
        step.num_scheduled_tokens[request.request_id] = count
        step.work.append((request, request.num_computed_tokens, count, request.num_preemptions))

    def _make_room(self, request: FakeRequest, count: int) -> list[FakeBlock] | None:
        needed = -(-(request.num_computed_tokens + count) // BLOCK) - len(request.blocks)
        while needed > self.pool.get_num_free_blocks():
            if self.half.frees_are_coming():
                return None
            self.meanwhile()
            if self.running[-1].num_in_flight_tokens:
                return None  # its blocks would not be free at once
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        added = self.pool.get_new_blocks(max(0, needed))
        request.blocks += added
        return added

    def _preempt(self, request: FakeRequest) -> None:
        self._free_blocks(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.placeholders = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _admit(self, step: Step, budget: int) -> None:
        # Those that hold blocks come first.
        for request in sorted(self.waiting, key=lambda request: not request.blocks):
            if budget <= 0 or len(self.running) >= SEQS:
                return
            if request.num_in_flight_tokens:
                continue  # stale output is drained first
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self._finished_recving:
                    continue
                self._promote(request)
            local: list[FakeBlock] = []
            external, is_async = 0, False
            if request.num_computed_tokens == 0:
                if not request.skip_reading_prefix_cache:
                    local = self.pool.match(request.keys(request.num_tokens - 1))
                matched, is_async = self.half.matched_tokens(request, len(local) * BLOCK)
                self.meanwhile()
                if matched is None:
                    continue
                external = 0 if request.skip_reading_prefix_cache else matched
                is_async = is_async and external > 0
            computed = request.num_computed_tokens + len(local) * BLOCK + external
            assert computed <= request.num_tokens
            count = 0 if is_async else min(request.num_tokens - computed, budget)
            needed = -(-(computed + count) // BLOCK) - len(local) - len(request.blocks)
            needed_free = needed + sum(block.ref_cnt == 0 for block in local)
            if is_async:  # a load can't be preempted: it has to fit with what the others still need
                needed_free += sum(self._lacks(other) for other in self.requests.values())
                needed_free += -(-request.num_tokens // BLOCK) - len(local) - needed
            if needed_free > self.pool.get_num_free_blocks():
                return
            self.pool.touch(local)
            request.blocks += local + self.pool.get_new_blocks(needed)
            ids = [block.block_id for block in request.blocks]
            self.half.allocated(request, ids, external)
            self.meanwhile()
            request.num_computed_tokens = computed
            if is_async:
                request.status = Status.WAITING_FOR_REMOTE_KVS
                continue
            self.waiting.remove(request)
            self.running.append(request)
            if request.status is Status.PREEMPTED:
                step.scheduled_cached_reqs.req_ids.append(request.request_id)
                step.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
                step.scheduled_cached_reqs.new_block_ids.append((ids,))
            else:
                step.scheduled_new_reqs.append(New(request.request_id, (ids,)))
            request.status = Status.RUNNING
            self._take(step, request, count)
            budget -= count

    def _lacks(self, request: FakeRequest) -> int:
        """Blocks that a request which holds some will need for all of its tokens."""
        return max(0, -(-request.num_tokens // BLOCK) - len(request.blocks)) if request.blocks else 0

    def _promote(self, request: FakeRequest) -> None:
        self._finished_recving.remove(request.request_id)
        if request.request_id in self._failed_recving:
            self._failed_recving.remove(request.request_id)
            if not request.num_computed_tokens:
                self._free_blocks(request)
        self.pool.cache(request.blocks, request.keys(request.num_computed_tokens))
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING

    def _update(self, step: Step) -> None:
        for request, first, count, _ in step.work:
            self._run(request, first, count)
        if step.work:
            self._done += 1
            for fence, blocks in [d for d in self._deferred if d[0] <= self._done]:
                self.pool.free_blocks(blocks)
                self._deferred.remove((fence, blocks))
        reports, self.reports = self.reports, []
        for request_id, failed, bad in reports:
            self._heed_failure(request_id, failed=failed, bad=set(bad))
        for request, first, count, preemptions in step.work:
            request.num_in_flight_tokens -= count
            if request.status.finished or request.num_preemptions != preemptions:
                continue
            self.pool.cache(request.blocks, request.keys(first + count))
            if first + count < request.num_tokens:
                continue
            request.placeholders -= 1
            request.output_token_ids.append(next_token(request.all_token_ids))
            if len(request.output_token_ids) >= request.max_tokens:
                request.status = Status.FINISHED_LENGTH_CAPPED
                self.running.remove(request)
                self._free_request(request)
        self.meanwhile()
        if step.number:
            self.half.done(step.number)
        self.meanwhile()
        for request_id, _, _ in reports:
            assert request_id in self.requests, f"{request_id} is reported, and unknown"
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                assert request_id not in self._finished_recving, f"{request_id} is reported twice"
                self._finished_recving.add(request_id)
            else:
                assert request.status.finished, f"{request_id} is reported while {request.status}"
                self._free_blocks(request)
                del self.requests[request_id]

    def _run(self, request: FakeRequest, first: int, count: int) -> None:
        if request.status.finished or not request.blocks:
            return  # what it writes, and where, concerns nobody: its blocks' free is deferred
        keys = request.keys(first + count)
        held = [slot for block in request.blocks for slot in block.slots]
        assert held[:first] == keys[:first], f"{request.request_id} computes token {first} from wrong KV"
        for position in range(first, first + count):
            request.blocks[position // BLOCK].slots[position % BLOCK] = keys[position]

    def _heed_failure(self, request_id: str, *, failed: bool, bad: set[int]) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status is not Status.WAITING_FOR_REMOTE_KVS:
            return
        if failed:
            request.num_computed_tokens = 0
            self._failed_recving.add(request_id)
        for i, block in enumerate(request.blocks[: -(-request.num_computed_tokens // BLOCK)]):
            if block.block_id in bad:
                request.num_computed_tokens = i * BLOCK
                self._failed_recving.add(request_id)
                break

    def _free_request(self, request: FakeRequest, *, delay: bool = False) -> None:
        held = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        request.answer = self.half.finished(request, [block.block_id for block in held])
        self.meanwhile()
        self.ended.append(request)
        if not delay:
            self._free_blocks(request)
            del self.requests[request.request_id]

    def _free_blocks(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks[::-1], []
        if request.num_in_flight_tokens and self._done < self._planned:
            self._deferred.append((self._planned, blocks))
        else:
            self.pool.free_blocks(blocks)


def next_token(tokens: Sequence[int]) -> int:
    """What the model says next."""
    return hash(tuple(tokens)) % 89


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What it answers."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
