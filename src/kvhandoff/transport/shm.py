"""The data plane of one host without native dependencies: peers map each other's region and copy.

Why a synchronous copy is its own fence: the only instructions that move bytes of a transfer run inside
`post`, on this thread. When `post` returns, the last one has executed, and nothing anywhere holds an order
to move more. So a handle is DONE or FAILED from the start, and no transfer is ever in flight.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, Region, TransferState, TransportError
from kvhandoff.transport.bounds import check_block_bytes, oriented
from kvhandoff.transport.liveness import host
from kvhandoff.transport.region import SEALS, SharedRegion, address_of, prefer_huge_pages

_log = logging.getLogger(__name__)

_LIVENESS_INTERVAL = 1.0
"""Seconds. How long the memory of a peer that has died is kept, at most, after its last use."""

_MAP_AHEAD_BYTES = 16 << 20
"""Mapped per `service` call: about 2 ms, so that a transfer that comes in between hardly waits."""

_KEEP_GIL_BELOW = 64 << 10
"""Copies of fewer bytes take less time than giving the GIL away and getting it back."""

_MADV_POPULATE_READ = 22
"""Linux 5.14; not in the mmap module."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shm"):
    """Where to find a region on its host."""

    host: str
    """Boot id and PID namespace: pids and memory mean the same on both sides only if these are equal."""
    pid: _Small
    fd: _Small
    name: str
    num_blocks: _Positive
    block_bytes: _Positive


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)

_libc_with_gil = ctypes.PyDLL(None)
_libc = ctypes.CDLL(None, use_errno=True)
for _library in (_libc, _libc_with_gil):
    _library.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _library.memmove.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class _Peer:
    """A mapped region and the process it belongs to."""

    metadata: _Metadata
    memory: mmap.mmap
    address: int
    pidfd: int
    """Names that one process for good: a later process with the same pid is not meant."""
    ended: select.poll = field(init=False)
    mapped_ahead: int = 0
    """Bytes whose pages are in this process's page table already."""

    def __post_init__(self) -> None:
        self.ended = select.poll()
        self.ended.register(self.pidfd, select.POLLIN)

    @property
    def alive(self) -> bool:
        return not self.ended.poll(0)

    def close(self) -> None:
        self.memory.close()
        os.close(self.pidfd)


@dataclass(frozen=True, slots=True)
class _Finished:
    """The handle of a transfer that is over."""

    bytes: int
    error: str | None = None


