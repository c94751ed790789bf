"""Which ranks of two engines exchange which KV heads.

An engine's KV heads are divided evenly among its ranks. With more ranks than heads, each head is held by
several ranks in a row, its holders, with equal content. Blocks that aren't divided by heads are held by all.

A plan is made from the destination's side: each head of each destination rank comes from one source rank, so
that each byte is written once. Both engines compute the same plan, one for its reads, one for its writes.
The holders of a head at the destination are spread evenly over its holders at the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhandoff.transport.api import WHOLE, HeadRange, Operation, Part

Heads = HeadRange | None
_UNDIVIDED = HeadRange(0, 1, 1)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank exchanges with one rank of another engine."""

    rank: int
    """The other engine's."""
    mine: Part
    """Of this rank's pieces."""
    theirs: Part
    """Of the other rank's pieces; the same heads."""


def heads_of(rank: int, ranks: int, total: int) -> HeadRange:
    """The KV heads that a rank holds. Raises ValueError if heads can't be divided evenly."""
    if not 0 <= rank < ranks or total < 1:
        raise ValueError(f"rank {rank} of {ranks} ranks and {total} KV heads")
    if total % ranks == 0:
        return HeadRange(rank * (total // ranks), total // ranks, total)
    if ranks % total == 0:
        return HeadRange(rank // (ranks // total), 1, total)
    raise ValueError(f"{total} KV heads can't be divided evenly among {ranks} ranks")


def rank_plan(
    local: Sequence[Heads], rank: int, remote: Sequence[Heads], operation: Operation
) -> list[Exchange]:
    """What `rank` of `local` exchanges with ranks of `remote` in an operation of its own, by their rank.

    `local` and `remote` are the heads of each engine's ranks, in their order. Raises ValueError if they
    aren't those of one model, or some head of a destination is held by no source.
    """
    here, there = _divided(local, remote)
    sources, destinations = (there, here) if operation == "read" else (here, there)
    mine = here[rank]
    heads: dict[int, list[int]] = {}
    for index, theirs in enumerate(destinations):
        if operation == "read" and index != rank:
            continue
        for head in range(theirs.first, theirs.first + theirs.count):
            source = _source(head, index, sources, destinations)
            if operation == "read":
                heads.setdefault(source, []).append(head)
            elif source == rank:
                heads.setdefault(index, []).append(head)
    return [
        Exchange(other, _part(moved, mine), _part(moved, there[other]))
        for other, moved in sorted(heads.items())
    ]


def _divided(
    local: Sequence[Heads], remote: Sequence[Heads]
) -> tuple[tuple[HeadRange, ...], tuple[HeadRange, ...]]:
    """Both with undivided blocks taken for a model of one head."""
    totals = [{None if heads is None else heads.total for heads in engine} for engine in (local, remote)]
    if len(totals[0]) != 1 or totals[0] != totals[1]:
        here, there = (", ".join(sorted(map(str, total))) for total in totals)
        raise ValueError(f"KV heads in all: {here} here, {there} there (None: blocks not divided by heads)")
    return tuple(heads or _UNDIVIDED for heads in local), tuple(heads or _UNDIVIDED for heads in remote)


def _source(
    head: int, destination: int, sources: Sequence[HeadRange], destinations: Sequence[HeadRange]
) -> int:
    """The source rank that gives a head to a destination rank."""
    givers, takers = _holders(head, sources), _holders(head, destinations)
    if not givers:
        raise ValueError(f"KV head {head} is held by no rank of the source")
    return givers[takers.index(destination) * len(givers) // len(takers)]


def _holders(head: int, ranks: Sequence[HeadRange]) -> list[int]:
    return [rank for rank, heads in enumerate(ranks) if heads.first <= head < heads.first + heads.count]


def _part(moved: list[int], held: HeadRange) -> Part:
    """The heads of a rank that are moved, as part of those that it holds."""
    if moved != list(range(moved[0], moved[0] + len(moved))):
        raise ValueError(f"KV heads {moved} are no range")
    return WHOLE if len(moved) == held.count else Part(moved[0] - held.first, len(moved), held.count)
