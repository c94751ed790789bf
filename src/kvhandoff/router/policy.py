"""Which path, which engines: pure functions of what is known of the fleet and of the request.

The simulator calls the same ones. Each returns its choice and, where the request takes another path than it
might have, the reason; where no engine can be chosen, the reason is the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from kvhandoff.core.errors import invalid
from kvhandoff.core.reasons import Reason
from kvhandoff.router.endpoints import Endpoint

Path = Literal["local", "pull", "push"]
PathChoice = Literal["auto", "pull", "push", "local"]
PATH_CHOICES: tuple[PathChoice, ...] = get_args(PathChoice)
PATH_HEADER = "x-kvhandoff-path"

ReturnChoice = Literal["auto", "on", "off"]
"""Whether a turn's KV is kept, and fetched for the next turn. `on`: whenever the history can be found;
`auto`: not when it is too short to gain anything."""
RETURN_CHOICES: tuple[ReturnChoice, ...] = get_args(ReturnChoice)
RETURN_HEADER = "x-kvhandoff-return"

PUSH_ABOVE = 512
"""Tokens. A prompt of one prefill chunk is complete when the first write could start."""
MIN_RETURN_TOKENS = 64
"""A history of fewer tokens is computed again: what engines fetch by default."""
HOLDER_LEAD = 4
"""How many legs more than the least loaded one the decode engine with the history may have."""

_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine, as a policy sees it."""

    url: str
    model: str
    healthy: bool
    block_size: int
    load: int
    """Legs that the router has reserved here and not seen end, plus the requests that the engine reported."""
    chosen: int
    """Legs that it was ever given; spreads requests over equally loaded engines."""
    waiting: int
    """Requests that have no blocks there yet, as it reported."""
    room: int
    """Blocks that an allocation could take, as it reported."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The engines by role."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """What a policy may know of a request."""

    model: str
    endpoint: Endpoint
    stream: bool
    prompts: int
    """Prompts in the body; completions may have several."""
    prompt_bound: int
    """The prompt has about this many tokens at most: its token ids, or the bytes of its text (a token has one
    at least); for a chat the bytes of its messages' JSON, whose roles and brackets stand for the template,
    and for a response those of its input and instructions."""
    prompt_logprobs: bool
    """Log-probabilities of the prompt itself are asked for."""
    cache_salt: str


class PathDecision(NamedTuple):
    """A path, and why it is this one; no reason when it is the usual one."""

    path: Path
    reason: Reason | None


def requested_path(header: str | None, default: PathChoice) -> PathChoice:
    """The path that this request asks for in its header `x-kvhandoff-path`. Raises RequestError."""
    return _requested(PATH_HEADER, header, PATH_CHOICES, default)


def requested_return(header: str | None, default: ReturnChoice) -> ReturnChoice:
    """What this request asks for in its header `x-kvhandoff-return`. Raises RequestError."""
    return _requested(RETURN_HEADER, header, RETURN_CHOICES, default)


def _requested(name: str, header: str | None, allowed: Sequence[_Choice], default: _Choice) -> _Choice:
    if header is None:
        return default
    for choice in allowed:
        if header.strip().lower() == choice:
            return choice
    raise invalid(name, header, ", ".join(allowed))


def choose_path(
    requested: PathChoice, request: RequestSummary, fleet: FleetView, holder: str | None = None
) -> PathDecision:
    """The path of a request: what can't be handed over stays local, then what was asked for, then `auto`.

    `holder` is the URL of the decode engine that has the conversation's history.
    """
    if request.prompts > 1:
        # A handoff moves one prompt's KV.
        return PathDecision("local", Reason.SEVERAL_PROMPTS)
    if request.prompt_logprobs:
        # They come out of computing every token of the prompt on the engine that answers.
        return PathDecision("local", Reason.PROMPT_LOGPROBS)
    if requested == "local":
        return PathDecision("local", Reason.FORCED)
    sources = _usable(fleet.prefill, request.model)
    if not sources:
        return PathDecision("local", Reason.NO_PREFILL_ENGINE)
    if requested != "auto":
        return PathDecision(requested, Reason.FORCED)
    if request.prompt_bound <= max(engine.block_size for engine in sources):
        return PathDecision("local", Reason.SHORT_PROMPT)
    if request.prompt_bound > PUSH_ABOVE and _has_room(request, fleet, holder):
        return PathDecision("push", None)
    # A later choice of the decode engine costs nothing here: one chunk can't be written while it is computed,
    # and an engine without room could not grant its blocks in time.
    return PathDecision("pull", None)


def _has_room(request: RequestSummary, fleet: FleetView, holder: str | None) -> bool:
    """Whether the decode engine that would be chosen now can grant its blocks at once."""
    target = choose_decode(fleet, request.model, holder=holder)
    if isinstance(target, Reason):
        return False
    return not target.waiting and target.room * target.block_size >= request.prompt_bound


def choose_return(requested: ReturnChoice, n_tokens: int) -> Reason | None:
    """Why a history of at most `n_tokens` tokens is not fetched; None: it is."""
    too_short = requested == "auto" and n_tokens < MIN_RETURN_TOKENS
    return Reason.RETURN_TOO_SHORT if too_short else None


def choose_prefill(
    fleet: FleetView, model: str, avoid: Collection[str] = ()
) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]:
    """The least loaded prefill engine, never one of `avoid` (URLs): the decode engine can do without."""
    usable = [engine for engine in _usable(fleet.prefill, model) if engine.url not in avoid]
    return _least_loaded(usable) if usable else Reason.NO_PREFILL_ENGINE


def choose_decode(
    fleet: FleetView, model: str, avoid: Collection[str] = (), holder: str | None = None
) -> EngineView | Literal[Reason.NO_DECODE_ENGINE]:
    """The decode engine at `holder` (URL), which has the conversation's history, unless another has much less
    to do (field case 42); else the least loaded one. One of `avoid` (URLs) only when there is no other."""
    usable = _usable(fleet.decode, model)
    if not usable:
        return Reason.NO_DECODE_ENGINE
    candidates = [engine for engine in usable if engine.url not in avoid] or usable
    least = _least_loaded(candidates)
    for engine in candidates:
        if engine.url == holder and engine.load - least.load <= HOLDER_LEAD:
            return engine
    return least


def _usable(engines: Sequence[EngineView], model: str) -> list[EngineView]:
    return [engine for engine in engines if engine.healthy and engine.model == model]


def _least_loaded(engines: Sequence[EngineView]) -> EngineView:
    return min(engines, key=lambda engine: (engine.load, engine.chosen))  # then in the configured order
