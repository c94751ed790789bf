"""The engines of the transcripts. Their clocks show different times: no rule may compare them."""

from __future__ import annotations

import pytest

from tests.handoff.sides import D2, D, P, Side, acquaint, side


@pytest.fixture
def p() -> Side:
    return side(P, 100.0)


@pytest.fixture
def d() -> Side:
    return side(D, 7.0)


@pytest.fixture
def d2() -> Side:
    return side(D2, 3000.0)


@pytest.fixture
def all_acquainted(p: Side, d: Side, d2: Side) -> None:
    """The source has shaken hands with both destinations, and they with it."""
    for destination in (d, d2):
        acquaint(p, destination)
        acquaint(destination, p)
