"""From logits to tokens: greedy, sampled, masked, and what is reported about them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.core.errors import RequestError
from kvhandoff.embedded.api import SamplingParams
from kvhandoff.embedded.limits import check_params
from kvhandoff.embedded.sampler import RequestSampler, token_logprobs

EOS = frozenset({0, 1})


def sampler(*, prompt: tuple[int, ...] = (5, 6, 7), **params: object) -> RequestSampler:
    return RequestSampler(SamplingParams(**params), EOS, prompt)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draws(count: int, logits: torch.Tensor, **params: object) -> list[int]:
    one = sampler(**params)
    return [one.sample(logits, index).token_id for index in range(count)]


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id():
    assert draws(1, torch.tensor([0.0, 3.0, 2.0]), temperature=0.0) == [1]
    for size in (4, 7, 64, 1000, 49152):
        logits = torch.zeros(size)
        logits[size // 2 :] = 1.0
        assert draws(1, logits, temperature=0.0) == [size // 2]
        assert draws(1, logits, temperature=1.0, top_k=1, seed=3) == [size // 2]
    assert draws(5, torch.tensor([0.0, 3.0, 2.9]), temperature=1e-6) == [1] * 5


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it():
    torch.manual_seed(0)
    rows = torch.randn(50, 200)
    for params in ({}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 50, "top_p": 0.5, "temperature": 2.0}):
        alone = sampler(seed=11, **params)
        expected = [alone.sample(row, i).token_id for i, row in enumerate(rows)]
        again, neighbour = sampler(seed=11, **params), sampler(seed=12, **params)
        mixed = []
        for i, row in enumerate(rows):
            neighbour.sample(row, i)
            torch.rand(1)
            mixed.append(again.sample(row, i).token_id)
        assert mixed == expected
        assert len(set(expected)) > 1


def test_seeds_differ_negative_ones_and_none_too():
    logits = torch.zeros(1000)
    streams = [draws(20, logits, seed=seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63), None, None)]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_drawn_tokens_follow_the_distribution():
    counts = Counter(draws(4000, logits_of(0.1, 0.2, 0.3, 0.4), seed=1))
    # Four standard deviations of a binomial are at most 0.031.
    for token, probability in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.031)


def test_temperature_scales_the_logits():
    # 0.2 : 0.8 at temperature 0.5 is 0.04 : 0.64.
    counts = Counter(draws(4000, logits_of(0.2, 0.8), seed=2, temperature=0.5))
    assert counts[0] / 4000 == pytest.approx(0.04 / 0.68, abs=0.016)


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.3}, {3}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.71}, {0, 1, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        # Of the two that top_k leaves, the better one has 4/7.
        ({"top_k": 2, "top_p": 0.5}, {3}),
        ({"top_k": 2, "top_p": 0.6}, {1, 3}),
    ],
)
def test_top_k_and_top_p_cut(params: dict[str, float], possible: set[int]):
    logits = logits_of(0.2, 0.3, 0.1, 0.4)
    assert set(draws(400, logits, seed=4, **params)) == possible


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.floats(0.1, 4.0))
def test_top_p_leaves_the_smallest_set_that_has_the_mass(seed: int, top_p: float, spread: float):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * spread
    probabilities, order = logits.double().softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    allowed = set(order[before < top_p + 1e-9].tolist())
    assert set(draws(20, logits, seed=seed, top_p=top_p)) <= allowed


def test_top_p_finds_a_nucleus_larger_than_its_first_candidates():
    drawn = draws(3000, torch.zeros(5000), seed=1, top_p=0.9)
    assert len(set(drawn)) > 1500


def test_end_tokens_are_masked_until_the_minimum_is_out():
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    one = sampler(temperature=0.0, min_tokens=2, stop_token_ids=(2,))
    assert [one.sample(logits, generated).token_id for generated in range(4)] == [3, 3, 0, 0]
    assert not one.stops_at(0, 1)
    assert one.stops_at(0, 2)
    # What the model thinks is reported as it is.
    reported = sampler(temperature=0.0, min_tokens=1, logprobs=1).sample(logits, 0).logprob
    assert reported is not None
    assert (reported.token_id, reported.rank, reported.top[0][0]) == (2, 3, 0)
    assert logits.tolist() == [9.0, 8.0, 7.0, 6.0, 5.0]  # the runner's memory is untouched


def test_end_tokens_are_masked_when_drawing_too():
    assert set(draws(200, torch.zeros(4), seed=1, min_tokens=200, max_tokens=300)) == {2, 3}
    both = draws(200, torch.zeros(4), seed=1, min_tokens=200, ignore_eos=True, stop_token_ids=(3,))
    assert set(both) == {2}


def test_which_tokens_end_a_request():
    plain = sampler(stop_token_ids=(4,))
    assert [plain.stops_at(token, 1) for token in (0, 1, 2, 4)] == [True, True, False, True]
    ignoring = sampler(stop_token_ids=(4,), ignore_eos=True)
    assert [ignoring.stops_at(token, 1) for token in (0, 1, 2, 4)] == [False, False, False, True]


def test_logprobs_rank_and_alternatives():
    logits = logits_of(0.2, 0.3, 0.1, 0.4)
    [found] = token_logprobs(logits.unsqueeze(0), [0], 2)
    assert (found.token_id, found.rank) == (0, 3)
    assert found.logprob == pytest.approx(math.log(0.2))
    assert [token for token, _ in found.top] == [3, 1]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.4), math.log(0.3)])
    assert token_logprobs(logits.unsqueeze(0), [3], 0)[0].top == ()
    # Before the temperature, like vLLM's.
    warm = sampler(temperature=5.0, seed=1, logprobs=0).sample(logits, 0).logprob
    assert warm is not None
    assert warm.logprob == pytest.approx(float(logits[warm.token_id]))
    assert sampler(temperature=0.0).sample(logits, 0).logprob is None


@pytest.mark.parametrize("pieces", [[150], [1, 149], [64, 86], [100, 50]])
def test_prompt_logprobs_come_from_the_position_before(pieces: list[int]):
    prompt = tuple(range(150))
    rows = torch.randn(150, 200, generator=torch.Generator().manual_seed(0))
    one = sampler(prompt=prompt, prompt_logprobs=1)
    start = 0
    for count in pieces:
        one.observe_prompt(start, rows[start : start + count])
        start += count
    expected = rows.log_softmax(-1)
    first, *others = one.prompt_logprobs
    assert first is None
    assert len(others) == 149
    for position, found in enumerate(others, start=1):
        assert found is not None
        assert found.token_id == prompt[position]
        assert found.logprob == pytest.approx(float(expected[position - 1, prompt[position]]))
        assert found.top[0][0] == int(rows[position - 1].argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float):
    with pytest.raises(RequestError, match="no token can be chosen") as caught:
        sampler(temperature=temperature).sample(torch.tensor([1.0, bad, 2.0]), 0)
    assert (caught.value.status, caught.value.code) == (500, "bad_logits")


def test_a_mask_over_everything_is_an_error():
    with pytest.raises(RequestError, match="best logit is -inf"):
        sampler(min_tokens=1, stop_token_ids=(2,)).sample(torch.zeros(3), 0)


@pytest.mark.parametrize(
    ("params", "field", "allowed"),
    [
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": -5}, "max_tokens", "1 or more"),
        ({"min_tokens": -1}, "min_tokens", r"0 to max_tokens \(16\)"),
        ({"min_tokens": 17}, "min_tokens", r"0 to max_tokens \(16\)"),
        ({"temperature": -0.1}, "temperature", "0"),
        ({"temperature": math.nan}, "temperature", "0"),
        ({"temperature": math.inf}, "temperature", "0"),
        ({"top_p": 0.0}, "top_p", "more than 0"),
        ({"top_p": 1.1}, "top_p", "more than 0"),
        ({"top_k": -2}, "top_k", "1 or more"),
        ({"stop_token_ids": (3, 100)}, "stop_token_ids", "token ids from 0 to 99"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "token ids from 0 to 99"),
        ({"logprobs": -1}, "logprobs", "0 to the vocabulary's 100"),
        ({"prompt_logprobs": 101}, "prompt_logprobs", "0 to the vocabulary's 100"),
    ],
)
def test_parameters_out_of_range_are_named(params: dict[str, object], field: str, allowed: str):
    with pytest.raises(RequestError, match=f"^{field}: got .*, allowed is {allowed}") as caught:
        check_params(SamplingParams(**params), 100)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_parameters_at_their_bounds_are_accepted():
    check_params(SamplingParams(max_tokens=1, min_tokens=1, temperature=0, top_p=1, top_k=-1), 100)
    check_params(SamplingParams(stop_token_ids=(0, 99), logprobs=100, prompt_logprobs=0), 100)
