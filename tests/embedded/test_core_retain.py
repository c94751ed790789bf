"""The engine core, stepped by hand on a fake model: turns that are retained, and blocks that run short."""

from __future__ import annotations

import math

import pytest

from kvhandoff.embedded.outlet import EngineFault
from tests.embedded.fakes import (
    PROMPT,
    Bench,
    Client,
    fake_logits,
    greedy,
    prompt_ending_in_eos_after,
    prompt_of,
)


def assert_retained(bench: Bench, name: str, client: Client, full: int) -> None:
    """`full` blocks of prompt and answer were retained, with what they hold and stand for."""
    hashes, blocks = bench.hooks.turns[name]
    tokens = [*bench.requests[name].prompt_token_ids, *client.tokens]
    assert len(blocks) == full
    assert bench.runner.read(blocks, 4 * full) == tokens[: 4 * full]
    assert tuple(hashes) == bench.core.chain(tokens, "").blocks[:full]


def forget_turns(bench: Bench) -> None:
    while bench.hooks.turns:
        _, (_, blocks) = bench.hooks.turns.popitem()
        bench.core.release_blocks(blocks)
    bench.run()


# -- what is retained ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("answer", [1, 2, 3, 4, 8])
def test_the_full_computed_blocks_of_prompt_and_answer_are_retained(length: int, answer: int):
    bench = Bench()
    client = bench.submit("a", prompt_of(length), answer, retain=True, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt_of(length), answer, eos=None)
    full = (length + answer - 1) // 4  # the last token's KV is not computed
    if full == 0:
        assert bench.hooks.calls == [("end", "a")]
    else:
        assert bench.hooks.calls == [("retained", "a"), ("end", "a")]
        assert_retained(bench, "a", client, full)
    bench.check()
    forget_turns(bench)
    bench.assert_baseline()


def test_a_turn_that_stops_by_itself_is_retained():
    bench = Bench()
    client = bench.submit("a", prompt_ending_in_eos_after(3), 10, retain=True)
    bench.run()
    assert client.ended == "stop"
    assert_retained(bench, "a", client, 2)


def test_a_turn_that_a_stop_string_ended_is_retained():
    bench = Bench()
    client = bench.submit("a", PROMPT, 10, retain=True, ignore_eos=True)

    def stop_after_four(output: object) -> None:
        client(output)  # type: ignore[arg-type]
        if len(client.tokens) == 4 and not client.ended:
            bench.core.abort("a")

    bench.requests["a"].on_output = stop_after_four
    bench.run()
    assert bench.hooks.calls == [("retained", "a"), ("end", "a")]
    assert_retained(bench, "a", client, 3)


def test_retained_blocks_keep_their_content_and_serve_the_next_turn():
    bench = Bench(num_blocks=12)
    first = bench.submit("a", PROMPT, 7, retain=True, ignore_eos=True)
    bench.run()
    for seed in range(20, 24):
        bench.submit(f"r{seed}", prompt_of(9, seed), 6)
        bench.run()
    assert_retained(bench, "a", first, 4)
    history = [*PROMPT, *first.tokens]
    second = bench.submit("b", [*history, 7, 7], 4, retain=True, ignore_eos=True)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 16
    assert bench.hooks.turns["b"][1][:4] == bench.hooks.turns["a"][1]  # the same blocks, lent twice
    assert_retained(bench, "b", second, 5)
    bench.check()
    forget_turns(bench)
    bench.assert_baseline()


def test_an_offer_and_a_retained_turn_are_lent_separately():
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", PROMPT, 7, offer=True, grow=True, retain=True, ignore_eos=True)
    bench.run()
    grown = [("offer_grown", "a")] * 2
    assert bench.hooks.calls == [*grown, ("offered", "a"), ("retained", "a"), ("end", "a")]
    assert_retained(bench, "a", client, 4)
    forget_turns(bench)
    assert bench.runner.read(bench.hooks.offers["a"], 10) == PROMPT
    bench.core.release_blocks(bench.hooks.offers["a"])
    bench.run()
    bench.assert_baseline()


# -- what is not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_turn_without_its_first_token_is_not_retained(steps: int):
    bench = Bench(max_step_tokens=4)
    bench.submit("a", PROMPT, 10, retain=True)
    for _ in range(steps):
        bench.core.step()
    bench.core.abort("a")
    bench.run()
    assert bench.hooks.calls == [("end", "a")]
    bench.assert_baseline()


def test_a_turn_that_is_loading_is_not_retained():
    bench = Bench()
    bench.submit("before", PROMPT, 1)
    bench.submit("a", [*PROMPT, *PROMPT], 10, load=True, retain=True)
    bench.run()
    bench.core.abort("a")
    bench.run()
    assert bench.hooks.turns == {}
    bench.fence("a")
    bench.run()
    bench.assert_baseline()


@pytest.mark.parametrize("how", ["the model raises", "bad logits"])
def test_a_turn_that_failed_is_not_retained(how: str):
    bench = Bench()
    client = bench.submit("a", PROMPT, 10, retain=True, ignore_eos=True)

    def fail(steps: object) -> None:
        raise ArithmeticError

    bench.core.step()
    if how == "bad logits":
        bench.runner.logits = lambda context: fake_logits(context) * math.nan
    else:
        bench.runner.before = fail
    bench.run()
    assert (len(client.tokens), client.ended) == (1, "error")
    assert bench.hooks.turns == {}
    bench.assert_baseline()


def test_nothing_is_retained_when_the_engine_closes():
    bench = Bench()
    client = bench.submit("a", PROMPT, 10, retain=True, ignore_eos=True)
    bench.core.step()
    bench.core.close()
    assert client.ended == "abort"
    assert bench.hooks.calls == [("end", "a")]
    bench.assert_baseline()


