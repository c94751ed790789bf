"""Where pieces of blocks lie, and memory of other engines."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.api import WHOLE, HeadRange, MemoryKind, Part, Piece
from kvhandoff.transport.pieces import MAX_PIECES, check_pieces, extent, narrowed, side_by_side
from kvhandoff.transport.region import ForeignRegion

LAYERS = (Piece(1000, 64, 64), Piece(1640, 64, 64))
"""Ten blocks, layer by layer."""
FIELDS = (Piece(1000, 128, 64), Piece(1064, 128, 64))
"""Ten blocks side by side, each of two layers."""


def bytes_of(piece: Piece, num_blocks: int) -> list[int]:
    return [
        piece.address + block * piece.stride + at for block in range(num_blocks) for at in range(piece.size)
    ]


@pytest.mark.parametrize("pieces", [LAYERS, FIELDS, [side_by_side(4096, 100)]])
def test_layouts_of_blocks(pieces: list[Piece]) -> None:
    check_pieces(pieces, 10)


@pytest.mark.parametrize(
    ("pieces", "blocks", "words"),
    [
        ((), 1, "a block has 0 pieces, allowed are 1 to 1024"),
        ([side_by_side(1 + 8 * n, 8) for n in range(MAX_PIECES + 1)], 1, "a block has 1025 pieces"),
        ((Piece(8, 8, 0),), 1, "piece 0: .* size must be 1 to stride"),
        ((Piece(8, 7, 8),), 1, "piece 0: .* size must be 1 to stride"),
        ((Piece(0, 8, 8),), 1, "piece 0: .* address positive"),
        ((Piece(2**62, 2**60, 8),), 2**10, "reaches beyond memory"),
        (LAYERS, 2**31, "are more than 2147483648 pieces"),
        (LAYERS, 11, "pieces overlap"),
        ((LAYERS[0], LAYERS[0]), 1, "pieces overlap"),
        ((Piece(1000, 128, 64), Piece(1063, 128, 64)), 10, "pieces overlap"),
        ((Piece(1000, 128, 64), Piece(1065, 128, 64)), 10, "pieces overlap"),
        ((Piece(1000, 128, 8), Piece(1064, 64, 8)), 10, "pieces overlap"),
    ],
)
def test_pieces_that_can_not_be(pieces: tuple[Piece, ...], blocks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_pieces(pieces, blocks)


@given(
    stride=st.integers(1, 12),
    starts=st.lists(st.integers(1, 60), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    blocks=st.integers(1, 5),
)
@example(stride=4, starts=[1, 3], sizes=[2, 3, 1], blocks=1)
@example(stride=4, starts=[1, 3], sizes=[2, 3, 1], blocks=2)
def test_overlaps_are_found(stride: int, starts: list[int], sizes: list[int], blocks: int) -> None:
    pieces = [Piece(start, stride, min(size, stride)) for start, size in zip(starts, sizes, strict=False)]
    taken = [at for piece in pieces for at in bytes_of(piece, blocks)]
    if len(set(taken)) == len(taken):
        check_pieces(pieces, blocks)
    else:
        with pytest.raises(ValueError, match="pieces overlap"):
            check_pieces(pieces, blocks)


def test_the_extent_of_a_piece_is_from_its_first_byte_to_its_last() -> None:
    taken = bytes_of(FIELDS[1], 10)
    assert extent(FIELDS[1], 10) == (min(taken), max(taken) + 1)


def test_a_part_of_pieces_is_those_heads_of_every_piece() -> None:
    assert narrowed(FIELDS, WHOLE) == FIELDS
    assert narrowed(FIELDS, Part(1, 2, 4)) == (Piece(1016, 128, 32), Piece(1080, 128, 32))
    halves = [narrowed(LAYERS, Part(half, 1, 2)) for half in range(2)]
    both = [bytes_of(halves[half][0], 10) for half in range(2)]
    assert sorted(both[0] + both[1]) == bytes_of(LAYERS[0], 10)


@pytest.mark.parametrize("part", [Part(-1, 1, 2), Part(0, 0, 2), Part(1, 2, 2), Part(0, 1, 0)])
def test_what_is_no_part(part: Part) -> None:
    with pytest.raises(ValueError, match="is no part"):
        narrowed(LAYERS, part)


def test_pieces_that_can_not_be_divided() -> None:
    with pytest.raises(ValueError, match="a piece of 64 bytes can't be divided into 3 equal parts"):
        narrowed(LAYERS, Part(0, 1, 3))


def test_memory_of_another_engine() -> None:
    region = ForeignRegion(10, LAYERS, ((1000, 640), (1640, 640)), heads=HeadRange(2, 2, 4))
    assert (region.block_bytes, region.memory, region.device) == (128, MemoryKind.DRAM, 0)
    assert not hasattr(region, "buffer")


@pytest.mark.parametrize(
    ("blocks", "pieces", "ranges", "heads", "words"),
    [
        (0, LAYERS, ((1000, 1280),), None, "num_blocks is 0, allowed is 1 or more"),
        (10, (LAYERS[0], LAYERS[0]), ((1000, 1280),), None, "pieces overlap"),
        (10, LAYERS, ((1000, 1279),), None, "of 10 blocks lies in none of the ranges 0x3e8 to 0x8e7"),
        (10, LAYERS, ((1001, 1280),), None, "lies in none of the ranges"),
        (10, FIELDS, ((1000, 640), (1640, 640)), None, "lies in none of the ranges 0x3e8 to 0x668, 0x668 to"),
        (10, LAYERS, (), None, "lies in none of the ranges"),
        (10, LAYERS, ((1000, 1280),), HeadRange(0, 3, 3), "piece 0 has 64 bytes, which are not 3 heads"),
    ],
)
def test_memory_that_is_described_wrongly(
    blocks: int,
    pieces: tuple[Piece, ...],
    ranges: tuple[tuple[int, int], ...],
    heads: HeadRange | None,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match="^KV memory: .*" + re.escape(words)):
        ForeignRegion(blocks, pieces, ranges, heads=heads)
