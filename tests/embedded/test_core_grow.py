"""The engine core, stepped by hand on a fake model: offers that grow while their prompt is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep
from kvhandoff.embedded.outlet import EngineFault
from tests.embedded.fakes import PROMPT, Bench, fake_logits, greedy, prompt_of

GROWN = ("offer_grown", "a")


def give_back(bench: Bench) -> None:
    """The handoff side returns all that offers left with it."""
    hooks = bench.hooks
    for blocks in [*hooks.offers.values(), *hooks.growing.values(), *hooks.abandoned.values()]:
        bench.core.release_blocks(blocks)
    bench.run()


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 21, 24])
@pytest.mark.parametrize("budget", [3, 4, 8, 10, 512])
def test_each_chunk_hands_over_the_blocks_it_fills(length: int, budget: int):
    bench = Bench(max_step_tokens=budget)
    prompt = prompt_of(length)
    client = bench.submit("a", prompt, 1, offer=True, grow=True, ignore_eos=True)
    end = 0
    while not client.ended:
        bench.core.step()
        end = min(end + budget, length)
        if not client.ended:
            assert len(bench.hooks.growing.get("a", [])) == end // 4
    blocks = bench.hooks.offers["a"]
    assert len(blocks) == math.ceil(length / 4)
    assert bench.runner.read(blocks, length) == prompt
    assert bench.hooks.first_tokens == {"a": greedy(prompt, 1, eos=None)[0]}
    calls = bench.hooks.calls
    assert calls[-2:] == [("offered", "a"), ("end", "a")]
    assert set(calls[:-2]) <= {GROWN}
    bench.check()
    give_back(bench)
    bench.assert_baseline()


def test_an_offer_that_does_not_grow_comes_at_the_end_only():
    bench = Bench(max_step_tokens=4)
    bench.submit("a", prompt_of(11), 1, offer=True, ignore_eos=True)
    bench.run()
    assert bench.hooks.calls == [("offered", "a"), ("end", "a")]
    assert bench.hooks.first_tokens == {"a": greedy(prompt_of(11), 1, eos=None)[0]}


def test_cached_blocks_are_handed_over_before_anything_is_computed():
    bench = Bench(max_step_tokens=4)
    bench.submit("before", PROMPT[:9], 1)
    bench.run()
    seen: list[list[int]] = []
    bench.runner.before = lambda steps: seen.append(list(bench.hooks.growing["a"]))
    prompt = [*PROMPT[:8], *prompt_of(9, 5)]
    bench.submit("a", prompt, 1, offer=True, grow=True)
    bench.run()
    assert [len(blocks) for blocks in seen] == [2, 3, 4]
    assert bench.requests["a"].stats.cached_tokens == 8
    assert bench.runner.read(bench.hooks.offers["a"], 17) == prompt


def test_loaded_blocks_are_handed_over_when_the_load_ends_and_cached_ones_before():
    # Return and push in one turn: the history comes from elsewhere, the new tokens are computed here.
    bench = Bench(max_step_tokens=4)
    bench.submit("before", PROMPT[:5], 1)
    bench.run()
    bench.hooks.calls.clear()
    prompt = [*PROMPT, *prompt_of(7, 5)]
    client = bench.submit("a", prompt, 1, load=True, load_tokens=12, load_gain=4, offer=True, grow=True)
    bench.core.step()
    assert bench.hooks.calls == [("load_allocated", "a"), GROWN]
    assert len(bench.hooks.growing["a"]) == 1
    bench.land("a", 12)
    forwards = len(bench.runner.steps)
    bench.core._take_inbox()
    assert (len(bench.hooks.growing["a"]), len(bench.runner.steps)) == (3, forwards)
    bench.run()
    assert client.tokens == greedy(prompt, 1)
    assert bench.runner.read(bench.hooks.offers["a"], 17) == prompt
    stats = bench.requests["a"].stats
    assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (4, 8, 5)
    give_back(bench)
    bench.assert_baseline()


def test_an_offer_goes_on_growing_after_its_load_failed():
    bench = Bench(max_step_tokens=4)
    bench.submit("before", PROMPT[:5], 1)
    bench.run()
    prompt = [*PROMPT, *prompt_of(7, 5)]
    bench.submit("a", prompt, 1, load=True, offer=True, grow=True)
    bench.core.step()
    bench.fail_load("a")
    bench.run()
    assert ("offer_abandoned", "a") not in bench.hooks.calls
    assert len(bench.hooks.offers["a"]) == 5
    assert bench.runner.read(bench.hooks.offers["a"], 17) == prompt
    bench.fence("a")
    give_back(bench)
    bench.assert_baseline()


@pytest.mark.parametrize("share", [0, 5, 8, 16])
def test_a_load_that_brings_a_beginning_only_is_completed(share: int):
    bench = Bench(max_step_tokens=4)
    prompt = prompt_of(17)
    client = bench.submit("a", prompt, 6, load=True, load_tokens=16, ignore_eos=True)
    bench.run()
    bench.land("a", share)
    bench.run()
    assert client.tokens == greedy(prompt, 6, eos=None)
    stats = bench.requests["a"].stats
    assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (0, share, 17 - share)
    bench.assert_baseline()


# -- offers that are not completed -----------------------------------------------------------------------


def preempted(grow: bool) -> Bench:
    """`a` loses its blocks inside its prompt to an older request."""
    bench = Bench(num_blocks=9, max_step_tokens=4)
    bench.submit("older", prompt_of(7, 1), 20, ignore_eos=True)
    bench.submit("a", prompt_of(24), 1, offer=True, grow=grow, ignore_eos=True)
    while not bench.requests["a"].stats.preemptions:
        bench.core.step()
    return bench


def test_a_preempted_request_abandons_its_growing_offer_and_offers_nothing_more():
    bench = preempted(grow=True)
    handed_over = bench.hooks.abandoned["a"]
    full = len(handed_over)
    assert full > 0
    assert bench.hooks.calls == [*[GROWN] * full, ("offer_abandoned", "a")]
    bench.check()
    bench.run()
    # What was handed over is lent until it is returned, also when the older one needs more.
    assert bench.runner.read(handed_over, 4 * full) == prompt_of(24)[: 4 * full]
    assert [client.ended for client in bench.clients] == [None, None]
    give_back(bench)
    assert bench.clients[0].tokens == greedy(prompt_of(7, 1), 20, eos=None)
    assert bench.clients[1].tokens == greedy(prompt_of(24), 1, eos=None)
    ends = [call for call in bench.hooks.calls if call != GROWN]
    assert ends == [("offer_abandoned", "a"), ("end", "older"), ("end", "a")]
    bench.assert_baseline()


def test_a_preempted_request_whose_offer_does_not_grow_offers_later():
    bench = preempted(grow=False)
    bench.run()
    assert bench.hooks.calls == [("end", "older"), ("offered", "a"), ("end", "a")]
    assert bench.runner.read(bench.hooks.offers["a"], 24) == prompt_of(24)


def test_a_preemption_after_the_offer_changes_nothing_of_it():
    bench = Bench(num_blocks=10)
    bench.submit("older", prompt_of(7, 1), 20, ignore_eos=True)
    client = bench.submit("a", prompt_of(7), 20, offer=True, grow=True, ignore_eos=True)
    bench.run()
    assert bench.requests["a"].stats.preemptions == 1
    assert client.tokens == greedy(prompt_of(7), 20, eos=None)
    assert bench.hooks.abandoned == {}
    assert bench.hooks.calls.count(("offered", "a")) == 1
    give_back(bench)
    bench.assert_baseline()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_abandons_the_offer_unless_it_is_complete(steps: int):
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", prompt_of(11), 5, offer=True, grow=True, ignore_eos=True)
    for _ in range(steps):
        bench.core.step()
    bench.core.abort("a")
    bench.run()
    assert client.ended == "abort"
    complete = steps == 3
    end = [("offered", "a")] if complete else [("offer_abandoned", "a")]
    assert bench.hooks.calls == [*[GROWN] * min(steps, 2), *end, ("end", "a")]
    give_back(bench)
    bench.assert_baseline()


@pytest.mark.parametrize("how", ["the model raises", "bad logits"])
def test_an_error_abandons_the_offer(how: str):
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", prompt_of(11), 5, offer=True, grow=True)
    bench.core.step()
    if how == "bad logits":
        bench.runner.logits = lambda context: fake_logits(context) * math.nan
    else:
        bench.runner.before = raise_arithmetic_error
    bench.run()
    assert client.ended == "error"
    assert [call for call in bench.hooks.calls if call != GROWN] == [("offer_abandoned", "a"), ("end", "a")]
    assert len(bench.hooks.abandoned["a"]) == (2 if how == "bad logits" else 1)
    give_back(bench)
    bench.assert_baseline()


def raise_arithmetic_error(steps: Sequence[SequenceStep]) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("steps", [None, 0, 1, 3])
def test_closing_abandons_the_offers_that_are_not_complete(steps: int | None):
    """None: the request is not even taken up from the inbox."""
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", prompt_of(11), 5, offer=True, grow=True, ignore_eos=True)
    if steps is not None:
        bench.core._take_inbox()
    for _ in range(steps or 0):
        bench.core.step()
    bench.core.close()
    assert client.ended == "abort"
    end = ("offered", "a") if steps == 3 else ("offer_abandoned", "a")
    assert [call for call in bench.hooks.calls if call != GROWN] == [end, ("end", "a")]


def test_a_handoff_side_that_is_gone_keeps_no_request_from_its_end(caplog: pytest.LogCaptureFixture):
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", prompt_of(11), 5, offer=True, grow=True)
    other = bench.submit("b", prompt_of(11), 5)

    def refuse(request_id: str) -> None:
        raise RuntimeError("Event loop is closed")

    bench.hooks.offer_abandoned = refuse  # type: ignore[method-assign]
    bench.core.close()
    assert [client.ended, other.ended] == ["abort", "abort"]
    assert "the handoff side could not be told of the end of a" in caplog.text


def test_a_load_under_way_and_a_growing_offer_are_both_abandoned():
    bench = Bench()
    bench.submit("a", prompt_of(11), 1, load=True, offer=True, grow=True)
    bench.run()
    bench.core.abort("a")
    bench.run()
    calls = [("load_allocated", "a"), ("load_abandoned", "a"), ("offer_abandoned", "a"), ("end", "a")]
    assert bench.hooks.calls == calls
    bench.fence("a")
    bench.run()
    bench.assert_baseline()


def test_a_growing_offer_that_is_none_is_a_fault():
    bench = Bench()
    request = EngineRequest("a", PROMPT, SamplingParams(), print, grow=True)
    with pytest.raises(EngineFault, match="request a is to grow an offer, but makes none"):
        bench.core.submit(request)