@pytest.mark.parametrize("recomputing", [False, True])
def test_a_preempted_turn_retains_what_it_has_at_its_end(recomputing: bool):
    bench = Bench(num_blocks=8, max_step_tokens=4, prefix_cache=False)
    older = bench.submit("older", prompt_of(8, 1), 24, ignore_eos=True)
    client = bench.submit("a", prompt_of(8, 2), 20, retain=True, ignore_eos=True)
    while not bench.requests["a"].stats.preemptions:
        bench.core.step()
    assert len(client.tokens) > 4
    if recomputing:
        while not older.ended:
            bench.core.step()
        bench.core.step()
        bench.core.step()
    bench.core.abort("a")
    bench.run()
    assert client.ended == "abort"
    if recomputing:
        assert_retained(bench, "a", client, 2)  # two chunks of four
    else:
        assert bench.hooks.turns == {}
    forget_turns(bench)
    bench.assert_baseline()


def test_retaining_without_hooks_is_a_fault():
    bench = Bench()
    bench.core.hooks = None
    with pytest.raises(EngineFault, match="request a asks for a load, an offer or to be retained"):
        bench.submit("a", PROMPT, retain=True)


# -- short of blocks -------------------------------------------------------------------------------------


def fill_with_turns(bench: Bench, count: int, length: int = 11) -> None:
    """Retain `count` turns of `length` // 4 blocks each."""
    for seed in range(count):
        bench.submit(f"turn{seed}", prompt_of(length, 100 + seed), 1, retain=True, ignore_eos=True)
        bench.run()
    bench.hooks.calls.clear()
    bench.hooks.shortages.clear()


def test_a_waiting_request_gets_the_retained_blocks():
    bench = Bench(num_blocks=8)
    fill_with_turns(bench, 3)  # six blocks
    client = bench.submit("a", prompt_of(15), 2, ignore_eos=True)
    bench.run()
    # An idle engine says it too, and takes it for no deadlock: each time that it looks.
    assert (client.outputs, bench.hooks.shortages) == ([], [2])
    bench.core.step()
    assert bench.hooks.shortages == [2, 2]
    bench.core.release_blocks(bench.hooks.turns.pop("turn0")[1])
    bench.run()
    assert bench.hooks.shortages == [2, 2]
    assert client.tokens == greedy(prompt_of(15), 2, eos=None)
    forget_turns(bench)
    bench.assert_baseline()


def answer_late(bench: Bench) -> None:
    """The handoff side gives up a turn for each shortage it was told of, one step later."""
    told = len(bench.hooks.shortages)
    bench.core.step()
    for _ in bench.hooks.shortages[:told]:
        if bench.hooks.turns:
            bench.core.release_blocks(bench.hooks.turns.pop(next(iter(bench.hooks.turns)))[1])
    del bench.hooks.shortages[:told]


@pytest.mark.parametrize("answered", [True, False])
def test_nobody_is_preempted_for_what_is_merely_retained(answered: bool):
    bench = Bench(num_blocks=16)
    fill_with_turns(bench, 5)  # ten blocks of 16; two requests of five blocks each
    clients = [bench.submit(name, prompt_of(5, seed), 14, ignore_eos=True) for seed, name in enumerate("ab")]
    while not all(client.ended for client in clients):
        answer_late(bench) if answered else bench.core.step()
    preemptions = [bench.requests[name].stats.preemptions for name in "ab"]
    assert preemptions == ([0, 0] if answered else [0, 1])
    assert [client.tokens for client in clients] == [
        greedy(prompt_of(5, seed), 14, eos=None) for seed in range(2)
    ]
    # No more was asked for than was needed: four blocks, two turns.
    assert len(bench.hooks.turns) == (3 if answered else 5)
    forget_turns(bench)
    bench.assert_baseline()


def test_a_running_request_that_can_not_go_on_says_what_it_lacks():
    bench = Bench(num_blocks=4)
    fill_with_turns(bench, 1)
    client = bench.submit("a", prompt_of(7), 6, ignore_eos=True)
    bench.run()
    assert len(client.tokens) == 2  # two blocks are full
    assert bench.hooks.shortages[-1] == 1
    forget_turns(bench)
    assert client.tokens == greedy(prompt_of(7), 6, eos=None)
    bench.assert_baseline()


def test_without_hooks_nobody_is_told_and_all_goes_on():
    bench = Bench(num_blocks=8)
    bench.core.hooks = None
    clients = [bench.submit(name, prompt_of(8, seed), 24, ignore_eos=True) for seed, name in enumerate("ab")]
    bench.run()
    assert bench.requests["b"].stats.preemptions == 1
    assert [client.tokens for client in clients] == [
        greedy(prompt_of(8, seed), 24, eos=None) for seed in range(2)
    ]


@pytest.mark.parametrize("name", ["offer_grown", "offered", "retained", "memory_short", "offer_abandoned"])
def test_a_hook_that_raises_stops_the_engine(name: str):
    """What it was told may be half done: the bookkeeping is not to be trusted."""

    def refuse(*arguments: object) -> None:
        raise RuntimeError("Event loop is closed")

    bench = Bench(num_blocks=8, max_step_tokens=4)
    setattr(bench.hooks, name, refuse)
    bench.submit("a", PROMPT, 2, offer=True, grow=True, retain=True, ignore_eos=True)
    if name == "memory_short":
        bench.submit("b", prompt_of(31), 1)
    if name == "offer_abandoned":
        bench.core.abort("a")
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        bench.run()
