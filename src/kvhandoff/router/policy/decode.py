"""Which decode engine answers. Never an unhealthy one or another model's; one of `avoid` (URLs) only when
there is no other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

from kvhandoff.core.reasons import Reason
from kvhandoff.router.policy.views import TYPICAL_TOKENS, EngineView, FleetView, usable

HOLDER_LEAD = 4
"""How many requests like this one more than the least loaded engine the holder of the history may have."""


class DecodePolicy(Protocol):
    """`holder`: the engine (URL) that keeps the conversation's history; `tokens`: of the prompt."""

    def __call__(
        self,
        fleet: FleetView,
        model: str,
        avoid: Collection[str] = (),
        holder: str | None = None,
        *,
        tokens: int = TYPICAL_TOKENS,
    ) -> EngineView | Literal[Reason.NO_DECODE_ENGINE]: ...


def least_work(
    fleet: FleetView,
    model: str,
    avoid: Collection[str] = (),
    holder: str | None = None,
    *,
    tokens: int = TYPICAL_TOKENS,
) -> EngineView | Literal[Reason.NO_DECODE_ENGINE]:
    """`holder`, unless another has much less to do (field case 42); else the one with the fewest tokens."""
    engines = _candidates(fleet, model, avoid)
    if not engines:
        return Reason.NO_DECODE_ENGINE
    least = min(engines, key=lambda engine: (engine.load, engine.chosen))  # then in the configured order
    if holder is None:
        return least
    lead = HOLDER_LEAD * max(tokens, TYPICAL_TOKENS)
    for engine in engines:
        if engine.url == holder and engine.load - least.load <= lead:
            return engine
    return least


def round_robin(
    fleet: FleetView,
    model: str,
    avoid: Collection[str] = (),
    holder: str | None = None,
    *,
    tokens: int = TYPICAL_TOKENS,
) -> EngineView | Literal[Reason.NO_DECODE_ENGINE]:
    """The one that was given the fewest requests, whatever they were and whoever has the history."""
    engines = _candidates(fleet, model, avoid)
    if not engines:
        return Reason.NO_DECODE_ENGINE
    return min(engines, key=lambda engine: engine.chosen)


def _candidates(fleet: FleetView, model: str, avoid: Collection[str]) -> list[EngineView]:
    engines = usable(fleet.decode, model)
    return ([engine for engine in engines if engine.url not in avoid] or engines) if avoid else engines
