"""Who the other engines are: the handshake, and which life of which engine listens where.

    state       event                              effect                       next
    ----------  ---------------------------------  ---------------------------  ----------
    (none)      wanted                             send hello                   GREETING
    GREETING    retry due                          send hello                   GREETING
    GREETING    welcome, compatible                watch, connect               CONNECTING
    GREETING    the same, of the next life         disconnect, watch, connect,  CONNECTING
                                                   tell: why
    GREETING    welcome that differs               tell: handshake_refused      (none)
    GREETING    refused                            tell: handshake_refused      (none)
    GREETING    deadline                           tell: peer_unreachable       (none)
    CONNECTING  data plane connected               tell: up                     UP
    CONNECTING  data plane error                   tell: handshake_refused      (none)
    CONNECTING  deadline                           tell: peer_unreachable       (none)
    CONNECTING  connection broke                   disconnect, tell: why        (none)
    CONNECTING  its life is over                   disconnect, tell: why        (none)
    CONNECTING  transfer failed, none in flight    disconnect, tell: peer_lost  (none)
    UP          another life is wanted there       send hello                   GREETING
    UP          connection broke                   disconnect, tell: why        (none)
    UP          its life is over                   disconnect, tell: why        (none)
    UP          transfer failed, none in flight    disconnect, tell: peer_lost  (none)
    UP          transfer failed, others in flight  -                            UP
    any         hello, compatible                  watch, send welcome          same
    any         hello that leaves a process out    send welcome                 same
    any         hello that differs                 send refused                 same

Told are the loads and the grants that wait for the peer, or use it. A hello is answered whatever the state:
answering keeps nothing. Its sender may write here once it is welcome, so that the operating system is asked
to tell of the end of all its processes, which fences. The end of some is none: another may still write. So
nothing is asked for when a process has no name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvhandoff.core.ids import EngineId, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.events import ConnectPeer, DisconnectPeer, Effect, Send, WatchPeer
from kvhandoff.handoff.messages import Hello, Refused, Welcome
from kvhandoff.handoff.settings import HandoffSettings


class PeerState(StrEnum):
    """See the table above."""

    GREETING = "greeting"
    CONNECTING = "connecting"
    UP = "up"


@dataclass(slots=True)
class Peer:
    """One control address, and the life that answered there."""

    address: str
    state: PeerState
    deadline: float
    """GREETING and CONNECTING: when it counts as unreachable."""
    retry_at: float
    retry_s: float
    nonce: int
    identity: Identity | None = None
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Unusable:
    """No KV can move from whoever is at an address, and why."""

    address: str
    reason: Reason
    detail: str


@dataclass(slots=True)
class Changes:
    """What a step of the handshake did."""

    effects: list[Effect] = field(default_factory=list)
    up: list[Peer] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    ended: list[Identity] = field(default_factory=list)
    """Lives that are over: another one of the same engine answered."""


def incompatibility(mine: Hello, theirs: Hello) -> str | None:
    """What keeps two engines from moving KV, both sides' values in words; None if nothing does."""
    differences = [
        f"{name}: {getattr(mine, name)!r} here, {getattr(theirs, name)!r} there"
        for name in ("protocol_version", "model_fingerprint", "data_plane")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    differences += [f"layout {line}" for line in mine.layout.differences(theirs.layout)]
    return "; ".join(differences) or None


class PeerBook:
    """The peers of one engine, by control address."""

    def __init__(self, hello: Hello, settings: HandoffSettings) -> None:
        self._hello = hello
        self._settings = settings
        self._peers: dict[str, Peer] = {}
        self._handshakes = 0
        self._lives: dict[EngineId, Identity] = {}
        """The life of each engine that the data plane was told of; at most one each."""

    def up(self, address: str, identity: Identity) -> Peer | None:
        """The peer at an address, if it is this life and KV can move."""
        peer = self._peers.get(address)
        return peer if peer and peer.state is PeerState.UP and peer.identity == identity else None

    def next_deadline(self) -> float | None:
        """When a hello is due again or given up."""
        waiting = [peer for peer in self._peers.values() if peer.state is not PeerState.UP]
        return min((_next_time(peer) for peer in waiting), default=None)

    def wanted(self, now: float, address: str, identity: Identity | None = None) -> list[Effect]:
        """Start the handshake with whoever listens at `address`, unless it is under way, or up with the life
        that is wanted (None: any)."""
        peer = self._peers.get(address)
        if peer is not None and (peer.state is not PeerState.UP or identity in (None, peer.identity)):
            return []
        settings = self._settings
        self._handshakes += 1
        deadline = now + settings.handshake_s
        peer = Peer(address, PeerState.GREETING, deadline, now, settings.retry_s, self._handshakes)
        self._peers[address] = peer
        return [self._greet(now, peer)]

    def greeted(self, sender: Identity, reply_to: str, hello: Hello) -> list[Effect]:
        """Answer a peer's hello. One that may write here from now on is watched."""
        difference = incompatibility(hello, self._hello)  # as the asker will read it
        if difference is not None:
            return [Send(reply_to, sender, Refused(detail=difference, nonce=hello.nonce))]
        welcome = Send(reply_to, sender, Welcome(hello=self._hello, nonce=hello.nonce))
        return [*_watch(sender, hello), welcome]

    def welcomed(self, now: float, sender: Identity, address: str, welcome: Welcome) -> Changes:
        """A life answered at `address`."""
        changes, hello = Changes(), welcome.hello
        peer = self._greeting(address, welcome.nonce)
        if peer is None:
            return changes
        former = self._lives.get(sender.engine_id)
        if former not in (None, sender):
            self._end(former, changes)
        difference = incompatibility(self._hello, hello)
        if difference is not None:
            return self._drop(peer, Reason.HANDSHAKE_REFUSED, difference, changes)
        peer.identity, peer.num_blocks = sender, hello.num_blocks
        peer.state, peer.deadline = PeerState.CONNECTING, now + self._settings.handshake_s
        self._lives[sender.engine_id] = sender
        changes.effects += _watch(sender, hello)
        changes.effects.append(ConnectPeer(sender, hello.data_plane_metadata))
        return changes

    def refused(self, address: str, refusal: Refused) -> Changes:
        """The peer won't move KV with this engine."""
        peer = self._greeting(address, refusal.nonce)
        if peer is None:
            return Changes()
        detail = f"refused by the peer at {address}: {refusal.detail}"
        return self._drop(peer, Reason.HANDSHAKE_REFUSED, detail, Changes())

    def connected(self, identity: Identity, error: str | None) -> Changes:
        """The data plane's answer to `ConnectPeer`."""
        changes = Changes()
        for peer in list(self._peers.values()):
            if peer.identity == identity and peer.state is PeerState.CONNECTING:
                if error is None:
                    peer.state = PeerState.UP
                    changes.up.append(peer)
                else:
                    self._drop(peer, Reason.HANDSHAKE_REFUSED, f"data plane: {error}", changes)
        return changes

    def over(self, life: Identity) -> Changes:
        """A life that this engine knows is over, or its connection is: the next request greets anew."""
        changes = Changes()
        if self._lives.get(life.engine_id) == life:
            self._end(life, changes)
        return changes

    def gone(self, address: str) -> Changes:
        """The control connection broke. A handshake that has no answer yet goes on: with the next life."""
        changes = Changes()
        peer = self._peers.get(address)
        if peer is not None and peer.identity is not None:
            self._end(peer.identity, changes)
        return changes

    def tick(self, now: float) -> Changes:
        """Greet again what hasn't answered; give up what had its time."""
        changes = Changes()
        for peer in list(self._peers.values()):
            if peer.state is PeerState.UP:
                continue
            if now >= peer.deadline:
                detail = f"{peer.address} did not answer within {self._settings.handshake_s} s ({peer.state})"
                self._drop(peer, Reason.PEER_UNREACHABLE, detail, changes)
            elif peer.state is PeerState.GREETING and now >= peer.retry_at:
                changes.effects.append(self._greet(now, peer))
        return changes

    def _greet(self, now: float, peer: Peer) -> Send:
        peer.retry_at = now + peer.retry_s
        peer.retry_s *= 2
        return Send(peer.address, None, msgspec.structs.replace(self._hello, nonce=peer.nonce))

    def _greeting(self, address: str, nonce: int) -> Peer | None:
        peer = self._peers.get(address)
        return peer if peer and peer.state is PeerState.GREETING and peer.nonce == nonce else None

    def _end(self, life: Identity, changes: Changes) -> None:
        del self._lives[life.engine_id]
        self._peers = {a: peer for a, peer in self._peers.items() if peer.identity != life}
        changes.effects.append(DisconnectPeer(life))
        changes.ended.append(life)

    def _drop(self, peer: Peer, reason: Reason, detail: str, changes: Changes) -> Changes:
        del self._peers[peer.address]
        changes.unusable.append(Unusable(peer.address, reason, detail))
        return changes


def _watch(life: Identity, hello: Hello) -> list[Effect]:
    """Each of its processes may write, so that one without a name could outlive all that are watched."""
    named = bool(hello.processes) and all(hello.processes)
    return [WatchPeer(life, hello.processes)] if named else []


def _next_time(peer: Peer) -> float:
    return min(peer.deadline, peer.retry_at) if peer.state is PeerState.GREETING else peer.deadline
