"""The embedded engine's handoff side: the driver of the protocol, and the legs of this engine's server."""

from __future__ import annotations

from collections.abc import Callable

from kvhandoff.core.ids import new_handoff_id
from kvhandoff.core.records import LegRecord
from kvhandoff.embedded.api import Engine
from kvhandoff.embedded.legs import AgentLeg
from kvhandoff.engine.agent import HandoffAgent
from kvhandoff.handoff.tickets import BadTicket


class EngineAgent(HandoffAgent[Engine]):
    """Implements `api.Agent` for the server."""

    trace_leg: Callable[[], Callable[[LegRecord], None] | None] | None = None
    """For each leg that is opened: what gets its account, for traces. None: nothing is traced."""

    def leg(self, kv_transfer_params: object | None) -> AgentLeg:
        """See `api.Agent`."""
        if kv_transfer_params is None:
            return self._traced(AgentLeg(self, self.core, new_handoff_id(), None, {}))
        if not isinstance(kv_transfer_params, dict):
            raise BadTicket("it is no object with a ticket")
        ticket = self.admit(kv_transfer_params.get("ticket"))
        leg = AgentLeg(self, self.core, ticket.key.handoff_id, ticket, kv_transfer_params)
        self.open(leg)
        return self._traced(leg)

    def _traced(self, leg: AgentLeg) -> AgentLeg:
        if self.trace_leg is not None:
            leg.on_account = self.trace_leg()
        return leg
