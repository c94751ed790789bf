from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import (
    TYPICAL_TOKENS,
    EngineView,
    FleetView,
    History,
    RequestSummary,
    choose_return,
    requested_path,
    requested_return,
)
from kvhandoff.router.policy.decode import HOLDER_LEAD
from kvhandoff.router.policy.decode import least_work as choose_decode
from kvhandoff.router.policy.path import choose_path
from kvhandoff.router.policy.prefill import least_work as choose_prefill


def engine(url: str, **fields: Any) -> EngineView:
    values = {"model": "m", "healthy": True, "block_size": 16, "load": 0, "chosen": 0} | fields
    values = {"waiting": 0, "room": 1000} | values
    return EngineView(url=url, **values)


def request(**fields: Any) -> RequestSummary:
    values: dict[str, Any] = {
        "model": "m",
        "endpoint": Endpoint.COMPLETIONS,
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
NO_DECODE = FleetView([engine("p0")], [engine("d0", healthy=False)])
QUEUE = FleetView([engine("p0")], [engine("d0", waiting=1)])
LITTLE_ROOM = FleetView([engine("p0")], [engine("d0", room=50)])
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
        ("auto", {"prompt_bound": 512}, FLEET, "pull", None),
        ("auto", {"prompt_bound": 513}, FLEET, "push", None),
        ("auto", {"prompt_bound": 513}, NO_PREFILL, "local", Reason.NO_PREFILL_ENGINE),
        ("auto", {"prompt_bound": 513}, NO_DECODE, "pull", None),
        ("auto", {"prompt_bound": 513}, QUEUE, "pull", None),
        ("auto", {"prompt_bound": 16 * 50}, LITTLE_ROOM, "push", None),
        ("auto", {"prompt_bound": 16 * 50 + 1}, LITTLE_ROOM, "pull", None),
        ("push", {}, FLEET, "push", Reason.FORCED),
        ("push", {"prompt_bound": 1}, QUEUE, "push", Reason.FORCED),
        ("push", {}, SICK, "local", Reason.NO_PREFILL_ENGINE),
        ("push", {"prompts": 2}, FLEET, "local", Reason.SEVERAL_PROMPTS),
        ("push", {"prompt_logprobs": True}, FLEET, "local", Reason.PROMPT_LOGPROBS),
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
    """Nothing is measured and nothing runs: the costs then decide as this table says."""
    assert choose_path(requested, request(**summary), fleet)[:2] == (path, reason)


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


def test_room_is_that_of_the_engine_which_would_be_chosen() -> None:
    full, empty = engine("full", room=1), engine("empty", load=1)
    fleet = FleetView([engine("p0")], [full, empty])
    long = request(prompt_bound=600)
    assert choose_path("auto", long, fleet)[:2] == ("pull", None)
    assert choose_path("auto", long, fleet, History("empty", 64))[:2] == ("push", None)


def test_holder_of_the_history() -> None:
    def chosen(*engines: EngineView, avoid: set[str] = frozenset(), holder: str | None = "a") -> str:  # type: ignore[assignment]
        choice = choose_decode(FleetView([], engines), "m", avoid, holder)
        assert not isinstance(choice, Reason)
        return choice.url

    b, lead = engine("b", load=1), HOLDER_LEAD * TYPICAL_TOKENS
    assert chosen(engine("a", load=1 + lead), b) == "a"
    assert chosen(engine("a", load=2 + lead), b) == "b"
    assert chosen(engine("a", load=3), b, holder=None) == "b"
    assert chosen(engine("a", load=3), b, holder="gone") == "b"
    assert chosen(engine("a", healthy=False), b) == "b"
    assert chosen(engine("a", model="other"), b) == "b"
    assert chosen(engine("a"), b, avoid={"a"}) == "b"
    assert chosen(engine("a"), avoid={"a"}) == "a"


@pytest.mark.parametrize(
    ("requested", "n_tokens", "reason"),
    [
        ("auto", 64, None),
        ("auto", 63, Reason.RETURN_TOO_SHORT),
        ("on", 1, None),
    ],
)
def test_return(requested: Any, n_tokens: int, reason: Reason | None) -> None:
    assert choose_return(requested, n_tokens) == reason


@pytest.mark.parametrize(("header", "choice"), [(None, "off"), ("auto", "auto"), (" ON", "on")])
def test_requested_return(header: str | None, choice: str) -> None:
    assert requested_return(header, "off") == choice
    with pytest.raises(RequestError, match=r"x-kvhandoff-return: got 'yes', allowed is auto, on, off"):
        requested_return("yes", "off")


def test_none_left() -> None:
    assert prefill_url([]) == Reason.NO_PREFILL_ENGINE
    assert decode_url([]) == Reason.NO_DECODE_ENGINE
    assert decode_url([engine("a", healthy=False)]) == Reason.NO_DECODE_ENGINE
    # A decode engine that failed is better than none; a prefill engine that failed is not.
    assert prefill_url([engine("a")], {"a"}) == Reason.NO_PREFILL_ENGINE
    assert decode_url([engine("a"), engine("b", healthy=False)], {"a"}) == "a"
