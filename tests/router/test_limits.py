"""A tenant's limits: what is admitted, when to come again, and what is put back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.body import parse_body, summarize
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.limits import Excess, Limits, Meter, Reserved, Usage, begin, end, reserve, settle
from kvhandoff.router.token_bound import token_bound

PER_MINUTE = Limits(tokens_per_minute=600)  # 10 a second


def reserved(usage: Usage, bound: int, now: float) -> Usage:
    answer = reserve(PER_MINUTE, usage, bound, now)
    assert isinstance(answer, Reserved)
    return answer.usage


def test_concurrency() -> None:
    two = Limits(max_concurrency=2)
    usage = Usage()
    for running in (1, 2):
        usage = begin(two, usage)  # type: ignore[assignment]
        assert usage.running == running
    assert begin(two, usage) == Excess("max_concurrency", 1.0, running=2)
    assert begin(two, end(usage)) == Usage(running=2)
    assert begin(Limits(), usage) == Usage(running=3)


def test_a_bucket_empties_and_fills() -> None:
    usage = reserved(Usage(at=100.0), 600, 100.0)
    assert reserve(PER_MINUTE, usage, 50, 100.0) == Excess("tokens_per_minute", 5.0)
    assert reserve(PER_MINUTE, usage, 50, 104.9) == Excess("tokens_per_minute", pytest.approx(0.1))
    assert reserved(usage, 50, 105.0).spent == 600
    assert reserved(usage, 1, 1000.0).spent == 1  # never more than full


def test_what_was_not_used_is_put_back() -> None:
    usage = reserved(Usage(), 500, 0.0)
    usage = settle(PER_MINUTE, usage, 500, 40, 0.0)
    assert usage.spent == 40
    assert settle(PER_MINUTE, usage, 500, 0, 0.0).spent == 0  # and no more than all


def test_what_was_used_beyond_is_a_debt() -> None:
    """A bound is cut off at a minute's worth, so that the request is admitted in the end."""
    answer = reserve(PER_MINUTE, Usage(), 10**9, 0.0)
    assert answer == Reserved(Usage(spent=600.0), 600)
    usage = settle(PER_MINUTE, answer.usage, 600, 1800, 0.0)
    assert usage.spent == 1800
    assert reserve(PER_MINUTE, usage, 1, 60.0) == Excess("tokens_per_minute", pytest.approx(60.1))


def test_without_a_limit_nothing_is_counted() -> None:
    assert reserve(Limits(), Usage(), 10**9, 5.0) == Reserved(Usage(), 0)
    assert settle(Limits(), Usage(), 0, 10**9, 5.0) == Usage()


steps = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 900), st.floats(0, 1)), max_size=60)


@given(steps)
def test_nobody_gets_more_than_the_rate(steps: list[tuple[float, int, float]]) -> None:
    """Whatever is asked for and used when: a minute's worth, and what the time has brought, is never
    exceeded; and a refused request that comes again when it was told to is admitted."""
    usage, now, used = Usage(), 0.0, 0.0
    for wait, bound, share in steps:
        now += wait
        answer = reserve(PER_MINUTE, usage, bound, now)
        if isinstance(answer, Excess):
            later = now + answer.retry_after_s
            assert later > now
            assert isinstance(reserve(PER_MINUTE, usage, bound, later + 1e-6), Reserved)
            continue
        tokens = int(min(bound, 600) * share)
        usage = settle(PER_MINUTE, answer.usage, answer.tokens, tokens, now)
        used += tokens
        assert used <= 600 + 10 * now + 1e-6


def unexpected(reason: Reason) -> None:
    raise AssertionError(reason)


async def test_a_meter_says_when_to_come_again() -> None:
    now = [7.0]
    meter = Meter("acme", Limits(max_concurrency=1, tokens_per_minute=600), lambda: now[0])
    charge = await meter.open(unexpected)
    await charge.reserve(600)
    with pytest.raises(RequestError) as refused:
        await meter.open(unexpected)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.headers == {"Retry-After": "1"}
    charge.close()
    charge.close()  # once
    again = await meter.open(unexpected)
    with pytest.raises(RequestError) as refused:
        await again.reserve(101)
    assert refused.value.headers == {"Retry-After": "11"}  # 10.1 s, rounded up
    assert "acme is 600" in refused.value.message
    again.close()
    charge.settle(100)
    charge.settle(100)  # once
    assert meter.usage == Usage(running=0, spent=100.0, at=7.0)
    now[0] += 5
    await (await meter.open(unexpected)).reserve(550)


async def test_a_worker_applies_its_part_and_names_the_whole() -> None:
    limits = Limits(max_concurrency=8, tokens_per_minute=600)
    meter = Meter("acme", limits, lambda: 0.0, processes=4)
    charges = [await meter.open(unexpected) for _ in range(2)]
    with pytest.raises(RequestError) as refused:
        await meter.open(unexpected)
    assert refused.value.message == (
        "max_concurrency: got 2 requests under way, allowed for acme is 8, 2 of it at each of 4 workers; "
        "try again in 1 s"
    )
    await charges[0].reserve(150)
    with pytest.raises(RequestError, match="allowed for acme is 600, 150 of it at each of 4 workers; "):
        await charges[1].reserve(1)
    charges[0].settle(100)
    await charges[1].reserve(50)
    meter.limits = Limits(max_concurrency=12)
    await meter.open(unexpected)


async def test_new_limits_hold_at_once() -> None:
    meter = Meter("acme", Limits(tokens_per_minute=600), lambda: 0.0)
    await (await meter.open(unexpected)).reserve(600)
    meter.limits = Limits(tokens_per_minute=1000)
    await (await meter.open(unexpected)).reserve(400)
    with pytest.raises(RequestError):
        await (await meter.open(unexpected)).reserve(1)


@pytest.mark.parametrize(
    ("endpoint", "body", "bound"),
    [
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 5}, 8),
        (Endpoint.COMPLETIONS, {"prompt": "abc", "max_tokens": 5}, 8),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 3 + 100),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": None}, 3 + 100),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": "x"}, 3 + 100),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": -5}, 3 + 100),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 10**30}, 3 + 100),
        (Endpoint.COMPLETIONS, {"prompt": "x" * 5000, "max_tokens": 5}, 105),  # no more than its context
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 5, "n": 3}, 18),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 5, "n": 1, "best_of": 4}, 23),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 5}, 9 + 10),
        (Endpoint.CHAT, {"messages": [], "max_tokens": 5}, 2 + 5),
        (Endpoint.CHAT, {"messages": [], "max_tokens": 90, "max_completion_tokens": 5}, 2 + 5),
        (Endpoint.CHAT, {"messages": []}, 2 + 100),
        (Endpoint.RESPONSES, {"input": "abc", "max_output_tokens": 5}, 5 + 5),
        (Endpoint.RESPONSES, {"input": "abc", "max_tokens": 5}, 5 + 100),
    ],
)
def test_token_bound(endpoint: Endpoint, body: dict[str, Any], bound: int) -> None:
    fields = parse_body(msgspec.json.encode(body))
    assert token_bound(fields, summarize(fields, endpoint), 100) == bound
