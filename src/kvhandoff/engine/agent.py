"""The engine's handoff side: drives the protocol (`handoff/`) with this engine's clock, sockets and memory.

Everything here runs on the asyncio thread, except the `KVHooks` methods (the engine's thread) and the mover's
callbacks (its own thread): those only hand over with `call_soon_threadsafe`, in the order they are called.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, Generic, NoReturn, TypeVar

from prometheus_client import Counter

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.errors import RequestError
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import ReasonKind
from kvhandoff.core.records import BlockCounts, EngineState, LegRecord
from kvhandoff.engine.api import EngineControl
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.engine.leg_log import log_leg
from kvhandoff.engine.legs import KVLeg
from kvhandoff.engine.loops import hand_over
from kvhandoff.engine.metrics import EngineMetrics
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import PROTOCOL_VERSION, Hello, decode, encode
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.settings import MIN_RETURN_TOKENS, HandoffSettings
from kvhandoff.handoff.tickets import BadTicket, Ticket, TicketGate, TicketKey
from kvhandoff.transport.control import ControlPlane
from kvhandoff.transport.liveness import Watcher, this_process
from kvhandoff.transport.mover import BlockMover, Moved

_log = logging.getLogger(__name__)

_Core = TypeVar("_Core", bound=EngineControl)

_RECORDS_KEPT = 4096

_AFTER_A_BUG_S = 0.1
"""The protocol's next deadline is not looked at earlier: what has just failed may fail again at once."""


