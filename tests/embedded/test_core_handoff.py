"""The engine core, stepped by hand on a fake model: loads and offers, the contract with the hooks."""

from __future__ import annotations

import math

import pytest

from tests.embedded.fakes import PROMPT, Bench, greedy, prompt_ending_in_eos_after, prompt_of

# -- loads and offers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 30])
def test_a_loaded_prompt_computes_its_last_token_only(length: int):
    bench = Bench()
    prompt = prompt_of(length)
    client = bench.submit("a", prompt, 6, load=True)
    bench.run()
    assert client.outputs == []
    blocks, cached = bench.hooks.loads["a"]
    assert (len(blocks), cached) == (math.ceil(length / 4), 0)
    assert bench.core.load()["loading"] == 1
    bench.land("a")
    bench.run()
    assert client.tokens == greedy(prompt, 6)
    assert bench.runner.steps[0] == [(length - 1, 1)]
    stats = bench.requests["a"].stats
    assert (stats.transferred_tokens, stats.computed_tokens) == (length - 1, 1)
    assert bench.hooks.calls == [("load_allocated", "a"), ("end", "a")]
    bench.assert_baseline()


@pytest.mark.parametrize("loaded", range(12))
def test_a_partial_load_is_completed_by_computing(loaded: int):
    bench = Bench()
    prompt = prompt_of(11)
    client = bench.submit("a", prompt, 6, load=True)
    bench.run()
    bench.land("a", loaded)
    bench.run()
    assert client.tokens == greedy(prompt, 6)
    assert bench.requests["a"].stats.transferred_tokens == min(loaded, 10)


def test_a_load_behind_a_cached_prefix_awaits_the_rest():
    bench = Bench()
    bench.submit("before", PROMPT[:8], 1)
    bench.run()
    kept = [bench.runner.memory[block] for block in range(2)]
    client = bench.submit("a", [*PROMPT, 8, 8, 8], 4, load=True)
    bench.run()
    blocks, cached = bench.hooks.loads["a"]
    assert (len(blocks), cached) == (4, 2)
    assert [bench.runner.memory[block] for block in blocks[:2]] == kept
    bench.land("a")
    bench.run()
    assert client.tokens == greedy([*PROMPT, 8, 8, 8], 4)
    stats = bench.requests["a"].stats
    assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (8, 4, 1)


def test_loaded_blocks_serve_others_once_they_are_verified():
    bench = Bench()
    bench.submit("a", PROMPT, 2, load=True)
    bench.run()
    bench.submit("b", PROMPT, 2)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 0  # nothing is known of a's blocks yet
    bench.land("a")
    bench.submit("c", PROMPT, 2)
    bench.run()
    assert bench.requests["c"].stats.cached_tokens == 8


def test_a_skipped_load_runs_on_its_own():
    bench = Bench()
    bench.submit("before", PROMPT[:9], 1)
    bench.run()
    client = bench.submit("a", PROMPT[:9], 4, load=True)
    bench.run()
    assert client.tokens == greedy(PROMPT[:9], 4)
    assert bench.hooks.calls[1:] == [("load_skipped", "a"), ("end", "a")]


def test_a_failed_load_is_computed_in_other_blocks_while_bytes_still_land():
    bench = Bench()
    client = bench.submit("a", PROMPT, 4, load=True)
    bench.run()
    bench.fail_load("a")
    bench.core.step()
    bench.scribble("a", [9] * 10)  # late bytes of the transfer
    bench.run()
    assert client.tokens == greedy(PROMPT, 4)
    assert bench.core.load()["blocks_free"] + bench.core.load()["blocks_cached"] == 61
    bench.fence("a")
    bench.run()
    bench.assert_baseline()
    assert bench.hooks.calls == [("load_allocated", "a"), ("end", "a")]


def test_a_preempted_loaded_request_is_recomputed_and_not_loaded_again():
    # Field case 16: seven blocks, A needs 4+1, B needs 3+1, both loaded.
    bench = Bench(num_blocks=7)
    a = bench.submit("a", prompt_of(16, 1), 4, load=True, ignore_eos=True)
    bench.run()
    b = bench.submit("b", prompt_of(11, 2), 9, load=True, ignore_eos=True)
    bench.core._scheduler._missing = lambda state, cached: 0  # type: ignore[method-assign]
    bench.run()
    del bench.core._scheduler._missing
    assert set(bench.hooks.loads) == {"a", "b"}
    bench.land("a")
    bench.run()
    assert len(a.tokens) == 1  # its fifth block is not to be had until b's load ends
    bench.land("b")
    bench.run()
    assert a.tokens == greedy(prompt_of(16, 1), 4, eos=None)
    assert b.tokens == greedy(prompt_of(11, 2), 9, eos=None)
    assert bench.requests["b"].stats.preemptions == 1
    assert [call for call in bench.hooks.calls if call[0] != "end"] == [
        ("load_allocated", "a"),
        ("load_allocated", "b"),
    ]
    bench.assert_baseline()


@pytest.mark.parametrize("length", [1, 4, 9])
def test_an_offer_is_made_before_the_end_and_keeps_its_blocks(length: int):
    bench = Bench(num_blocks=8)
    prompt = prompt_of(length)
    client = bench.submit("a", prompt, 1, offer=True, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt, 1)
    assert bench.hooks.calls == [("offered", "a"), ("end", "a")]
    blocks = bench.hooks.offers["a"]
    assert len(blocks) == math.ceil(length / 4)
    # Others come and go; what was offered stays.
    for seed in range(20, 24):
        bench.submit(f"r{seed}", prompt_of(9, seed), 6)
        bench.run()
    assert bench.runner.read(blocks, length) == prompt
    counts = bench.core.load()
    assert counts["blocks_free"] + counts["blocks_cached"] == 8 - len(blocks)
    bench.core.release_blocks(blocks)
    bench.run()
    bench.assert_baseline()


def test_an_offer_is_made_when_the_first_token_is_eos():
    bench = Bench()
    client = bench.submit("a", prompt_ending_in_eos_after(1), 1, offer=True)
    bench.run()
    assert client.ended == "stop"
    assert bench.hooks.calls == [("offered", "a"), ("end", "a")]


def test_an_offer_of_a_longer_answer_is_made_with_its_first_token():
    bench = Bench()
    client = bench.submit("a", PROMPT, 5, offer=True, ignore_eos=True)
    bench.core.step()
    assert "a" in bench.hooks.offers
    bench.run()
    assert bench.runner.read(bench.hooks.offers["a"], 10) == PROMPT
    assert client.tokens == greedy(PROMPT, 5, eos=None)
    bench.core.release_blocks(bench.hooks.offers["a"])
    bench.run()
    bench.assert_baseline()


def test_blocks_returned_twice_stay_with_their_owner(caplog: pytest.LogCaptureFixture):
    bench = Bench(num_blocks=4)
    bench.submit("a", prompt_of(8), 1, offer=True)
    bench.run()
    blocks = bench.hooks.offers["a"]
    bench.core.release_blocks(blocks)
    client = bench.submit("b", prompt_of(9, 1), 5, ignore_eos=True)
    bench.core.step()
    bench.core.release_blocks(blocks)
    bench.run()
    assert client.tokens == greedy(prompt_of(9, 1), 5, eos=None)
    bench.assert_baseline()
    assert f"blocks {blocks[::-1]} were not at the handoff side" in caplog.text
