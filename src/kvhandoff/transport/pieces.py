"""Where the pieces of blocks lie: arithmetic and checks, for regions of this process and those of peers."""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.transport.api import Part, Piece

MAX_PIECES = 1024
"""Of a block: two for each of a model's layers are usual."""
MAX_ADDRESS = 2**63
MAX_DESCRIPTORS = 2**31
"""Pieces of all blocks: NIXL numbers them in 32 bits."""


def side_by_side(address: int, block_bytes: int) -> Piece:
    """The only piece of blocks that lie side by side."""
    return Piece(address, block_bytes, block_bytes)


def extent(piece: Piece, num_blocks: int) -> tuple[int, int]:
    """First address of the piece of the first block, and the one after that of the last."""
    return piece.address, piece.address + (num_blocks - 1) * piece.stride + piece.size


def check_pieces(pieces: Sequence[Piece], num_blocks: int) -> None:
    """Raises ValueError unless every byte belongs to one piece of one block, and addresses have 63 bits."""
    if not 1 <= len(pieces) <= MAX_PIECES:
        raise ValueError(f"a block has {len(pieces)} pieces, allowed are 1 to {MAX_PIECES}")
    if len(pieces) * num_blocks > MAX_DESCRIPTORS:
        raise ValueError(
            f"{num_blocks} blocks of {len(pieces)} pieces are more than {MAX_DESCRIPTORS} pieces"
        )
    for index, piece in enumerate(pieces):
        if piece.address < 1 or not 1 <= piece.size <= piece.stride:
            raise ValueError(f"piece {index}: {piece}, size must be 1 to stride, address positive")
        if extent(piece, num_blocks)[1] > MAX_ADDRESS:
            raise ValueError(f"piece {index} of {num_blocks} blocks: {piece} reaches beyond memory")
    ordered = sorted(pieces)
    for index, one in enumerate(ordered):
        end = extent(one, num_blocks)[1]
        for other in ordered[index + 1 :]:
            if other.address >= end:
                break
            if _overlap(one, other):
                raise ValueError(f"pieces overlap: {one} and {other} of {num_blocks} blocks")


def _overlap(one: Piece, other: Piece) -> bool:
    """Whether any two blocks' pieces share a byte, if `other` starts within the extent of `one`.

    Pieces of different strides that lie among each other are taken for overlapping: no layout has them.
    """
    if one.stride != other.stride:
        return True
    into = (other.address - one.address) % one.stride
    return into < one.size or into + other.size > one.stride


def narrowed(pieces: Sequence[Piece], part: Part) -> tuple[Piece, ...]:
    """The same part of every piece.

    Raises ValueError for a part that isn't one, or that pieces can't be divided into.
    """
    if not 0 <= part.first < part.first + part.count <= part.of:
        raise ValueError(f"{part} is no part")
    if odd := [piece.size for piece in pieces if piece.size % part.of]:
        raise ValueError(f"a piece of {odd[0]} bytes can't be divided into {part.of} equal parts")
    return tuple(
        Piece(
            piece.address + piece.size // part.of * part.first,
            piece.stride,
            piece.size // part.of * part.count,
        )
        for piece in pieces
    )