class HandoffAgent(Generic[_Core]):
    """Implements `api.HandoffSide` for the router and `api.KVHooks` for the engine."""

    def __init__(
        self,
        facts: EngineFacts,
        core: _Core,
        mover: BlockMover,
        cluster_key: bytes,
        *,
        control_bind: str = "tcp://127.0.0.1:0",
        settings: HandoffSettings | None = None,
        min_return_tokens: int = MIN_RETURN_TOKENS,
        clock: Clock = monotonic,
    ) -> None:
        """`mover` is not started yet; `start` does it."""
        self.core = core
        self.clock = clock
        self.me = facts.identity
        self.control_address = ""
        self.mover = mover
        self.min_return_tokens = min_return_tokens
        self._watcher = Watcher(lambda peer: self.feed(ev.PeerDied(peer)))
        self._facts = facts
        self._settings = settings or HandoffSettings()
        self._gate = TicketGate(TicketKey(cluster_key), self.me)
        self._at_gate = threading.Lock()
        """vLLM admits legs on its main thread; the router's other orders come in on the loop's."""
        self._control = ControlPlane(cluster_key, self._received, control_bind, on_disconnect=self._gone)
        self._metrics = EngineMetrics()
        self._node: HandoffNode | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._legs: dict[HandoffKey, KVLeg] = {}
        self._by_request: dict[str, KVLeg] = {}
        self._records: deque[LegRecord] = deque(maxlen=_RECORDS_KEPT)
        self._cursor = 0

    async def start(self) -> None:
        """Register the memory, listen for peers. Raises ConfigError or TransportError."""
        self._loop = asyncio.get_running_loop()
        metadata = await asyncio.to_thread(self.mover.start)
        self.control_address = await self._control.start()
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=self._facts.model_fingerprint,
            layout=self.core.layout,
            num_blocks=self._facts.num_blocks,
            data_plane=self.mover.kind,
            data_plane_metadata=metadata,
            processes=self._facts.processes or (this_process(),),
        )
        self._node = HandoffNode(self.me, self.control_address, hello, self._settings)

    async def close(self) -> None:
        """Stop moving and talking. The engine core is closed before, so that nothing new comes in. Another
        life that answers here afterwards says truly that this one writes nothing more."""
        await asyncio.to_thread(self.mover.close)
        self._watcher.close()
        if self._timer is not None:
            self._timer.cancel()
        await self._control.close()

    # --------------------------------------------------------------------------- what the integration calls

    def admit(self, signed: object) -> Ticket:
        """The ticket to a leg, if this engine may obey it now. Raises BadTicket. Any thread."""
        ticket = self._pass_gate(signed)
        if ticket.leg not in ("prefill", "decode", "local"):
            raise BadTicket(f"a ticket to {ticket.leg} starts no request")
        return ticket

    def refused(self) -> None:
        """The integration served a request without obeying its ticket. Any thread."""
        self._metrics.refused()

    @property
    def spans(self) -> Counter:
        """Of traces, by `result`: for whoever sends them."""
        return self._metrics.spans

    def open(self, leg: KVLeg) -> None:
        """From now on the protocol's news of this leg's key are for it."""
        self._legs[leg.key] = leg

    # ------------------------------------------------------------------------------------ api.HandoffSide

    @property
    def healthy(self) -> bool:
        """See `api.HandoffSide`."""
        return self.mover.alive

    def state(self, after: int) -> EngineState:
        """See `api.HandoffSide`."""
        counts = self.core.load()
        first_kept = self._cursor - len(self._records)
        skip = max(0, min(after, self._cursor) - first_kept)
        facts = self._facts
        return EngineState(
            engine_id=facts.engine_id,
            epoch=facts.epoch,
            role=facts.role,
            model=facts.model,
            model_fingerprint=facts.model_fingerprint,
            max_model_len=self.core.max_model_len,
            block_size=self.core.layout.block_size,
            control_address=self.control_address,
            data_plane=self.mover.kind,
            now=self.clock(),
            running=counts["running"],
            waiting=counts["waiting"],
            loading=counts["loading"],
            blocks=self.blocks(),
            records=list(self._records)[skip:],
            cursor=self._cursor,
            integration=facts.integration,
            progress=counts["steps"],
        )

    def about(self) -> dict[str, str]:
        """See `api.HandoffSide`."""
        layout, settings = self.core.layout, self._settings
        return {
            "kvhandoff": version("kvhandoff"),
            "protocol_version": str(PROTOCOL_VERSION),
            "integration": self._facts.integration,
            "data_plane": self.mover.kind,
            **{f"layout.{name}": str(getattr(layout, name)) for name in layout.__struct_fields__},
            **{f"settings.{name}": str(getattr(settings, name)) for name in settings.__struct_fields__},
            **self._facts.about,
        }

    def blocks(self) -> BlockCounts:
        """See `api.HandoffSide`. Several threads own the parts: sums are exact only while nothing runs."""
        counts = self.core.load()
        node = self._running_node
        offered, retained = len(set(node.offers.blocks())), len(set(node.offers.retained()))
        loading, granted = len(node.reads.loading()), len(node.grants.granted())
        quarantined = len(node.reads.quarantined()) + len(node.grants.quarantined())
        total, free, cached = counts["blocks_total"], counts["blocks_free"], counts["blocks_cached"]
        return BlockCounts(
            total=total,
            free=free,
            cached=cached,
            used=max(0, total - free - cached - offered - loading - granted - quarantined),
            offered=offered,
            retained=retained,
            loading=loading,
            granted=granted,
            quarantined=quarantined,
        )

    def withdraw(self, signed: object) -> None:
        """See `api.HandoffSide`."""
        ticket = self._admit(signed, "withdraw")
        leg = self._legs.get(ticket.key)
        if leg is not None:
            leg.withdrawn()
        self.feed(ev.Withdrawn(ticket.key))

    def yield_leg(self, signed: object) -> None:
        """See `api.HandoffSide`."""
        leg = self._legs.get(self._admit(signed, "yield").key)
        if leg is not None and not leg.yields():
            raise RequestError(f"leg {leg.key}: it has begun to answer", status=409, code="leg_begun")

    def connect_peers(self, signed: object) -> None:
        """See `api.HandoffSide`."""
        for address in self._admit(signed, "peers").peers:
            self.feed(ev.PeerWanted(address))

    def metrics(self) -> bytes:
        """See `api.HandoffSide`."""
        counts = self.core.load()
        requests = {state: counts[state] for state in ("running", "waiting", "loading")}
        return self._metrics.render(self.blocks(), requests, self._running_node.leases())

    # ---------------------------------------------------------------------- api.KVHooks (engine's thread)

    def load_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_allocated(blocks, cached_blocks))

    def load_skipped(self, request_id: str) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_skipped())

    def load_abandoned(self, request_id: str) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_abandoned())

    def offer_grown(self, request_id: str, blocks: Sequence[int]) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_grown(blocks))

    def offer_abandoned(self, request_id: str) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_offer_abandoned())

    def offered(self, request_id: str, blocks: Sequence[int], first_token: int) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_offered(blocks, first_token))

    def retained(self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """See `api.KVHooks`."""
        self._tell(request_id, lambda leg: leg.on_retained(hashes, blocks))

    def memory_short(self, blocks: int) -> None:
        """See `api.KVHooks`."""
        self._soon(self.feed, ev.MemoryShort(blocks))

    def _tell(self, request_id: str, news: Callable[[KVLeg], None]) -> None:
        self._soon(lambda: news(self._by_request[request_id]))

    # ------------------------------------------------------------------------------------ legs.LegHost

    def bind(self, request_id: str, leg: KVLeg) -> None:
        """See `legs.LegHost`."""
        self._by_request[request_id] = leg

    def unbind_soon(self, request_id: str) -> None:
        """See `legs.LegHost`. Behind all the hooks' calls for the request, since it takes the same way."""
        self._soon(self._unbind, request_id)

    def _unbind(self, request_id: str) -> None:
        leg = self._by_request.pop(request_id)
        leg.on_ended()
        if leg.is_finished:
            self._legs.pop(leg.key, None)

    def ended(self, leg: KVLeg, record: LegRecord) -> None:
        """See `legs.LegHost`."""
        if leg not in self._by_request.values():
            self._legs.pop(leg.key, None)
        self._records.append(record)
        self._cursor += 1
        self._metrics.leg(record)
        log_leg(leg.key, record)

    def feed(self, event: ev.Event) -> None:
        """Give the protocol an event, carry out what follows, and come back at its next deadline.

        A bug in one effect is raised when the others have been carried out; each is another request's. And
        no wait loses its deadline by it (rule 3).
        """
        soonest = _AFTER_A_BUG_S
        try:
            with ExitStack() as effects:  # goes on behind an exception, and raises it with those before
                for effect in reversed(self._running_node.handle(self.clock(), event)):
                    effects.callback(self._carry_out, effect)
            soonest = 0.0
        finally:
            self._come_back(soonest)

    def _come_back(self, soonest: float) -> None:
        """At the protocol's next deadline, but not before so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._running_node.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(soonest, deadline - self.clock()), self.feed, ev.Tick())

    # ------------------------------------------------------------------------------------ the protocol

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send():
                self._control.send(effect.address, encode(self._running_node.envelope(effect)))
            case ev.ConnectPeer(peer, metadata):
                self.mover.connect(peer, metadata, lambda error: self._soon(self._connected, peer, error))
            case ev.DisconnectPeer(peer):
                self.mover.disconnect(peer)
            case ev.WatchPeer(peer, processes):
                self._watcher.watch(peer, processes)
            case ev.PostRead(load, peer, copies):
                self.mover.move(
                    "read", peer, copies, lambda moved: self._soon(self._read_ended, load, peer, moved)
                )
            case ev.PostWrite(write, peer, copies):
                self.mover.move(
                    "write", peer, copies, lambda moved: self._soon(self._write_ended, write, moved)
                )
            case ev.FreeBlocks(blocks):
                self.core.release_blocks(blocks)
            case ev.Loaded(load, tokens, commit):
                self._legs[load].on_loaded(tokens, commit)
            case ev.Missed(load, reason, detail):
                self._metrics.reason(reason)
                self._legs[load].on_missed(reason, detail)
            case ev.Noted(key, reason, detail):
                self._metrics.reason(reason)
                level = logging.INFO if reason.kind is ReasonKind.DECLINE else logging.WARNING
                _log.log(level, "%s: %s, %s", key or "engine", reason, detail)

    def _connected(self, peer: Identity, error: Exception | None) -> None:
        self.feed(ev.PeerConnected(peer, None if error is None else str(error)))

    def _read_ended(self, load: HandoffKey, peer: Identity, moved: Moved) -> None:
        leg = self._legs.get(load)
        if leg is not None:
            leg.on_moved(moved)
        if moved.error is None:
            self.feed(ev.ReadLanded(load))
        else:
            self.feed(ev.ReadFailed(load, peer, moved.error))

    def _write_ended(self, write: ev.WriteKey, moved: Moved) -> None:
        self._metrics.written(moved)
        if moved.error is None:
            self.feed(ev.WriteLanded(write))
        else:
            where = f"write {write.chunk} of grant {write.number} to {write.grantee}"
            _log.warning("%s: %s", where, moved.error)
            self.feed(ev.WriteFailed(write, moved.error))

    def _received(self, raw: bytes) -> None:
        self.feed(ev.Received(decode(raw)))

    def _gone(self, address: str) -> None:
        self.feed(ev.PeerGone(address))

    def _soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """From the engine's thread, or the mover's, to ours."""
        hand_over(self._loop, function, *arguments)

    def _pass_gate(self, signed: object) -> Ticket:
        with self._at_gate:
            return self._gate.admit(signed, self.clock())

    def _admit(self, signed: object, leg: str) -> Ticket:
        ticket = self._pass_gate(signed)
        if ticket.leg != leg:
            raise BadTicket(f"a ticket to {ticket.leg} does not {leg}")
        return ticket

    @property
    def _running_node(self) -> HandoffNode:
        if self._node is None:
            _not_started()
        return self._node


def _not_started() -> NoReturn:
    raise RuntimeError("the agent is not started")
