"""The data plane over NIXL: any hosts, any network and memory that its backends know.

What fences: `DONE`, an error, or the end of the peer's process, and nothing else. Releasing a transfer's
handle or removing the peer while it is in flight does not stop its bytes from landing. So a handle is
released only after it is done or has failed, a peer is removed only when nothing of it is in flight, and
the agent is never destroyed before that.

One `NixlPlane` copies on one thread. NIXL can use several itself (its backend's `num_threads`), but then the
error of one part is reported while others are still in flight, and is no fence: so several planes share large
transfers instead, see `lanes.py`.

Two engines whose blocks are divided differently among ranks exchange a part of each piece. The descriptors
of either side are then those of that part; each list is prepared once, and transfers pick from it by index.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import (
    WHOLE,
    MemoryKind,
    Operation,
    Part,
    Region,
    TransferState,
    TransportError,
)
from kvhandoff.transport.bounds import check_alike, oriented
from kvhandoff.transport.lanes import DRAIN_S
from kvhandoff.transport.nixl_agent import (
    OUTBOUND_PROGRESS_DELAY_US,
    PROGRESS_DELAY_US,
    Backend,
    NixlAgent,
    NixlError,
)
from kvhandoff.transport.nixl_metadata import NixlMetadata, decode, encode
from kvhandoff.transport.nixl_region import NixlRegion
from kvhandoff.transport.pieces import narrowed

_log = logging.getLogger(__name__)

_WARM_UP_INTERVAL = 0.01


@dataclass(slots=True)
class _Peer:
    """A connected agent."""

    identity: Identity
    metadata: bytes
    parts: tuple[Part, Part]
    """What is exchanged of the pieces here, and of those there."""
    agent: str
    num_blocks: int
    block_bytes: int
    """Bytes exchanged of each block."""
    pieces: int
    here: int
    """Prepared descriptors of this region; of all peers that exchange the same part of it."""
    there: int
    """Prepared descriptors of the peer's region."""
    in_flight: int = 0
    broken: bool = False
    """The connection was lost. It does not come back: connect anew."""


@dataclass(eq=False, slots=True)
class _Transfer:
    """A transfer. `native` is NIXL's handle, released and None as soon as the state is final."""

    peer: _Peer
    bytes: int
    native: int | None = None
    state: TransferState = TransferState.PENDING
    error: str | None = None


