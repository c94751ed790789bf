"""The memory that a data plane moves.

What the embedded engine allocates is one range of side by side blocks; two kinds, for two ways to reach it:

- `SharedRegion` lies in a memfd that processes of the same host map (`shm`). It has no name in any file
  system, so nothing is left behind by a process that was killed, and it is sealed against shrinking, so a
  peer can't make a mapped page vanish under a copy (SIGBUS).
- `PrivateRegion` is ordinary memory (`nixl`): UCX copies between two processes of one host through the
  kernel page by page, and takes 1.4 times as long on 4 KiB pages as on huge ones.

Both ask for huge pages. Most systems give them to ordinary memory, and to shared memory only after
`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`; a copy of shared memory on 4 KiB pages
takes about 1.05 times as long as the same copy of ordinary memory on 4 KiB pages, 1.3 times as on huge ones.

Every page is touched once at allocation. Otherwise the first transfer into each block pays for the kernel
zeroing its pages, several times the cost of the copy, and a pool that does not fit fails much later.

A `ForeignRegion` describes memory that another engine has allocated, in whatever pieces it keeps a block.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.api import HeadRange, MemoryKind, Piece
from kvhandoff.transport.pieces import check_pieces, extent, side_by_side

_log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def address_of(memory: mmap.mmap) -> int:
    """Where a writable mapping starts, without keeping the mapping from being closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages. A kernel that has none, or not for this kind of memory, says so or ignores it:
    copies take longer there, nothing else."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _log.info("no huge pages for KV blocks: %s", error)


class _Blocks:
    """Blocks from `offset` of a mapping on; implements `api.HostRegion`."""

    memory = MemoryKind.DRAM
    device = 0
    heads: HeadRange | None = None

    def __init__(self, memory: mmap.mmap, offset: int, num_blocks: int, block_bytes: int) -> None:
        prefer_huge_pages(memory)
        self._mapping: mmap.mmap | None = memory
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.address = address_of(memory) + offset
        self.pieces = (side_by_side(self.address, block_bytes),)
        self.ranges = ((self.address, num_blocks * block_bytes),)
        self.buffer = memoryview(memory)[offset : offset + num_blocks * block_bytes]
        ctypes.memset(self.address, 0, num_blocks * block_bytes)  # touches; leaves the GIL to others

    def close(self) -> None:
        """Give the memory back: at once, or, if arrays or tensors still look at it, with the last of them.

        Never while a transfer is in flight: close the data plane first.
        """
        memory, self._mapping = self._mapping, None
        if memory is None:
            return
        try:
            self.buffer.release()
            memory.close()
        except BufferError:
            del self.buffer  # somebody's view keeps the mapping, which goes when that view is collected


class SharedRegion(_Blocks):
    """Blocks in a memfd, which peers on this host map through /proc/<pid>/fd/<fd>."""

    def __init__(self, fd: int, name: str, num_blocks: int, block_bytes: int) -> None:
        self.fd = fd
        self.name = name
        """Random, part of the memfd's own name: what a peer finds under pid and fd is this region or not."""
        super().__init__(mmap.mmap(fd, num_blocks * block_bytes), 0, num_blocks, block_bytes)

    @classmethod
    def allocate(cls, num_blocks: int, block_bytes: int) -> SharedRegion:
        """A zeroed region. Raises ConfigError when it can't be had."""
        size = checked_size(num_blocks, block_bytes)
        name = f"kvhandoff-{secrets.token_hex(16)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            return cls(fd, name, num_blocks, block_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"KV pool: {size} bytes of shared memory can't be had: {error}") from error

    def close(self) -> None:
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PrivateRegion(_Blocks):
    """Blocks in this process's own memory."""

    @classmethod
    def allocate(cls, num_blocks: int, block_bytes: int) -> PrivateRegion:
        """A zeroed region that starts on a huge page. Raises ConfigError when it can't be had."""
        size = checked_size(num_blocks, block_bytes)
        padded = -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
        try:
            memory = mmap.mmap(-1, padded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(f"KV pool: {size} bytes of memory can't be had: {error}") from error
        return cls(memory, -address_of(memory) % HUGE_PAGE, num_blocks, block_bytes)


@dataclass(frozen=True)
class ForeignRegion:
    """Blocks in memory that another engine owns and keeps for as long as this process lives; implements
    `api.Region`, see there for the fields."""

    num_blocks: int
    pieces: tuple[Piece, ...]
    ranges: tuple[tuple[int, int], ...]
    memory: MemoryKind = MemoryKind.DRAM
    device: int = 0
    heads: HeadRange | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for pieces that overlap, lie outside the ranges, or aren't so many heads."""
        if self.num_blocks < 1:
            raise ConfigError(f"KV memory: num_blocks is {self.num_blocks}, allowed is 1 or more")
        try:
            check_pieces(self.pieces, self.num_blocks)
        except ValueError as error:
            raise ConfigError(f"KV memory: {error}") from error
        for index, piece in enumerate(self.pieces):
            start, end = extent(piece, self.num_blocks)
            if not any(address <= start and end <= address + size for address, size in self.ranges):
                raise ConfigError(
                    f"KV memory: {piece} of {self.num_blocks} blocks lies in none of the ranges "
                    + ", ".join(f"{address:#x} to {address + size:#x}" for address, size in self.ranges)
                )
            if self.heads is not None and piece.size % self.heads.count:
                raise ConfigError(
                    f"KV memory: piece {index} has {piece.size} bytes, which are not {self.heads.count} heads"
                )

    @property
    def block_bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)


def checked_size(num_blocks: int, block_bytes: int) -> int:
    """Bytes of the region, after a check that it makes sense and fits: touching more than there is would
    have the kernel kill some process instead of telling anybody."""
    for field, value in (("num_blocks", num_blocks), ("block_bytes", block_bytes)):
        if value < 1:
            raise ConfigError(f"KV pool: {field} is {value}, allowed is 1 or more")
    size = num_blocks * block_bytes
    free = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if free is not None and size > int(free[1]) * 1024:
        raise ConfigError(
            f"KV pool: {num_blocks} blocks of {block_bytes} bytes are {size / 2**30:.1f} GiB, "
            f"memory available is {int(free[1]) / 2**20:.1f} GiB"
        )
    return size
