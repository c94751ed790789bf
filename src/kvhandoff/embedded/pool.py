"""Which block of the KV pool holds what, and for how many owners.

A block is in one of three conditions:

- **used**: it has references. Each owner (a request, or the handoff side) holds its own; shared blocks have
  several. Only the sole owner of an unpublished block writes to it.
- **cached**: no references, but published under the hash of its token chain: a later prompt may take it up
  again, and an allocation may take it when nothing is free, least recently used first.
- **free**: no references and no content.

The pool never looks at the bytes. It is owned by the engine thread; the counters may be read from any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from kvhandoff.core.errors import ConfigError


class BlockPool:
    """References, free list and prefix cache of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, allowed is 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        # A heap gives out low numbers first, so that blocks of one request lie side by side when they can.
        self._free = list(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # keys only, least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Idle blocks with content."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def references(self, block: int) -> int:
        """How many owners `block` has."""
        return self._references[block]

    def available(self, *, keeping: Iterable[int] = ()) -> int:
        """How many blocks could be allocated once the matched blocks `keeping` are retained."""
        kept = sum(1 for block in keeping if block in self._idle)
        return len(self._free) + len(self._idle) - kept

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks could be allocated."""
        return count <= self.available()

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, in ascending order: neighbours make few transfers.

        Takes free blocks first, then cached ones, least recently used first, whose content is forgotten.
        Raises RuntimeError when there are too few: ask `can_allocate` first.
        """
        if not self.can_allocate(count):
            raise RuntimeError(f"{count} blocks wanted, {self.free} free and {self.cached} cached")
        taken = [heappop(self._free) for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            taken.append(block)
        for block in taken:
            self._references[block] = 1
        return sorted(taken)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks of the longest leading run of a chain's block hashes; not yet retained."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let later prompts find a used, full block by its hash; it must not be written to any more.

        Does nothing when the prefix cache is off, or when another block holds the same content already.
        """
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} has no owner and can't be published")
        known = self._hash_of.get(block, block_hash)
        if known != block_hash:
            raise RuntimeError(f"block {block} is published as {known.hex()}, not {block_hash.hex()}")
        if self.prefix_cache and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference on each of `blocks`, which are used or cached.

        Raises RuntimeError, with nothing retained, when one of them is free: its content may be anything.
        """
        for block in blocks:
            if self._references[block] == 0 and block not in self._idle:
                raise RuntimeError(f"block {block} is free and can't be retained")
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Return one reference on each of `blocks`, given in the order of their tokens.

        The later ones count as less recently used: a chain is of no use without its beginning.
        Raises RuntimeError for a block without references.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise RuntimeError(f"block {block} has no reference to return")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                heappush(self._free, block)
