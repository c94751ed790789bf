"""The router's own cuts of a request's time, over failed attempts."""

from __future__ import annotations

from typing import Any

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.router.body import parse_body, summarize
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.records import Draft


def exchange(clock: ManualClock) -> Exchange:
    fields = parse_body(b"{}")
    request: Any = None
    return Exchange(
        request=request,
        fields=fields,
        summary=summarize(fields, Endpoint.COMPLETIONS),
        headers={},
        clock=clock,
        timer=PhaseTimer(clock),
        draft=Draft(
            HandoffId("h"),
            endpoint=Endpoint.COMPLETIONS,
            requested_path="auto",
            on_reason=lambda reason: None,
        ),
    )


def step(x: Exchange, clock: ManualClock, seconds: float, phase: Phase) -> None:
    clock.advance(seconds)
    x.cut(phase)


def test_all_of_a_given_up_attempt_is_retry() -> None:
    clock = ManualClock()
    x = exchange(clock)
    step(x, clock, 1, Phase.ROUTE)
    step(x, clock, 2, Phase.PREFILL_NETWORK)
    step(x, clock, 4, Phase.BIND)
    clock.advance(8)
    x.begin_again()
    assert x.timer.seconds == {Phase.ROUTE: 1, Phase.RETRY: 14}
    assert x.key == HandoffKey(HandoffId("h"), 1)
    step(x, clock, 16, Phase.ROUTE)
    step(x, clock, 32, Phase.PREFILL_NETWORK)
    step(x, clock, 64, Phase.BIND)
    step(x, clock, 128, Phase.DECODE_NETWORK)
    assert x.timer.seconds == {
        Phase.ROUTE: 17,
        Phase.RETRY: 14,
        Phase.PREFILL_NETWORK: 32,
        Phase.BIND: 64,
        Phase.DECODE_NETWORK: 128,
    }
    assert x.elapsed() == x.timer.total == 255


def test_a_leg_that_was_not_sent_keeps_the_attempt() -> None:
    """Another decode engine gets the same offer: the prefill leg was not for nothing."""
    clock = ManualClock()
    x = exchange(clock)
    step(x, clock, 1, Phase.ROUTE)
    step(x, clock, 2, Phase.PREFILL_NETWORK)
    step(x, clock, 4, Phase.BIND)
    clock.advance(8)
    x.failed(dispatched=False)
    assert x.key == HandoffKey(HandoffId("h"), 0)
    assert x.timer.seconds == {
        Phase.ROUTE: 1,
        Phase.PREFILL_NETWORK: 2,
        Phase.BIND: 4,
        Phase.RETRY: 8,
    }
