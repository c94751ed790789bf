"""Caches of engines that are divided into ranks, as an engine that is not kvhandoff's keeps them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Piece
from kvhandoff.transport.rank_plan import Heads, heads_of
from kvhandoff.transport.region import ForeignRegion, address_of

LAYERS = 3
HEAD_BYTES = 48
"""Of one layer and head of a block."""

Order = Literal["layers first", "blocks first"]


def head_of(seed: int, layer: int, block: int, head: int) -> bytes:
    """Content that differs between any two heads, layers, blocks and engines, and within a head."""
    unit = f"[{seed}:{layer}:{block}:{head}]".encode()
    return (unit * (HEAD_BYTES // len(unit) + 1))[:HEAD_BYTES]


@dataclass
class RankCache:
    """One rank's memory."""

    heads: Heads
    num_blocks: int
    order: Order

    def __post_init__(self) -> None:
        held = (0,) if self.heads is None else range(self.heads.first, self.heads.first + self.heads.count)
        self.held = tuple(held)
        self.piece_bytes = len(self.held) * HEAD_BYTES
        size = LAYERS * self.num_blocks * self.piece_bytes
        self.memory = mmap.mmap(-1, size)
        start = address_of(self.memory)
        self.region = ForeignRegion(
            self.num_blocks,
            tuple(
                Piece(start + self.offset(layer, 0), self.stride, self.piece_bytes) for layer in range(LAYERS)
            ),
            ((start, size),),
            heads=self.heads,
        )

    @property
    def stride(self) -> int:
        return self.piece_bytes * (1 if self.order == "layers first" else LAYERS)

    def offset(self, layer: int, block: int) -> int:
        if self.order == "layers first":
            return (layer * self.num_blocks + block) * self.piece_bytes
        return (block * LAYERS + layer) * self.piece_bytes

    def content(self) -> dict[tuple[int, int, int], bytes]:
        """By layer, block and head."""
        return {
            (layer, block, head): self.memory[at : at + HEAD_BYTES]
            for layer in range(LAYERS)
            for block in range(self.num_blocks)
            for index, head in enumerate(self.held)
            for at in [self.offset(layer, block) + index * HEAD_BYTES]
        }

    def fill(self, seed: int) -> None:
        for layer in range(LAYERS):
            for block in range(self.num_blocks):
                at = self.offset(layer, block)
                filled = b"".join(head_of(seed, layer, block, head) for head in self.held)
                self.memory[at : at + self.piece_bytes] = filled

    def expected(
        self, seed: int, source_seed: int, copies: Sequence[Copy]
    ) -> dict[tuple[int, int, int], bytes]:
        """Its content once `copies` (source first) have come from an engine filled with another seed."""
        moved = {
            destination + at: (source_seed, source + at)
            for source, destination, count in copies
            for at in range(count)
        }
        return {
            (layer, block, head): head_of(origin, layer, at, head)
            for layer, block, head in self.content()
            for origin, at in [moved.get(block, (seed, block))]
        }


def rank_caches(ranks: int, total: int | None, num_blocks: int, order: Order) -> list[RankCache]:
    """Of all ranks of an engine with `total` KV heads; None: not divided by heads."""
    return [
        RankCache(None if total is None else heads_of(rank, ranks, total), num_blocks, order)
        for rank in range(ranks)
    ]