class NixlPlane:
    """Implements `api.StagedPlane`. One thread owns it."""

    kind = "nixl"

    def __init__(
        self,
        name: str,
        lane: int = 0,
        *,
        backend: Backend = "UCX",
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start an agent (0.5 s the first in a process, the next 0.03 s). No other, before or after, may have
        its name: it is how peers tell a restarted engine from its former life. Peers connect to lane 0 only.

        Raises ConfigError if NIXL is not installed or its backend can't be started.
        """
        self._name = f"{name}#{lane}" if lane else name
        self._backend = backend
        delay = OUTBOUND_PROGRESS_DELAY_US if lane else PROGRESS_DELAY_US
        self._agent = NixlAgent(self._name, backend=backend, options=options, progress_delay_us=delay)
        self._registered: NixlRegion | None = None
        self._metadata = b""
        self._peers: dict[Identity, _Peer] = {}
        self._leaving: dict[Identity, _Peer] = {}
        """Disconnected with transfers in flight."""
        self._in_flight: set[_Transfer] = set()
        self._warm_ups: set[_Transfer] = set()

    def register(self, region: Region) -> None:
        self._registered = NixlRegion(self._agent, region)
        self._metadata = encode(self._name, self._backend, self._registered.agent_metadata, region)

    def metadata(self) -> bytes:
        self._here()
        return self._metadata

    def connect(self, peer: Identity, metadata: bytes, mine: Part = WHOLE, theirs: Part = WHOLE) -> None:
        """Also starts a one-byte read, so that the wires are up when the first block moves."""
        known = self._peers.get(peer) or self._leaving.get(peer)
        if known is not None:
            if (known.metadata, known.parts) != (metadata, (mine, theirs)):
                raise TransportError(f"connect {peer}: it is connected with other metadata, or other parts")
            self._leaving.pop(peer, None)
            self._peers[peer] = known
            if not known.broken:
                return
            self.disconnect(peer)
            for transfer in [transfer for transfer in self._in_flight if transfer.peer is known]:
                self.poll(transfer)
            if peer in self._leaving:
                raise TransportError(f"connect {peer}: transfers of its broken connection are in flight")
        facts = self._check(peer, metadata)
        try:
            local, remote = narrowed(self._here().region.pieces, mine), narrowed(facts.layout, theirs)
        except ValueError as error:
            raise TransportError(f"connect {peer}: {error}") from error
        check_alike(peer, local, remote)
        self._load(peer, facts)
        try:
            here = self._here().descriptors(mine)
            there = self._agent.prepare(
                facts.agent_name, remote, facts.num_blocks, facts.memory, facts.device
            )
        except NixlError as error:
            self._agent.unload(facts.agent_name)
            where = f"{facts.num_blocks} blocks at {facts.layout[0].address:#x}"
            raise TransportError(f"connect {peer}: {where} are not registered there ({error})") from error
        self._peers[peer] = _Peer(
            identity=peer,
            metadata=metadata,
            parts=(mine, theirs),
            agent=facts.agent_name,
            num_blocks=facts.num_blocks,
            block_bytes=sum(piece.size for piece in local),
            pieces=len(local),
            here=here,
            there=there,
        )
        if facts.memory is MemoryKind.DRAM:  # what a GPU holds may be readable from a GPU only
            try:
                self._warm_up(self._peers[peer], facts.layout[0].address)
            except TransportError:
                self.disconnect(peer)
                raise

    def _check(self, peer: Identity, metadata: bytes) -> NixlMetadata:
        facts = decode(peer, metadata)
        if facts.backend != self._backend:
            raise TransportError(
                f"connect {peer}: NIXL's backend is {self._backend} here, {facts.backend} there"
            )
        for other in [*self._peers.values(), *self._leaving.values()]:
            if other.agent == facts.agent_name:
                raise TransportError(f"connect {peer}: agent {other.agent} is connected as {other.identity}")
        return facts

    def _load(self, peer: Identity, facts: NixlMetadata) -> None:
        try:
            loaded = self._agent.load(facts.agent_metadata)
        except NixlError as error:
            raise TransportError(f"connect {peer}: unusable metadata or unreachable ({error})") from error
        if loaded != facts.agent_name:
            if loaded not in [other.agent for other in [*self._peers.values(), *self._leaving.values()]]:
                self._agent.unload(loaded)
            raise TransportError(
                f"connect {peer}: the metadata of {facts.agent_name} are those of agent {loaded}"
            )

    def _warm_up(self, peer: _Peer, address: int) -> None:
        try:
            native = self._agent.make_byte_read(self._here().scratch, peer.agent, address)
        except NixlError as error:
            raise TransportError(f"connect {peer.identity}: {error}") from error
        first_read = _Transfer(peer, 1, native)
        self.start(first_read)
        if first_read.error is not None:
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
            self._agent.release_prepared(peer.there)
            self._agent.unload(peer.agent)
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
            local_blocks=self._here().region.num_blocks,
            remote_blocks=connected.num_blocks,
        )
        if not checked:
            return _Transfer(connected, 0, state=TransferState.DONE)
        # Ascending, since NIXL then merges neighbours: blocks that were given out in descending order on both
        # sides take a fifth of the time.
        checked.sort()
        local, remote = _blocks(checked, 0), _blocks(checked, 1)
        size = len(local) * connected.block_bytes
        if connected.pieces > 1:
            local = _indices(local, connected.pieces, self._here().region.num_blocks)
            remote = _indices(remote, connected.pieces, connected.num_blocks)
        try:
            native = self._agent.make_transfer(operation, connected.here, local, connected.there, remote)
        except NixlError as error:
            connected.broken |= error.disconnected
            raise TransportError(f"{operation} {peer}: refused ({error})") from error
        return _Transfer(connected, size, native)

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
            transfer.error = str(error)
            if not error.fence:
                # In flight for as long as this process or the peer's lives: nothing else tells of an end.
                transfer.native = None
                _log.error("a transfer with %s has failed with bytes under way: %s", peer.identity, error)
                return
            transfer.state = TransferState.FAILED
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
        if self._registered is not None:
            self._registered.release()
            self._registered = None
        del self._agent

    def _here(self) -> NixlRegion:
        if self._registered is None:
            raise TransportError("nixl: no region is registered")
        return self._registered


def _blocks(copies: Sequence[Copy], end: int) -> list[int]:
    """The blocks at one end (0 or 1) of copies, one by one."""
    if sum(copy[2] for copy in copies) == len(copies):  # scattered: in half the time
        return [copy[end] for copy in copies]
    return [block for copy in copies for block in range(copy[end], copy[end] + copy[2])]


def _indices(blocks: list[int], pieces: int, num_blocks: int) -> list[int]:
    """Indices of prepared descriptors, piece by piece."""
    return [first + block for first in range(0, pieces * num_blocks, num_blocks) for block in blocks]
