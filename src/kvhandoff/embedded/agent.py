"""The embedded engine's handoff side: the driver of the protocol, and the legs of this engine's server."""

from __future__ import annotations

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.ids import new_handoff_id
from kvhandoff.embedded.api import Engine
from kvhandoff.embedded.legs import AgentLeg
from kvhandoff.engine.agent import EngineFacts, HandoffAgent
from kvhandoff.handoff.settings import MIN_RETURN_TOKENS, HandoffSettings
from kvhandoff.handoff.tickets import BadTicket
from kvhandoff.transport.mover import Mover


class EngineAgent(HandoffAgent):
    """Implements `api.Agent` for the server."""

    def __init__(
        self,
        facts: EngineFacts,
        engine: Engine,
        mover: Mover,
        cluster_key: bytes,
        *,
        control_bind: str = "tcp://127.0.0.1:0",
        settings: HandoffSettings | None = None,
        min_return_tokens: int = MIN_RETURN_TOKENS,
        clock: Clock = monotonic,
    ) -> None:
        """See `HandoffAgent`."""
        super().__init__(
            facts,
            engine,
            mover,
            cluster_key,
            control_bind=control_bind,
            settings=settings,
            min_return_tokens=min_return_tokens,
            clock=clock,
        )
        self._engine = engine

    def leg(self, kv_transfer_params: object | None) -> AgentLeg:
        """See `api.Agent`."""
        if kv_transfer_params is None:
            return AgentLeg(self, self._engine, new_handoff_id(), None, {})
        if not isinstance(kv_transfer_params, dict):
            raise BadTicket("it is no object with a ticket")
        ticket = self.admit(kv_transfer_params.get("ticket"))
        leg = AgentLeg(self, self._engine, ticket.key.handoff_id, ticket, kv_transfer_params)
        self.open(leg)
        return leg
