"""What a leg and its parts need of the agent that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvhandoff.core.clock import Clock
from kvhandoff.core.ids import Identity
from kvhandoff.core.records import LegRecord
from kvhandoff.engine.api import EngineControl
from kvhandoff.handoff.events import Event

if TYPE_CHECKING:
    from kvhandoff.engine.legs import KVLeg


class LegHost(Protocol):
    """Used on the asyncio thread, unless a method says otherwise."""

    clock: Clock
    me: Identity
    control_address: str
    min_return_tokens: int
    """With less to gain than this many tokens, no history is read."""

    @property
    def core(self) -> EngineControl: ...

    def feed(self, event: Event) -> None:
        """Give the protocol an event."""
        ...

    def bind(self, request_id: str, leg: KVLeg) -> None:
        """Tell the leg what the engine says of this request, until `unbind_soon`."""
        ...

    def unbind_soon(self, request_id: str) -> None:
        """The engine says no more of this request. Called on the engine thread."""
        ...

    def ended(self, leg: KVLeg, record: LegRecord) -> None:
        """The leg is over."""
        ...