class SharedMemoryPlane:
    """Implements `api.DataPlane` for engines of one host and one PID namespace, under one user."""

    kind = "shm"

    def __init__(self) -> None:
        self._region: SharedRegion | None = None
        self._peers: dict[Identity, _Peer] = {}

    def register(self, region: Region) -> None:
        """Raises TransportError for anything but a SharedRegion: peers could not reach it."""
        if not isinstance(region, SharedRegion):
            raise TransportError(
                f"shm moves blocks of a SharedRegion, which peers can map, not of a {type(region).__name__}; "
                "memory that belongs to another engine moves by nixl only"
            )
        self._region = region

    def metadata(self) -> bytes:
        region = self._registered
        return _encoder.encode(
            _Metadata(host(), os.getpid(), region.fd, region.name, region.num_blocks, region.block_bytes)
        )

    def connect(self, peer: Identity, metadata: bytes) -> None:
        if peer in self._peers and self._peers[peer].alive:
            return
        self.disconnect(peer)
        try:
            facts = _decoder.decode(metadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"connect {peer}: malformed shm metadata ({error})") from error
        if facts.host != host():
            raise TransportError(
                f"connect {peer}: shm needs both engines on one host and in one PID namespace; "
                f"this one is on {host()}, the peer on {facts.host}"
            )
        check_block_bytes(peer, self._registered.block_bytes, facts.block_bytes)
        try:
            self._peers[peer] = _map(facts)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"connect {peer}: can't map the memory of process {facts.pid}: {error}"
            ) from error

    def disconnect(self, peer: Identity) -> None:
        mapped = self._peers.pop(peer, None)
        if mapped is not None:
            mapped.close()

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Finished:
        """Copies at once. FAILED means that the peer ended during the copy."""
        mapped = self._peers.get(peer)
        if mapped is None:
            raise TransportError(f"{operation} {peer}: not connected")
        if not mapped.alive:
            raise TransportError(f"{operation} {peer}: its process has ended")
        region = self._registered
        checked = oriented(
            operation,
            copies,
            peer=peer,
            local_blocks=region.num_blocks,
            remote_blocks=mapped.metadata.num_blocks,
        )
        size, moved = region.block_bytes, 0
        for first_local, first_remote, count in checked:
            local = region.address + first_local * size
            remote = mapped.address + first_remote * size
            source, destination = (remote, local) if operation == "read" else (local, remote)
            library = _libc if count * size >= _KEEP_GIL_BELOW else _libc_with_gil
            library.memmove(destination, source, count * size)
            moved += count * size
        error = None if mapped.alive else f"{operation} {peer}: its process ended during the copy"
        return _Finished(moved, error)

    def poll(self, handle: _Finished) -> TransferState:
        return TransferState.DONE if handle.error is None else TransferState.FAILED

    @property
    def service_interval(self) -> float | None:
        """0 while there are pages to map ahead, else the interval of the look for dead peers."""
        if not self._peers:
            return None
        ahead = any(peer.mapped_ahead < len(peer.memory) for peer in self._peers.values())
        return 0.0 if ahead else _LIVENESS_INTERVAL

    def service(self) -> None:
        """Let go of the memory of peers that have died; map a piece of a new peer's region ahead, so that
        its first transfers don't pay for page faults (they would take twice as long)."""
        for identity in [identity for identity, peer in self._peers.items() if not peer.alive]:
            _log.info("peer %s has ended; its memory is let go", identity)
            self.disconnect(identity)
        for peer in self._peers.values():
            if peer.mapped_ahead < len(peer.memory):
                _map_ahead(peer)
                return

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)

    @property
    def _registered(self) -> SharedRegion:
        if self._region is None:
            raise TransportError("shm: no region is registered")
        return self._region


def _map(facts: _Metadata) -> _Peer:
    """Map the region that `facts` tell of, after proof that it is that region.

    The random name of the memfd is the proof: no other process, later process with the same pid, or other
    file of that process has it. Raises OSError or ValueError.
    """
    path = f"/proc/{facts.pid}/fd/{facts.fd}"
    pidfd = os.pidfd_open(facts.pid)
    try:
        if os.readlink(path) != f"/memfd:{facts.name} (deleted)" or not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} is not the region of that name")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = facts.num_blocks * facts.block_bytes
            if os.fstat(fd).st_size != size:
                raise ValueError(f"the region has {os.fstat(fd).st_size} bytes, its metadata say {size}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("the region is not sealed against changes of its size")
            memory = mmap.mmap(fd, size)
            prefer_huge_pages(memory)
        finally:
            os.close(fd)
        return _Peer(facts, memory, address_of(memory), pidfd)
    except (OSError, ValueError):
        os.close(pidfd)
        raise


def _map_ahead(peer: _Peer) -> None:
    """Enter the next piece of the region into the page table."""
    start = peer.mapped_ahead
    length = min(_MAP_AHEAD_BYTES, len(peer.memory) - start)
    if _libc.madvise(peer.address + start, length, _MADV_POPULATE_READ) == 0:
        peer.mapped_ahead += length
        return
    if (code := ctypes.get_errno()) != errno.EINTR:
        # An older kernel: pages get mapped when they are first copied, only slower.
        _log.info("memory of a peer is not mapped ahead: %s", os.strerror(code))
        peer.mapped_ahead = len(peer.memory)
