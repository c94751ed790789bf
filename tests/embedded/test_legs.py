"""A leg's calls to the engine and to the protocol, in their order."""

from __future__ import annotations

from typing import Any

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.embedded.api import EngineRequest, SamplingParams
from kvhandoff.embedded.legs import AgentLeg
from kvhandoff.engine.legs import KVLeg
from kvhandoff.handoff.events import Event, LoadDropped
from kvhandoff.handoff.messages import OfferRef
from kvhandoff.handoff.tickets import Ticket

D = Identity(EngineId("decode-0"), Epoch("d"))
P = Identity(EngineId("prefill-0"), Epoch("p"))
KEY = HandoffKey(HandoffId("h"), 0)


class Neighbours:
    """Engine and agent of one leg; `said` is what they were told."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.core: Any = self
        self.clock = monotonic
        self.me = D
        self.control_address = "tcp://d"
        self.min_return_tokens = 64

    def chain(self, token_ids: list[int], cache_salt: str) -> TokenChain:
        return TokenChain.of(cache_salt.encode(), 4, token_ids)

    def submit(self, request: EngineRequest) -> None:
        self.said.append("submit")

    def abort(self, request_id: str) -> None:
        self.said.append("abort")

    def bind(self, request_id: str, leg: KVLeg) -> None:
        self.said.append("bind")

    def feed(self, event: Event) -> None:
        self.said.append(type(event))


def test_a_leg_that_yields_has_the_engine_give_its_blocks_up_before_the_protocol_frees_them():
    neighbours: Any = Neighbours()
    source = OfferRef(key=KEY, source=P, control_address="tcp://p")
    ticket = Ticket(leg="decode", audience=D, not_after=monotonic() + 60, key=KEY, push_from=source)
    leg = AgentLeg(neighbours, neighbours, "h", ticket, {})
    leg.submit(EngineRequest("r", [1, 2, 3, 4, 5], SamplingParams(), print))
    neighbours.said.clear()
    assert leg.yields()
    assert neighbours.said == ["abort", LoadDropped]
