"""The data plane over NIXL (UCX backend, host memory): any hosts, any network that UCX knows.

What fences: `DONE`, an error, or the end of the peer's process, and nothing else. Releasing a transfer's
handle or removing the peer while it is in flight does not stop its bytes from landing. So a handle is
released only after it is done or has failed, a peer is removed only when nothing of it is in flight, and
the agent is never destroyed before that.

One `NixlPlane` copies on one thread. NIXL can use several itself (its backend's `num_threads`), but then the
error of one part is reported while others are still in flight, and is no fence: so several planes share large
transfers instead, see `lanes.py`.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, Region, TransferState, TransportError
from kvhandoff.transport.bounds import check_block_bytes, oriented
from kvhandoff.transport.lanes import DRAIN_S
from kvhandoff.transport.nixl_agent import (
    OUTBOUND_PROGRESS_DELAY_US,
    PROGRESS_DELAY_US,
    NixlAgent,
    NixlError,
)
from kvhandoff.transport.region import address_of

_log = logging.getLogger(__name__)

_WARM_UP_INTERVAL = 0.01

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nixl"):
    """An agent, and the region it has registered."""

    agent_name: str
    agent_metadata: bytes
    """NIXL's own format: connection information and keys of registered memory."""
    checksum: bytes
    """Of `agent_metadata`: NIXL takes damaged addresses and keys for good ones."""
    address: _Positive
    num_blocks: _Positive
    block_bytes: _Positive


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)


@dataclass(slots=True)
class _Peer:
    """A connected agent."""

    identity: Identity
    num_blocks: int
    blocks: int
    """Prepared descriptors, one per block of the peer's region."""
    in_flight: int = 0
    broken: bool = False
    """The connection was lost. It does not come back: connect anew."""


@dataclass(eq=False, slots=True)
class _Transfer:
    """A started transfer. `native` is NIXL's handle, released and None as soon as the state is final."""

    peer: _Peer
    native: int | None = None
    state: TransferState = TransferState.PENDING
    error: str | None = None


