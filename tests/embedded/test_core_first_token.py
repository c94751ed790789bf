"""The token that the prefill engine sampled is given out as the first one, where that is exact.

Field case 40: the text is the same as without it, and no token is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embedded.fakes import (
    EOS,
    PROMPT,
    VOCAB,
    Bench,
    Client,
    greedy,
    prompt_ending_in_eos_after,
    prompt_of,
)

NOT_IN_THE_PREFILL_LEG = ("stop_token_ids", "logprobs", "prompt_logprobs")
"""Fields that a prefill leg is not sent (`router/legs.py`)."""


def alone(prompt: Sequence[int], max_tokens: int, **params: Any) -> Client:
    bench = Bench()
    client = bench.submit("a", prompt, max_tokens, **params)
    bench.run()
    return client


def prefill_leg(prompt: Sequence[int], **params: Any) -> int:
    """The token that the prefill engine samples."""
    bench = Bench()
    kept = {name: value for name, value in params.items() if name not in NOT_IN_THE_PREFILL_LEG}
    kept["min_tokens"] = min(kept.get("min_tokens", 0), 1)
    bench.submit("p", prompt, 1, offer=True, **kept)
    bench.run()
    return bench.hooks.first_tokens["p"]


def decode_leg(
    prompt: Sequence[int], max_tokens: int, first_token: int | None, **params: Any
) -> tuple[Bench, Client]:
    """A bench whose request has its load, with the token."""
    bench = Bench()
    client = bench.submit("a", prompt, max_tokens, load=True, **params)
    bench.run()
    bench.land("a", first_token=first_token)
    return bench, client


def assert_same(client: Client, other: Client) -> None:
    """The same tokens and the same end."""
    assert client.tokens == other.tokens
    last, expected = client.outputs[-1], other.outputs[-1]
    assert (last.finish_reason, last.stop_token) == (expected.finish_reason, expected.stop_token)
    assert len(client.outputs) == len(other.outputs)


# -- the text --------------------------------------------------------------------------------------------

SEEDED = {"temperature": 1.0, "seed": 3}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"stop_token_ids": (31,)},
        {"min_tokens": 3, "stop_token_ids": (31,)},
        SEEDED,
        {**SEEDED, "temperature": 2.0, "top_p": 0.8},
        {**SEEDED, "top_k": 5},
        {**SEEDED, "min_tokens": 3},
        {**SEEDED, "stop_token_ids": (31,)},
        {**SEEDED, "min_tokens": 3, "stop_token_ids": (EOS,)},
    ],
    ids=str,
)
def test_an_exact_first_token_is_reused_and_changes_nothing(params: dict[str, Any]):
    for prompt in (PROMPT, prompt_of(8, 1), prompt_of(2, 2)):
        token = prefill_leg(prompt, **params)
        assert token not in (EOS, 31)  # of these prompts
        bench, client = decode_leg(prompt, 9, token, **params)
        bench.core._take_inbox()
        assert client.tokens == [token]
        assert bench.runner.steps == []
        bench.run()
        assert_same(client, alone(prompt, 9, **params))
        stats = bench.requests["a"].stats
        assert stats.first_token_reused
        assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (0, len(prompt), 0)
        assert bench.runner.steps[0] == [(len(prompt), 1)]
        bench.assert_baseline()


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.9}])
def test_seeded_tokens_are_the_same_as_without_reuse(length: int, sampling: dict[str, float]):
    reused = 0
    for seed in range(60):
        prompt, params = prompt_of(length, seed), {**sampling, "seed": seed}
        token = prefill_leg(prompt, **params)
        bench, client = decode_leg(prompt, 8, token, **params)
        bench.run()
        assert_same(client, alone(prompt, 8, **params))
        assert bench.requests["a"].stats.first_token_reused == (token != EOS)
        reused += token != EOS
    assert reused > 40


@settings(max_examples=400)
@given(
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=2, max_size=9),
    max_tokens=st.integers(1, 6),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(-3, 3),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple),
    ignore_eos=st.booleans(),
)
def test_whatever_the_parameters_the_text_is_that_of_one_engine(
    prompt: list[int], max_tokens: int, min_tokens: int, **params: Any
):
    params["min_tokens"] = min(min_tokens, max_tokens)
    bench, client = decode_leg(prompt, max_tokens, prefill_leg(prompt, **params), **params)
    bench.run()
    assert_same(client, alone(prompt, max_tokens, **params))
    bench.assert_baseline()


def test_a_seeded_draw_with_other_tokens_masked_is_another():
    # The prefill engine draws from more tokens; random parameters seldom show it.
    params = {"temperature": 3.0, "min_tokens": 2, "stop_token_ids": tuple(range(1, 20))}
    different = 0
    for seed in range(30):
        prompt = prompt_of(5, seed)
        token = prefill_leg(prompt, seed=seed, **params)
        expected = alone(prompt, 4, seed=seed, **params)
        different += token not in params["stop_token_ids"] and token != expected.tokens[0]
        bench, client = decode_leg(prompt, 4, token, seed=seed, **params)
        bench.run()
        assert_same(client, expected)
        assert not bench.requests["a"].stats.first_token_reused
    assert different > 0


# -- where it is not exact -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"logprobs": 2, "temperature": 1.0, "seed": 1},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 1, "min_tokens": 1, "stop_token_ids": (31,)},
    ],
    ids=str,
)
def test_an_inexact_first_token_is_computed_here(params: dict[str, Any]):
    token = prefill_leg(PROMPT, **params)
    bench, client = decode_leg(PROMPT, 5, token, ignore_eos=True, **params)
    bench.run()
    assert bench.runner.steps[0] == [(len(PROMPT) - 1, 1)]
    stats = bench.requests["a"].stats
    assert (stats.transferred_tokens, stats.computed_tokens) == (len(PROMPT) - 1, 1)
    assert not stats.first_token_reused
    assert len(client.tokens) == 5
    if "seed" in params or "temperature" not in params:
        assert_same(client, alone(PROMPT, 5, ignore_eos=True, **params))
    if "logprobs" in params:
        assert all(output.logprob is not None for output in client.outputs)


def test_a_first_token_that_stops_the_answer_is_computed_here():
    prompt = prompt_ending_in_eos_after(1)
    for params in ({}, {"min_tokens": 0, "stop_token_ids": (EOS,), "ignore_eos": True}):
        bench, client = decode_leg(prompt, 5, EOS, **params)
        bench.run()
        assert (client.tokens, client.ended) == ([EOS], "stop")
        assert not bench.requests["a"].stats.first_token_reused
    token = greedy(PROMPT, 1)[0]
    bench, client = decode_leg(PROMPT, 5, token, stop_token_ids=(token,))
    bench.run()
    assert (client.tokens, client.outputs[-1].stop_token) == ([token], token)
    assert not bench.requests["a"].stats.first_token_reused


def test_eos_is_reused_where_it_is_an_ordinary_token():
    prompt = prompt_ending_in_eos_after(1)
    bench, client = decode_leg(prompt, 5, EOS, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt, 5, eos=None)
    assert bench.requests["a"].stats.first_token_reused


@pytest.mark.parametrize("tokens", [0, 4, 9])
def test_a_token_after_a_part_of_the_prompt_is_none(tokens: int):
    bench = Bench()
    client = bench.submit("a", PROMPT, 5, load=True, ignore_eos=True)
    bench.run()
    bench.land("a", tokens, first_token=greedy(PROMPT, 1)[0] ^ 1)
    bench.run()
    assert client.tokens == greedy(PROMPT, 5, eos=None)
    assert not bench.requests["a"].stats.first_token_reused


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_what_is_no_token_is_not_given_out(token: int, caplog: pytest.LogCaptureFixture):
    bench, client = decode_leg(PROMPT, 5, token, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(PROMPT, 5, eos=None)
    assert f"request a: first token {token} is no token" in caplog.text


# -- what comes after ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_of_one_token_ends_there(params: dict[str, Any]):
    token = prefill_leg(PROMPT, **params)
    bench = Bench()
    client = bench.submit("a", PROMPT, 1, load=True, offer=True, grow=True, retain=True, **params)
    bench.run()
    bench.land("a", first_token=token)
    bench.run()
    [output] = client.outputs
    assert (output.token_id, output.finish_reason) == (token, "length")
    assert bench.runner.steps == []
    calls = [("load_allocated", "a"), ("offered", "a"), ("retained", "a"), ("end", "a")]
    assert bench.hooks.calls == calls
    assert bench.hooks.first_tokens == {"a": token}
    assert bench.runner.read(bench.hooks.offers["a"], len(PROMPT)) == PROMPT
    assert len(bench.hooks.turns["a"][1]) == 2
    bench.core.release_blocks([*bench.hooks.offers["a"], *bench.hooks.turns["a"][1]])
    bench.run()
    bench.assert_baseline()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}], ids=["greedy", "seeded"])
def test_a_preemption_afterwards_changes_nothing(params: dict[str, float]):
    preemptions = 0
    for seed in range(10):
        bench = Bench(num_blocks=8)
        older = bench.submit("older", prompt_of(8, 1), 24, ignore_eos=True)
        bench.core.step()
        sampling = {"seed": seed, "ignore_eos": True, **params}
        client = bench.submit("a", prompt_of(8, 2), 24, load=True, **sampling)
        bench.core.step()
        bench.land("a", first_token=prefill_leg(prompt_of(8, 2), **sampling))
        bench.run()
        assert_same(client, alone(prompt_of(8, 2), 24, **sampling))
        assert older.tokens == greedy(prompt_of(8, 1), 24, eos=None)
        stats = bench.requests["a"].stats
        assert stats.first_token_reused
        assert (stats.transferred_tokens, stats.computed_tokens) == (8, 0)  # up to the first token
        preemptions += stats.preemptions
        bench.assert_baseline()
    assert preemptions >= 10


def test_a_first_token_needs_no_place_in_the_batch():
    bench = Bench(max_num_seqs=1)
    running = bench.submit("b", prompt_of(5), 8, ignore_eos=True)
    client = bench.submit("a", PROMPT, 4, load=True, ignore_eos=True)
    bench.core.step()
    bench.land("a", first_token=greedy(PROMPT, 1)[0])
    bench.core.step()
    bench.core.step()
    assert client.tokens == greedy(PROMPT, 1)
    bench.run()
    assert client.tokens == greedy(PROMPT, 4, eos=None)
    assert running.tokens == greedy(prompt_of(5), 8, eos=None)


@pytest.mark.parametrize("order", ["before", "after", "from inside"])
def test_an_abort_around_the_first_token(order: str):
    bench = Bench()
    client = bench.submit("a", PROMPT, 6, load=True, ignore_eos=True)
    bench.run()
    token = greedy(PROMPT, 1)[0]
    if order == "from inside":  # e.g. a stop string of one token

        def stop(output: object) -> None:
            client(output)  # type: ignore[arg-type]
            bench.core.abort("a")

        bench.requests["a"].on_output = stop
    if order == "before":
        bench.core.abort("a")
    bench.land("a", first_token=token)
    if order == "after":
        bench.core.abort("a")
    bench.run()
    assert client.ended == "abort"
    assert client.tokens == ([] if order == "before" else [token])
    assert bench.runner.steps == []
    if order == "before":
        bench.fence("a")
        bench.run()
    bench.assert_baseline()


def test_a_second_answer_gives_no_second_token():
    bench, client = decode_leg(PROMPT, 4, greedy(PROMPT, 1)[0], ignore_eos=True)
    bench.core.load_finished("a", len(PROMPT), greedy(PROMPT, 1)[0])
    bench.run()
    assert client.tokens == greedy(PROMPT, 4, eos=None)


def test_stats_of_a_reused_first_token():
    bench = Bench()
    seen: list[tuple[float, float, bool]] = []
    client = bench.submit("a", PROMPT, 3, load=True, ignore_eos=True)
    stats = bench.requests["a"].stats

    def look(output: object) -> None:
        client(output)  # type: ignore[arg-type]
        seen.append((stats.runnable_at, stats.prefilled_at, stats.first_token_reused))

    bench.requests["a"].on_output = look
    bench.run()
    bench.clock.advance(7.0)
    bench.land("a", first_token=greedy(PROMPT, 1)[0])
    bench.run()
    assert seen[0] == (7.0, 7.0, True)


def test_the_last_prompt_block_is_found_by_others_at_once():
    # Its last token was computed elsewhere and verified: no step of this engine is needed for it.
    bench, _ = decode_leg(PROMPT[:8], 1, greedy(PROMPT[:8], 1)[0], ignore_eos=True)
    bench.run()
    bench.submit("b", [*PROMPT[:8], 7], 1)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 8
