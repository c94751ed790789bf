"""The policies by name: what the router's settings choose from, and what a simulator calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvhandoff.core.errors import ConfigError
from kvhandoff.router.policy import decode, path, prefill, rebinding
from kvhandoff.router.policy.decode import DecodePolicy
from kvhandoff.router.policy.path import PathDecision
from kvhandoff.router.policy.prefill import NOTHING_CACHED, PrefillPolicy
from kvhandoff.router.policy.requested import BINDING_CHOICES, BindingChoice, PathChoice
from kvhandoff.router.policy.views import EngineView, FleetView, History, RequestSummary

PREFILL_POLICIES: Final[Mapping[str, PrefillPolicy]] = {
    "least_work": prefill.least_work,
    "round_robin": prefill.round_robin,
}
DECODE_POLICIES: Final[Mapping[str, DecodePolicy]] = {
    "least_work": decode.least_work,
    "round_robin": decode.round_robin,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """One choice of each, by name. Raises ConfigError for a name that there isn't."""

    prefill: str = "least_work"
    decode: str = "least_work"
    binding: BindingChoice = "auto"

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field}: got {getattr(self, field)!r}, allowed is {', '.join(allowed)}")

    def choose_path(
        self,
        requested: PathChoice,
        request: RequestSummary,
        fleet: FleetView,
        history: History | None = None,
        cached: Mapping[str, int] = NOTHING_CACHED,
    ) -> PathDecision:
        """See `path.choose_path`."""
        return path.choose_path(
            requested,
            request,
            fleet,
            history,
            binding=self.binding,
            cached=cached,
            choose_prefill=self.choose_prefill,
            choose_decode=self.choose_decode,
        )

    @property
    def choose_prefill(self) -> PrefillPolicy:
        """See `prefill.py`."""
        return PREFILL_POLICIES[self.prefill]

    @property
    def choose_decode(self) -> DecodePolicy:
        """See `decode.py`."""
        return DECODE_POLICIES[self.decode]

    def choose_rebind(
        self, fleet: FleetView, model: str, present: str, tokens: int, avoid: Collection[str] = ()
    ) -> EngineView | None:
        """See `rebinding.py`; never, where the binding is another."""
        if self.binding != "rebind":
            return None
        return rebinding.choose_rebind(fleet, model, present, tokens, avoid)


_ALLOWED: dict[str, Collection[str]] = {
    "prefill": PREFILL_POLICIES,
    "decode": DECODE_POLICIES,
    "binding": BINDING_CHOICES,
}