class NixlPlane:
    """Implements `lanes.Lane`, and with that `api.DataPlane`. One thread owns it."""

    kind = "nixl"

    def __init__(self, me: Identity, lane: int = 0) -> None:
        """Start an agent (0.5 s the first in a process, the next 0.03 s). Its name has the epoch in it, so
        that a restarted engine is another. Peers connect to lane 0 only.

        Raises ConfigError if NIXL is not installed or its UCX backend can't be started.
        """
        self._name = f"{me}#{lane}" if lane else str(me)
        delay = OUTBOUND_PROGRESS_DELAY_US if lane else PROGRESS_DELAY_US
        self._agent = NixlAgent(self._name, progress_delay_us=delay)
        self._region: Region | None = None
        self._metadata = b""
        self._registered: list[Any] = []
        self._blocks = 0
        """Prepared descriptors, one per block of this engine's region."""
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        """Where the first byte of each peer is read to."""
        self._peers: dict[Identity, _Peer] = {}
        self._leaving: dict[Identity, _Peer] = {}
        """Disconnected with transfers in flight."""
        self._in_flight: set[_Transfer] = set()
        self._warm_ups: set[_Transfer] = set()

    def register(self, region: Region) -> None:
        address, count, size = region.address, region.num_blocks, region.block_bytes
        try:
            self._registered.append(self._agent.register(address, count * size))
            agent_metadata = self._agent.metadata()
            # After that, so that peers don't learn of it.
            self._registered.append(self._agent.register(address_of(self._scratch), mmap.PAGESIZE))
            self._blocks = self._agent.prepare(None, address, count, size)
        except NixlError as error:
            raise TransportError(f"{count} blocks of {size} bytes can't be registered ({error})") from error
        facts = _Metadata(self._name, agent_metadata, _checksum(agent_metadata), address, count, size)
        self._metadata = _encoder.encode(facts)
        self._region = region

    def metadata(self) -> bytes:
        self._my_region()
        return self._metadata

    def connect(self, peer: Identity, metadata: bytes) -> None:
        """Also starts a one-byte read, so that the wires are up when the first block moves."""
        known = self._peers.get(peer) or self._leaving.pop(peer, None)
        if known is not None:
            self._peers[peer] = known
            if not known.broken:
                return
            self.disconnect(peer)
            for transfer in [transfer for transfer in self._in_flight if transfer.peer is known]:
                self.poll(transfer)
            if peer in self._leaving:
                raise TransportError(f"connect {peer}: transfers of its broken connection are in flight")
        facts = self._check(peer, metadata)
        self._load(peer, facts)
        try:
            # Whether the region is the peer's to give is checked as one range, before a list of
            # `num_blocks` is built: a number that a peer made up costs nothing.
            size = facts.num_blocks * facts.block_bytes
            self._agent.release_prepared(self._agent.prepare(str(peer), facts.address, 1, size))
            blocks = self._agent.prepare(str(peer), facts.address, facts.num_blocks, facts.block_bytes)
        except NixlError as error:
            self._agent.unload(str(peer))
            where = f"{facts.num_blocks} blocks at {facts.address:#x}"
            raise TransportError(f"connect {peer}: {where} are not registered there ({error})") from error
        self._peers[peer] = _Peer(peer, facts.num_blocks, blocks)
        try:
            self._warm_up(self._peers[peer], facts.address)
        except TransportError:
            self.disconnect(peer)
            raise

    def _check(self, peer: Identity, metadata: bytes) -> _Metadata:
        try:
            facts = _decoder.decode(metadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"connect {peer}: malformed nixl metadata ({error})") from error
        if facts.agent_name != str(peer):
            raise TransportError(f"connect {peer}: the metadata are those of {facts.agent_name}")
        if facts.checksum != _checksum(facts.agent_metadata):
            raise TransportError(f"connect {peer}: damaged nixl metadata (checksum)")
        if facts.address + facts.num_blocks * facts.block_bytes > 2**63:
            raise TransportError(f"connect {peer}: malformed nixl metadata (region beyond memory)")
        check_block_bytes(peer, self._my_region().block_bytes, facts.block_bytes)
        return facts

    def _load(self, peer: Identity, facts: _Metadata) -> None:
        try:
            loaded = self._agent.load(facts.agent_metadata)
        except NixlError as error:
            raise TransportError(f"connect {peer}: unusable metadata or unreachable ({error})") from error
        if loaded != str(peer):
            if loaded not in map(str, [*self._peers, *self._leaving]):
                self._agent.unload(loaded)
            raise TransportError(f"connect {peer}: the metadata are those of agent {loaded}")

    def _warm_up(self, peer: _Peer, address: int) -> None:
        try:
            native = self._agent.make_byte_read(address_of(self._scratch), str(peer.identity), address)
        except NixlError as error:
            raise TransportError(f"connect {peer.identity}: {error}") from error
        first_read = _Transfer(peer, native)
        self.start(first_read)
        if first_read.state is TransferState.FAILED:
            raise TransportError(f"connect {peer.identity}: unreachable ({first_read.error})")
        self._warm_ups.add(first_read)

    def disconnect(self, peer: Identity) -> None:
        connected = self._peers.pop(peer, None)
        if connected is None:
            return
        if connected.in_flight:
            self._leaving[peer] = connected
        else:
            self._remove(connected)

    def _remove(self, peer: _Peer) -> None:
        try:
            self._agent.release_prepared(peer.blocks)
            self._agent.unload(str(peer.identity))
        except NixlError as error:
            _log.warning("peer %s can't be removed: %s", peer.identity, error)

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Transfer:
        transfer = self.prepare(operation, peer, copies)
        self.start(transfer)
        return transfer

    def prepare(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Transfer:
        connected = self._peers.get(peer)
        if connected is None:
            raise TransportError(f"{operation} {peer}: not connected")
        if connected.broken:
            raise TransportError(f"{operation} {peer}: the connection is lost")
        checked = oriented(
            operation,
            copies,
            peer=peer,
            local_blocks=self._my_region().num_blocks,
            remote_blocks=connected.num_blocks,
        )
        if not checked:
            return _Transfer(connected, state=TransferState.DONE)
        here = [block for first, _, count in checked for block in range(first, first + count)]
        there = [block for _, first, count in checked for block in range(first, first + count)]
        try:
            native = self._agent.make_transfer(operation, self._blocks, here, connected.blocks, there)
        except NixlError as error:
            connected.broken |= error.disconnected
            raise TransportError(f"{operation} {peer}: refused ({error})") from error
        return _Transfer(connected, native)

    def start(self, handle: _Transfer) -> None:
        if handle.native is None:
            return
        handle.peer.in_flight += 1
        self._in_flight.add(handle)
        self._advance(handle, handle.native, self._agent.start)

    def discard(self, handle: _Transfer) -> None:
        if handle.native is not None:
            self._release(handle.native)
            handle.native = None

    def poll(self, handle: _Transfer) -> TransferState:
        if handle.native is not None:
            self._advance(handle, handle.native, self._agent.is_done)
        return handle.state

    def _advance(self, transfer: _Transfer, native: int, done: Callable[[int], bool]) -> None:
        """Ask NIXL where the transfer stands, and let go of its handle once it is over."""
        peer = transfer.peer
        try:
            if not done(native):
                return
            transfer.state = TransferState.DONE
        except NixlError as error:
            peer.broken |= error.disconnected
            transfer.state, transfer.error = TransferState.FAILED, str(error)
        transfer.native = None
        self._release(native)
        self._in_flight.discard(transfer)
        peer.in_flight -= 1
        if peer.in_flight == 0 and self._leaving.get(peer.identity) is peer:
            del self._leaving[peer.identity]
            self._remove(peer)

    def _release(self, native: int) -> None:
        """Only of a transfer that is over or was never started."""
        try:
            self._agent.release_transfer(native)
        except NixlError as error:
            _log.warning("the handle of a transfer that is not in flight can't be released: %s", error)

    @property
    def service_interval(self) -> float | None:
        """None but for the moments after a connect: the progress thread needs no help."""
        return _WARM_UP_INTERVAL if self._warm_ups else None

    def service(self) -> None:
        """See how the first reads of new connections ended."""
        for warm_up in list(self._warm_ups):
            if self.poll(warm_up) is TransferState.PENDING:
                continue
            self._warm_ups.discard(warm_up)
            if warm_up.state is TransferState.FAILED:
                _log.warning("peer %s can't be reached: %s", warm_up.peer.identity, warm_up.error)
                warm_up.peer.broken = True

    def drain(self, deadline: float) -> None:
        while self._in_flight and time.monotonic() < deadline:
            for transfer in list(self._in_flight):
                self.poll(transfer)
            time.sleep(0.001)
        if self._in_flight:
            raise TransportError(f"{len(self._in_flight)} transfers are in flight after {DRAIN_S} s")

    def close(self) -> None:
        """Waits up to DRAIN_S for transfers in flight.

        Raises TransportError if some remain. Nothing is released then; keep this object, since its agent goes
        with it, until the process ends.
        """
        self.drain(time.monotonic() + DRAIN_S)
        for peer in list(self._peers):
            self.disconnect(peer)
        try:
            if self._region is not None:
                self._agent.release_prepared(self._blocks)
                self._region = None
            while self._registered:
                self._agent.deregister(self._registered.pop())
        except NixlError as error:
            raise TransportError(f"the memory can't be released ({error})") from error
        del self._agent

    def _my_region(self) -> Region:
        if self._region is None:
            raise TransportError("nixl: no region is registered")
        return self._region


def _checksum(agent_metadata: bytes) -> bytes:
    return blake2b(agent_metadata, digest_size=16).digest()
