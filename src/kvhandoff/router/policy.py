"""Which path, which engines: pure functions of what is known of the fleet and of the request.

The simulator calls the same ones. Each returns its choice and, where the request takes another path than it
might have, the reason; where no engine can be chosen, the reason is the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvhandoff.core.errors import invalid
from kvhandoff.core.reasons import Reason

Path = Literal["local", "pull"]
PathChoice = Literal["auto", "pull", "local"]
PATH_CHOICES: tuple[PathChoice, ...] = get_args(PathChoice)
PATH_HEADER = "x-kvhandoff-path"


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


@dataclass(frozen=True, slots=True)
class FleetView:
    """The engines by role."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """What a policy may know of a request."""

    model: str
    chat: bool
    stream: bool
    prompts: int
    """Prompts in the body; completions may have several."""
    prompt_bound: int
    """The prompt has about this many tokens at most: its token ids, or the bytes of its text (a token has one
    at least); for a chat the bytes of its messages' JSON, whose roles and brackets stand for the template."""
    prompt_logprobs: bool
    """Log-probabilities of the prompt itself are asked for."""
    cache_salt: str


class PathDecision(NamedTuple):
    """A path, and why it is this one; no reason when it is the usual one."""

    path: Path
    reason: Reason | None


def requested_path(header: str | None, default: PathChoice) -> PathChoice:
    """The path that this request asks for in its header `x-kvhandoff-path`. Raises RequestError."""
    if header is None:
        return default
    for choice in PATH_CHOICES:
        if header.strip().lower() == choice:
            return choice
    raise invalid(PATH_HEADER, header, ", ".join(PATH_CHOICES))


def choose_path(requested: PathChoice, request: RequestSummary, fleet: FleetView) -> PathDecision:
    """The path of a request: what can't be handed over stays local, then what was asked for, then `auto`."""
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
    if requested == "pull":
        return PathDecision("pull", Reason.FORCED)
    if request.prompt_bound <= max(engine.block_size for engine in sources):
        return PathDecision("local", Reason.SHORT_PROMPT)
    return PathDecision("pull", None)


def choose_prefill(
    fleet: FleetView, model: str, avoid: Collection[str] = ()
) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]:
    """The least loaded prefill engine, never one of `avoid` (URLs): the decode engine can do without."""
    usable = [engine for engine in _usable(fleet.prefill, model) if engine.url not in avoid]
    return _least_loaded(usable) if usable else Reason.NO_PREFILL_ENGINE


def choose_decode(
    fleet: FleetView, model: str, avoid: Collection[str] = ()
) -> EngineView | Literal[Reason.NO_DECODE_ENGINE]:
    """The least loaded decode engine; one of `avoid` (URLs) only when there is no other."""
    usable = _usable(fleet.decode, model)
    if not usable:
        return Reason.NO_DECODE_ENGINE
    return _least_loaded([engine for engine in usable if engine.url not in avoid] or usable)


def _usable(engines: Sequence[EngineView], model: str) -> list[EngineView]:
    return [engine for engine in engines if engine.healthy and engine.model == model]


def _least_loaded(engines: Sequence[EngineView]) -> EngineView:
    return min(engines, key=lambda engine: (engine.load, engine.chosen))  # then in the configured order
