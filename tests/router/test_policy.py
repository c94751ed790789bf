from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.policy import (
    EngineView,
    FleetView,
    RequestSummary,
    choose_decode,
    choose_path,
    choose_prefill,
    requested_path,
)


def engine(url: str, **fields: Any) -> EngineView:
    values = {"model": "m", "healthy": True, "block_size": 16, "load": 0, "chosen": 0} | fields
    values = {"waiting": 0, "room": 1000} | values
    return EngineView(url=url, **values)


def request(**fields: Any) -> RequestSummary:
    values: dict[str, Any] = {
        "model": "m",
        "chat": False,
        "stream": False,
        "prompts": 1,
        "prompt_bound": 100,
        "prompt_logprobs": False,
        "cache_salt": "",
    }
    return RequestSummary(**(values | fields))


FLEET = FleetView([engine("p0")], [engine("d0")])
NO_PREFILL = FleetView([], [engine("d0")])
SICK = FleetView([engine("p0", healthy=False)], [engine("d0")])
OTHER_MODEL = FleetView([engine("p0", model="other")], [engine("d0")])


@pytest.mark.parametrize(
    ("requested", "summary", "fleet", "path", "reason"),
    [
        ("auto", {}, FLEET, "pull", None),
        ("auto", {"prompt_bound": 17}, FLEET, "pull", None),
        ("auto", {"prompt_bound": 16}, FLEET, "local", Reason.SHORT_PROMPT),
        ("auto", {}, NO_PREFILL, "local", Reason.NO_PREFILL_ENGINE),
        ("auto", {}, SICK, "local", Reason.NO_PREFILL_ENGINE),
        ("auto", {}, OTHER_MODEL, "local", Reason.NO_PREFILL_ENGINE),
        ("auto", {"prompts": 2}, FLEET, "local", Reason.SEVERAL_PROMPTS),
        ("auto", {"prompt_logprobs": True}, FLEET, "local", Reason.PROMPT_LOGPROBS),
        ("pull", {}, FLEET, "pull", Reason.FORCED),
        ("pull", {"prompt_bound": 1}, FLEET, "pull", Reason.FORCED),
        ("pull", {}, SICK, "local", Reason.NO_PREFILL_ENGINE),
        ("pull", {"prompts": 2}, FLEET, "local", Reason.SEVERAL_PROMPTS),
        ("pull", {"prompt_logprobs": True}, FLEET, "local", Reason.PROMPT_LOGPROBS),
        ("local", {}, FLEET, "local", Reason.FORCED),
        ("local", {}, NO_PREFILL, "local", Reason.FORCED),
        ("local", {"prompts": 2}, FLEET, "local", Reason.SEVERAL_PROMPTS),
    ],
)
def test_path(
    requested: Any, summary: dict[str, Any], fleet: FleetView, path: str, reason: Reason | None
) -> None:
    assert choose_path(requested, request(**summary), fleet) == (path, reason)


@pytest.mark.parametrize(
    ("header", "choice"),
    [(None, "pull"), ("auto", "auto"), ("LOCAL ", "local"), ("pull", "pull"), ("Push", "push")],
)
def test_requested_path(header: str | None, choice: str) -> None:
    assert requested_path(header, "pull") == choice


@pytest.mark.parametrize("header", ["", "shove", "pull,local", "x" * 1000])
def test_bad_requested_path(header: str) -> None:
    with pytest.raises(
        RequestError, match=r"x-kvhandoff-path: got .*, allowed is auto, pull, push, local"
    ) as error:
        requested_path(header, "auto")
    assert error.value.status == 400
    assert len(error.value.message) < 200


def prefill_url(engines: list[EngineView], avoid: set[str] = frozenset()) -> str | Reason:  # type: ignore[assignment]
    chosen = choose_prefill(FleetView(engines, []), "m", avoid)
    return chosen if isinstance(chosen, Reason) else chosen.url


def decode_url(engines: list[EngineView], avoid: set[str] = frozenset()) -> str | Reason:  # type: ignore[assignment]
    chosen = choose_decode(FleetView([], engines), "m", avoid)
    return chosen if isinstance(chosen, Reason) else chosen.url


@pytest.mark.parametrize("choose", [prefill_url, decode_url])
def test_least_loaded(choose: Any) -> None:
    assert choose([engine("a", load=2), engine("b", load=1), engine("c", load=3)]) == "b"
    assert choose([engine("a", load=1, chosen=7), engine("b", load=1, chosen=6)]) == "b"
    assert choose([engine("a", load=1, chosen=9), engine("b", load=2, chosen=0)]) == "a"
    assert choose([engine("b"), engine("a")]) == "b"
    assert choose([engine("a", healthy=False), engine("b", load=9)]) == "b"
    assert choose([engine("a", model="other"), engine("b", load=9)]) == "b"
    assert choose([engine("a"), engine("b", load=9)], {"a"}) == "b"


def test_none_left() -> None:
    assert prefill_url([]) == Reason.NO_PREFILL_ENGINE
    assert decode_url([]) == Reason.NO_DECODE_ENGINE
    assert decode_url([engine("a", healthy=False)]) == Reason.NO_DECODE_ENGINE
    # A decode engine that failed is better than none; a prefill engine that failed is not.
    assert prefill_url([engine("a")], {"a"}) == Reason.NO_PREFILL_ENGINE
    assert decode_url([engine("a"), engine("b", healthy=False)], {"a"}) == "a"
