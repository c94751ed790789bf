"""Which prefill engine computes a prompt. Never an unhealthy one, another model's, or one of `avoid` (URLs):
the decode engine can do without."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from kvhandoff.core.reasons import Reason
from kvhandoff.router.policy.views import TYPICAL_TOKENS, EngineView, FleetView, usable

NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


class PrefillPolicy(Protocol):
    """`tokens`: of the prompt; `cached`: how many of them an engine (URL) is believed to have already."""

    def __call__(
        self,
        fleet: FleetView,
        model: str,
        avoid: Collection[str] = (),
        *,
        tokens: int = TYPICAL_TOKENS,
        cached: Mapping[str, int] = NOTHING_CACHED,
    ) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]: ...


def least_work(
    fleet: FleetView,
    model: str,
    avoid: Collection[str] = (),
    *,
    tokens: int = TYPICAL_TOKENS,
    cached: Mapping[str, int] = NOTHING_CACHED,
) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]:
    """The one that would be done first: fewest tokens to compute, this prompt's included.

    So a cached prefix draws a request as far as it saves work there, and no further (field case 42).
    """
    engines = _candidates(fleet, model, avoid)
    if not engines:
        return Reason.NO_PREFILL_ENGINE

    # Then the one that was chosen least, then in the configured order.
    return min(engines, key=lambda e: (e.load + max(0, tokens - cached.get(e.url, 0)), e.chosen))


def round_robin(
    fleet: FleetView,
    model: str,
    avoid: Collection[str] = (),
    *,
    tokens: int = TYPICAL_TOKENS,
    cached: Mapping[str, int] = NOTHING_CACHED,
) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]:
    """The one that was given the fewest requests, whatever they were."""
    engines = _candidates(fleet, model, avoid)
    if not engines:
        return Reason.NO_PREFILL_ENGINE
    return min(engines, key=lambda engine: engine.chosen)


def _candidates(fleet: FleetView, model: str, avoid: Collection[str]) -> list[EngineView]:
    engines = usable(fleet.prefill, model)
    return [engine for engine in engines if engine.url not in avoid] if avoid else engines
