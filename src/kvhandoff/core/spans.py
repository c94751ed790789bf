"""Block lists as runs of neighbours: compact on the wire, few descriptors in a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""(first block, count)."""

Copy = tuple[int, int, int]
"""(first source block, first destination block, count)."""


def to_spans(blocks: Iterable[int]) -> tuple[Span, ...]:
    """Consecutive runs of a block list, in its order."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1][0] + spans[-1][1] == block:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((block, 1))
    return tuple(spans)


def to_blocks(spans: Iterable[Span]) -> tuple[int, ...]:
    """The block list that `to_spans` was made from."""
    return tuple(block for first, count in spans for block in range(first, first + count))


def coalesce(source: Sequence[int], destination: Sequence[int]) -> list[Copy]:
    """Pair two block lists of equal length into as few contiguous copies as their order allows.

    Raises ValueError when the lengths differ: a transfer of unequal lists would move the wrong blocks.
    """
    copies: list[Copy] = []
    for src, dst in zip(source, destination, strict=True):
        if copies:
            first_src, first_dst, count = copies[-1]
            if first_src + count == src and first_dst + count == dst:
                copies[-1] = (first_src, first_dst, count + 1)
                continue
        copies.append((src, dst, 1))
    return copies
