"""The circuit breaker, as a function of outcomes and time."""

from __future__ import annotations

import logging

import pytest

from kvhandoff.router.breaker import LONGEST_PAUSE_S, WINDOW_S, Breaker, Circuit, begun, failed, succeeded


def after(*failures: tuple[float, float]) -> Breaker:
    """After legs that (began, failed) then."""
    breaker = Breaker()
    for began, ended in failures:
        breaker = failed(breaker, began, ended)
    return breaker


def test_it_opens_after_three_in_a_row() -> None:
    assert not after((0, 1), (2, 3)).rests(3)
    opened = after((0, 1), (2, 3), (4, 5))
    assert opened.rests(5)
    assert opened.rests(5.99)
    assert not opened.rests(6)


def test_legs_that_one_event_cuts_off_are_one_failure() -> None:
    """Twenty legs under way when the engine's connections are reset."""
    breaker = after(*((began / 100, 1 + began / 1000) for began in range(20)))
    assert breaker.failures == 1
    assert not failed(breaker, 2, 3).rests(3)


def test_a_success_ends_the_row() -> None:
    breaker = succeeded(after((0, 1), (2, 3)))
    breaker = failed(failed(breaker, 4, 5), 6, 7)
    assert breaker.failures == 2
    assert not breaker.rests(7)


def test_a_success_forgets_no_event() -> None:
    """What one event cut off is one failure, also if a leg has succeeded between its parts."""
    breaker = succeeded(after((0, 1)))
    assert failed(breaker, 0.5, 2).failures == 0


def test_a_row_that_takes_long_is_no_outage() -> None:
    breaker = after((0, 1), (2, 3))
    breaker = failed(breaker, 4, 1 + WINDOW_S + 0.1)
    assert breaker.failures == 1
    assert not breaker.rests(1 + WINDOW_S + 0.1)


def test_one_leg_probes_in_each_pause_and_pauses_grow() -> None:
    breaker = after((0, 1), (2, 3), (4, 5))
    now, pauses = 6.0, []
    for _ in range(8):
        assert not breaker.rests(now)
        breaker = begun(breaker, now)
        assert breaker.rests(now)  # for the others
        assert begun(breaker, now + 0.1) == breaker
        breaker = failed(breaker, now, now + 0.2)
        pauses.append(breaker.until - now)
        now = breaker.until
    assert pauses == [2, 4, 8, 16, 30, 30, 30, 30]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_probe_without_an_outcome_is_followed_by_another() -> None:
    """Its client has left: it says nothing, and holds nothing up."""
    breaker = begun(after((0, 1), (2, 3), (4, 5)), 6)
    assert not breaker.rests(8)


def test_a_success_closes_it_and_the_next_pause_is_short_again() -> None:
    breaker = begun(after((0, 1), (2, 3), (4, 5)), 6)
    breaker = succeeded(begun(breaker, 8))
    assert not breaker.rests(8.1)
    for now in (9, 11, 13):
        breaker = failed(breaker, now, now + 1)
    assert breaker.until == 15


def test_legs_that_fail_while_it_is_open_change_nothing() -> None:
    opened = after((0, 1), (2, 3), (4, 5))
    assert failed(opened, 4.5, 5.5) == opened


def test_a_circuit_counts_a_leg_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    circuit = Circuit("decode engine at http://d", lambda: now[0])
    for _ in range(3):
        now[0] += 1
        leg = circuit.begin()
        now[0] += 1
        leg.failed()
        leg.succeeded()  # too late
    assert circuit.rests
    now[0] += 1
    assert not circuit.rests
    leg = circuit.begin()
    assert circuit.rests
    leg.succeeded()
    leg.failed()
    assert not circuit.rests
    said = [record.message for record in caplog.records]
    assert said == [
        "decode engine at http://d: 3 legs in a row have failed; it rests",
        "decode engine at http://d: gets legs again",
    ]
