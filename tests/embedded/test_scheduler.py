"""What runs in the next step, and in which blocks. No model: the tests say that a plan was computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded.api import EngineRequest, SamplingParams
from kvhandoff.embedded.pool import BlockPool
from kvhandoff.embedded.request_state import RequestState, Stage
from kvhandoff.embedded.scheduler import Plan, Scheduler

B = 4
ROOT = b"root"


class Steps:
    """A scheduler, and the part of the core that these tests need."""

    def __init__(self, num_blocks: int = 64, **options: int) -> None:
        self.pool = BlockPool(num_blocks, B)
        self.scheduler = Scheduler(self.pool, **options)
        self.now = 0.0

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        max_tokens: int = 8,
        *,
        prompt_logprobs: int | None = None,
        **options: Any,
    ) -> RequestState:
        """`prompt`: token ids, or how many tokens that nobody else has."""
        if isinstance(prompt, int):
            prompt = [1000 + ord(name[0])] * prompt
        request = EngineRequest(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            on_output=lambda output: None,
            **options,
        )
        return self.scheduler.add(request, ROOT, TokenChain.of(ROOT, B, prompt))

    def plan(self) -> dict[str, int]:
        """Tokens by request in the next step, which is then computed; every due token is 7."""
        plan = self.plan_only()
        counts = {chunk.state.request.request_id: chunk.count for chunk in plan.chunks}
        for chunk in plan.chunks:
            due = chunk.reaches_end
            self.scheduler.advance(chunk.state, chunk.count)
            if due:
                self.scheduler.append(chunk.state, 7)
        return counts

    def plan_only(self) -> Plan:
        self.now += 1
        return self.scheduler.plan(self.now)


def test_a_prompt_is_computed_in_chunks_that_end_at_multiples_of_the_budget():
    steps = Steps(max_step_tokens=8)
    a = steps.add("a", 21)
    assert [steps.plan() for _ in range(5)] == [{"a": 8}, {"a": 8}, {"a": 5}, {"a": 1}, {"a": 1}]
    assert a.request.stats.prefill_chunks == 3
    assert a.request.stats.computed_tokens == 21
    assert a.generated == 3


def test_chunk_ends_stay_where_they_are_beside_decodes_and_behind_a_cached_prefix():
    steps = Steps(max_step_tokens=8)
    steps.add("a", 4)
    assert steps.plan() == {"a": 4}
    steps.add("b", [1, 2, 3, 4] * 5)
    assert [steps.plan() for _ in range(3)] == [{"a": 1, "b": 8}, {"a": 1, "b": 8}, {"a": 1, "b": 4}]
    steps.add("c", [1, 2, 3, 4] * 3 + [9] * 9)
    # Twelve tokens are cached: the first chunk ends at 16, not at 20.
    assert [steps.plan() for _ in range(2)] == [{"a": 1, "b": 1, "c": 4}, {"a": 1, "b": 1, "c": 5}]


def test_decodes_cost_no_budget_and_a_chunk_that_does_not_fit_waits_for_the_next_step():
    steps = Steps(max_step_tokens=8)
    for name in "ab":
        steps.add(name, 4)
    assert steps.plan() == {"a": 4, "b": 4}
    steps.add("c", 5)
    steps.add("d", 5)
    steps.add("e", 1)
    # d's five don't fit beside c's; e doesn't overtake d.
    assert steps.plan() == {"a": 1, "b": 1, "c": 5}
    assert steps.plan() == {"a": 1, "b": 1, "c": 1, "d": 5, "e": 1}


def test_nobody_overtakes_a_prompt_whose_next_chunk_does_not_fit():
    steps = Steps(max_step_tokens=8)
    steps.scheduler.end(_computed(steps, "x", [5] * 4))
    steps.add("a", [5] * 4 + [6] * 9)
    steps.add("b", [5] * 4 + [7] * 12)
    assert steps.plan() == {"a": 4, "b": 4}
    steps.add("e", 1)
    assert steps.plan() == {"a": 5}  # b needs eight; e would fit
    assert steps.plan() == {"a": 1, "b": 8}
    assert steps.plan() == {"a": 1, "b": 1, "e": 1}


def test_two_prompts_that_arrive_together_share_the_first_ones_blocks_when_they_take_two_steps():
    steps = Steps(max_step_tokens=8)
    steps.add("a", [5] * 8)
    b = steps.add("b", [5] * 12)
    assert steps.plan() == {"a": 8}
    assert steps.plan() == {"a": 1, "b": 4}
    assert b.request.stats.cached_tokens == 8


def test_no_more_than_max_num_seqs_run():
    steps = Steps(max_num_seqs=2)
    states = [steps.add(name, 2) for name in "abc"]
    assert steps.plan() == {"a": 2, "b": 2}
    assert steps.plan() == {"a": 1, "b": 1}
    steps.scheduler.end(states[0])
    assert steps.plan() == {"b": 1, "c": 2}


@pytest.mark.parametrize(
    ("length", "cached"),
    [(1, 0), (B - 1, 0), (B, 0), (B + 1, B), (2 * B - 1, B), (2 * B, B), (2 * B + 1, 2 * B)],
)
def test_at_least_the_last_prompt_token_is_computed(length: int, cached: int):
    steps = Steps()
    first = steps.add("a", [5] * length)
    assert steps.plan() == {"a": length}
    steps.scheduler.end(first)
    again = steps.add("b", [5] * length)
    assert steps.plan() == {"b": length - cached}
    assert again.request.stats.cached_tokens == cached
    assert again.request.stats.computed_tokens == length - cached


def test_only_full_computed_blocks_are_found():
    steps = Steps(max_step_tokens=6)
    first = steps.add("a", [5] * 12)
    chain = TokenChain.of(ROOT, B, [5] * 12).blocks
    assert steps.plan() == {"a": 6}
    assert steps.pool.match(chain) == first.blocks[:1]
    assert steps.plan() == {"a": 6}
    assert steps.pool.match(chain) == first.blocks[:3]


def test_answers_are_found_too_up_to_the_last_computed_token():
    steps = Steps()
    first = steps.add("a", [5] * 3, max_tokens=8)
    for _ in range(6):
        steps.plan()
    # Nine tokens, the last one without KV: two blocks.
    assert first.generated == 6
    chain = TokenChain.of(ROOT, B, [5] * 3 + [7] * 9).blocks
    assert steps.pool.match(chain) == first.blocks[:2]


def test_prompt_logprobs_need_the_whole_prompt():
    steps = Steps()
    steps.scheduler.end(_computed(steps, "a", [5] * 9))
    state = steps.add("b", [5] * 9, prompt_logprobs=1)
    assert steps.plan() == {"b": 9}
    assert state.request.stats.cached_tokens == 0


def _computed(steps: Steps, name: str, prompt: Sequence[int]) -> RequestState:
    state = steps.add(name, prompt)
    while state.generated == 0:
        steps.plan()
    return state


# -- loads -----------------------------------------------------------------------------------------------


def test_a_load_takes_its_blocks_and_no_budget():
    steps = Steps(max_step_tokens=8)
    steps.add("a", 8)
    b = steps.add("b", 10, load=True)
    plan = steps.plan_only()
    assert [chunk.state.request.request_id for chunk in plan.chunks] == ["a"]
    assert plan.loading == [b]
    assert b.stage is Stage.LOADING
    assert len(b.blocks) == 3
    assert b.cached_blocks == 0
    assert steps.plan_only().loading == []


def test_a_finished_load_leaves_the_last_token_to_compute():
    steps = Steps()
    a = steps.add("a", [5] * 8, load=True)
    assert steps.plan() == {}
    steps.scheduler.load_finished(a, 8, now=9.0)
    chain = TokenChain.of(ROOT, B, [5] * 8).blocks
    # The block with the last token is not found before the step that recomputes it.
    assert steps.pool.match(chain) == a.blocks[:1]
    assert steps.plan() == {"a": 1}
    assert steps.pool.match(chain) == a.blocks
    stats = a.request.stats
    assert stats.prompt_tokens == 8
    assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (0, 7, 1)
    assert (stats.admitted_at, stats.runnable_at) == (1.0, 9.0)


@pytest.mark.parametrize(("loaded", "computed"), [(0, 14), (3, 14), (7, 11), (8, 10), (17, 1), (18, 1)])
def test_the_rest_of_a_partial_load_is_computed(loaded: int, computed: int):
    steps = Steps()
    steps.scheduler.end(_computed(steps, "a", [5] * 4))
    b = steps.add("b", [5] * 4 + [6] * 14, load=True)
    assert steps.plan() == {}
    assert b.cached_blocks == 1
    steps.scheduler.load_finished(b, loaded, now=9.0)
    assert steps.plan() == {"b": computed}
    assert b.request.stats.cached_tokens == 4
    assert b.request.stats.transferred_tokens == 14 - computed


@pytest.mark.parametrize(("length", "skipped"), [(8, False), (9, True), (10, False)])
def test_a_load_that_could_bring_nothing_is_skipped(length: int, skipped: bool):
    steps = Steps()
    steps.scheduler.end(_computed(steps, "a", [5] * 8))
    b = steps.add("b", [5] * length, load=True)
    plan = steps.plan_only()
    assert (plan.skipped, plan.loading) == (([b], []) if skipped else ([], [b]))


@pytest.mark.parametrize(
    ("load_tokens", "load_gain", "skipped"),
    [
        (None, 12, False),  # 21 tokens, 8 cached, the last one computed in any case
        (None, 13, True),
        (21, 12, False),
        (21, 13, True),
        (16, 8, False),
        (16, 9, True),
        (8, 1, True),
        (9, 1, False),
        (0, 1, True),
        (8, 0, True),  # nothing to gain is no gain
    ],
)
def test_a_load_that_gains_too_little_is_skipped(load_tokens: int | None, load_gain: int, skipped: bool):
    steps = Steps()
    steps.scheduler.end(_computed(steps, "a", [5] * 9))
    b = steps.add("b", [5] * 9 + [6] * 12, load=True, load_tokens=load_tokens, load_gain=load_gain)
    plan = steps.plan_only()
    assert (plan.skipped, plan.loading) == (([b], []) if skipped else ([], [b]))
    assert b.request.stats.cached_tokens == 8


def test_a_prompt_of_one_token_and_one_with_prompt_logprobs_skip_their_loads():
    steps = Steps()
    states = [steps.add("a", 1, load=True), steps.add("b", 9, load=True, prompt_logprobs=0)]
    plan = steps.plan_only()
    assert plan.skipped == states
    assert [chunk.count for chunk in plan.chunks] == [1, 9]


def test_a_failed_load_computes_in_other_blocks_and_is_not_loaded_again():
    steps = Steps()
    a = steps.add("a", 9, load=True)
    steps.plan()
    awaited = a.blocks
    steps.scheduler.load_failed(a, now=5.0)
    assert steps.plan() == {"a": 9}
    assert not set(a.blocks) & set(awaited)
    assert steps.scheduler.lent.total() == 3
    assert a.request.stats.runnable_at == 5.0
    assert a.request.stats.computed_tokens == 9
    assert steps.scheduler.take_back(awaited) == []
    assert steps.pool.used == 3


def test_loads_neither_take_running_places_nor_outgrow_their_own():
    steps = Steps(max_num_seqs=2)
    loads = [steps.add(name, 5, load=True) for name in "abcde"]
    running = steps.add("f", 5)
    assert steps.plan() == {}
    assert [s.stage for s in loads] == [Stage.LOADING] * 4 + [Stage.WAITING]
    steps.scheduler.end(loads[4])
    # Four peers are silent, and f runs.
    assert steps.plan() == {"f": 5}
    for state in loads[:4]:
        steps.scheduler.load_finished(state, 5, now=9.0)
    # Older ones have come back: the batch stays at two.
    assert steps.plan() == {"a": 1, "b": 1}
    assert running.stage is Stage.RUNNING


# -- a full pool -----------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_keeps_its_tokens():
    steps = Steps(num_blocks=6)
    a = steps.add("a", 7, max_tokens=12)
    b = steps.add("b", 5, max_tokens=12)
    assert steps.plan() == {"a": 7, "b": 5}
    for _ in range(5):
        assert steps.plan() == {"a": 1, "b": 1}
    assert (len(a.blocks), len(b.blocks)) == (3, 3)
    # Position 12 needs a's fourth block.
    assert steps.plan() == {"a": 1}
    assert (b.stage, b.blocks, b.computed, b.generated) == (Stage.WAITING, [], 0, 6)
    assert b.request.stats.preemptions == 1
    steps.scheduler.end(a)
    # Of its eleven tokens the cache still has two blocks.
    assert steps.plan() == {"b": 3}
    assert (b.generated, b.request.stats.computed_tokens) == (7, 5)


def test_the_stats_of_a_request_preempted_inside_its_prompt_add_up():
    steps = Steps(num_blocks=9, max_step_tokens=4)
    a = steps.add("a", 7, max_tokens=20)
    b = steps.add("b", 24, max_tokens=1)
    while b.request.stats.preemptions == 0:
        steps.plan()
    assert b.generated == 0
    steps.scheduler.end(a)
    while b.generated == 0:
        steps.plan()
    stats = b.request.stats
    assert (stats.cached_tokens, stats.computed_tokens, stats.prefill_chunks) == (20, 4, 1)


def test_a_request_never_gives_way_to_a_younger_one():
    steps = Steps(num_blocks=5)
    a = steps.add("a", 4, max_tokens=9, load=True)
    steps.plan()
    b = steps.add("b", 8, max_tokens=4)
    assert steps.plan() == {"b": 8}  # one block for a, two for b, and one more for each
    steps.pool.allocate(2)  # somebody else has the rest
    assert steps.plan() == {}
    assert b.stage is Stage.RUNNING  # it keeps its place and its blocks
    steps.scheduler.load_finished(a, 4, now=9.0)
    assert steps.plan() == {"a": 1}
    assert steps.plan() == {"a": 1}  # for its second block, b had to go
    assert (b.stage, b.request.stats.preemptions) == (Stage.WAITING, 1)


@pytest.mark.parametrize(("max_tokens", "admitted"), [(1, True), (2, False)])
def test_admission_leaves_room_for_those_that_may_grow(max_tokens: int, admitted: bool):
    steps = Steps(num_blocks=4)
    steps.add("a", 8, max_tokens=max_tokens, load=True)
    steps.plan()
    steps.add("b", 8, max_tokens=max_tokens)
    assert steps.plan() == ({"b": 8} if admitted else {})


def test_a_request_as_large_as_the_pool_runs_alone():
    steps = Steps(num_blocks=4)
    a = steps.add("a", 4)
    steps.plan()
    steps.add("b", 15, max_tokens=1)
    assert steps.plan() == {"a": 1}
    steps.scheduler.end(a)
    assert steps.plan() == {"b": 15}


def test_two_loads_that_fill_the_pool_do_not_lock_each_other():
    # Field case 16: seven blocks, one request needs 4+1, the other 3+1, both loaded.
    steps = Steps(num_blocks=7)
    a = steps.add("a", 16, max_tokens=3, load=True)
    steps.plan()
    # The reserve alone would hold b back; take it away, as an offer that ended in between does.
    b = steps.add("b", 12, max_tokens=3, load=True)
    steps.scheduler._missing = lambda state, cached: 0  # type: ignore[method-assign]
    steps.plan()
    assert (a.stage, b.stage, steps.pool.free) == (Stage.LOADING, Stage.LOADING, 0)
    del steps.scheduler._missing
    steps.scheduler.load_finished(a, 16, now=5.0)
    assert steps.plan() == {"a": 1}
    assert steps.plan() == {}  # a needs a fifth block; b's load holds the rest, and it will end
    assert a.computed == 16
    steps.scheduler.load_finished(b, 12, now=6.0)
    assert steps.plan() == {"a": 1}
    assert b.request.stats.preemptions == 1
    steps.scheduler.end(a)
    assert steps.plan() == {"b": 4}  # two of its blocks are still cached
    assert steps.plan() == {"b": 1}


# -- references at the handoff side ----------------------------------------------------------------------


def test_what_was_not_lent_is_not_released():
    steps = Steps()
    a = _computed(steps, "a", [5] * 6)
    offered = steps.scheduler.offer(a)
    assert offered == a.blocks[:2]
    steps.scheduler.end(a)
    assert steps.pool.used == 2
    assert steps.scheduler.take_back([offered[0], 60]) == [60]
    assert steps.scheduler.take_back([offered[0], offered[1]]) == [offered[0]]
    assert steps.pool.used == 0
    assert not steps.scheduler.lent


def test_an_abandoned_load_gives_back_what_was_cached_and_lends_the_rest():
    steps = Steps()
    steps.scheduler.end(_computed(steps, "a", [5] * 4))
    b = steps.add("b", [5] * 4 + [6] * 8, load=True)
    steps.plan()
    awaited = b.blocks[1:]
    steps.scheduler.end(b)
    assert sorted(steps.scheduler.lent) == awaited
    assert steps.pool.used == 2


def test_no_block_is_offered_twice_when_a_failed_load_starts_anew_with_less_in_the_cache():
    steps = Steps(num_blocks=8, max_step_tokens=4)
    steps.scheduler.end(_computed(steps, "x", [5] * 9))
    b = steps.add("b", [5] * 8 + [6] * 8, load=True, offer=True, grow=True)
    [(state, cached)] = steps.plan_only().grown
    assert (state, cached) == (b, b.blocks[:2])
    awaited = b.blocks[2:]
    steps.scheduler.load_failed(b, now=5.0)
    steps.scheduler.take_back([*awaited, *cached])  # fenced, and the offer withdrawn
    steps.pool.release(steps.pool.allocate(8))  # somebody else's, meanwhile
    counts = []
    for _ in range(3):
        steps.plan()
        counts.append(len(steps.scheduler.grow_offer(b)))
    assert counts == [0, 0, 1]
    assert steps.scheduler.offer(b) == b.blocks[3:]


# -- short of blocks -------------------------------------------------------------------------------------


def test_the_oldest_waiting_request_says_how_many_blocks_it_lacks():
    steps = Steps(num_blocks=8)
    steps.pool.allocate(2)  # the handoff side's
    a = steps.add("a", 12, max_tokens=2)
    assert steps.plan_only().short == 0
    steps.add("b", 16, max_tokens=1)  # four blocks, and one for a's next token; three are left
    steps.add("c", 28, max_tokens=1)  # needs more, but is not the oldest
    assert steps.plan_only().short == 2
    steps.scheduler.end(a)
    assert steps.plan_only().short == 5  # of six, b takes four; c needs seven


def test_the_cached_prefix_counts_for_the_waiting_request():
    steps = Steps(num_blocks=8)
    first = _computed(steps, "x", [5] * 9)
    steps.scheduler.retain(first)
    steps.scheduler.end(first)
    steps.pool.allocate(5)
    steps.add("b", [5] * 16, max_tokens=1)  # two of its four blocks are there; one is free
    assert steps.plan_only().short == 1


@pytest.mark.parametrize("why", ["places", "budget"])
def test_a_request_that_waits_for_something_else_lacks_no_blocks(why: str):
    steps = Steps(num_blocks=8, max_num_seqs=1 if why == "places" else 2, max_step_tokens=4)
    steps.add("a", 8, max_tokens=1)
    steps.add("b", 31, max_tokens=1)
    assert steps.plan_only().short == 0


def test_running_requests_lack_blocks_before_they_need_them():
    steps = Steps(num_blocks=6)
    retained = steps.pool.allocate(2)
    a = steps.add("a", 4, max_tokens=8)  # three blocks in the end
    b = steps.add("b", 3, max_tokens=6)  # two
    shorts = []
    while b.generated < 6:
        plan = steps.plan_only()
        shorts.append(plan.short)
        for chunk in plan.chunks:
            steps.scheduler.advance(chunk.state, chunk.count)
            steps.scheduler.append(chunk.state, 7)
        if plan.short:
            steps.pool.release(retained)  # takes effect after the step that was short, and is in time
            retained = []
    # The step in which a takes its second block leaves one for two that may still grow.
    assert shorts == [0, 1, 0, 0, 0, 0]
    assert (a.request.stats.preemptions, b.request.stats.preemptions) == (0, 0)


def test_requests_that_can_not_grow_lack_nothing():
    steps = Steps(num_blocks=2)
    steps.add("a", 8, max_tokens=1)
    assert [steps.plan_only().short for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("named", ["max_num_seqs", "max_step_tokens"])
def test_bounds_are_checked(named: str):
    with pytest.raises(ConfigError, match=f"{named}: got 0, allowed is 1 or more"):
        Scheduler(BlockPool(4, 4), **{named: 0})
