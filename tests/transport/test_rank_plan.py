"""Which ranks exchange which heads, for every pair of rank counts and every number of heads up to 8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import get_args

import pytest

from kvhandoff.transport.api import WHOLE, HeadRange, Operation, Part
from kvhandoff.transport.rank_plan import Exchange, Heads, heads_of, rank_plan

SIZES = range(1, 9)
TOTALS: list[int | None] = [None, *SIZES]


def divides(ranks: int, total: int | None) -> bool:
    return total is None or total % ranks == 0 or ranks % total == 0


CASES = [
    (source, destination, total)
    for source, destination, total in product(SIZES, SIZES, TOTALS)
    if divides(source, total) and divides(destination, total)
]
"""Also those where neither number of ranks is a multiple of the other, e.g. 2 and 3 ranks of 6 heads."""


def engine(ranks: int, total: int | None) -> list[Heads]:
    return [None if total is None else heads_of(rank, ranks, total) for rank in range(ranks)]


def heads_in(part: Part, held: Heads) -> tuple[int, ...]:
    """The model's heads that a part of a rank's pieces is."""
    first, count = (0, 1) if held is None else (held.first, held.count)
    assert count * part.first % part.of == count * part.count % part.of == 0
    start = first + count * part.first // part.of
    return tuple(range(start, start + count * part.count // part.of))


Moves = list[tuple[int, int, int]]
"""(source rank, destination rank, head)"""


def moves(local: Sequence[Heads], remote: Sequence[Heads], operation: Operation) -> Moves:
    """What all ranks of `local` do, put together."""
    found = []
    for rank, held in enumerate(local):
        plan = rank_plan(local, rank, remote, operation)
        assert [exchange.rank for exchange in plan] == sorted({exchange.rank for exchange in plan})
        for exchange in plan:
            heads = heads_in(exchange.mine, held)
            assert heads == heads_in(exchange.theirs, remote[exchange.rank])
            ends = (exchange.rank, rank) if operation == "read" else (rank, exchange.rank)
            found += [(*ends, head) for head in heads]
    return sorted(found)


@pytest.mark.parametrize("total", TOTALS)
def test_every_byte_of_a_destination_has_exactly_one_writer(total: int | None) -> None:
    for source, destination in [case[:2] for case in CASES if case[2] == total]:
        sources, destinations = engine(source, total), engine(destination, total)
        expected = sorted(
            (rank, head)
            for rank, held in enumerate(destinations)
            for head in ([0] if held is None else range(held.first, held.first + held.count))
        )
        for found in (moves(destinations, sources, "read"), moves(sources, destinations, "write")):
            assert sorted((rank, head) for _, rank, head in found) == expected, (source, destination)
            assert all(head in heads_in(WHOLE, sources[rank]) for rank, _, head in found)


def test_reads_of_the_destination_and_writes_of_the_source_are_the_same_map() -> None:
    for source, destination, total in CASES:
        sources, destinations = engine(source, total), engine(destination, total)
        read, written = moves(destinations, sources, "read"), moves(sources, destinations, "write")
        assert read == written, (source, destination, total)


def test_equal_ranks_exchange_whole_pieces_with_each_other() -> None:
    for ranks, total in product(SIZES, TOTALS):
        if divides(ranks, total):
            same = engine(ranks, total)
            for rank, operation in product(range(ranks), get_args(Operation)):
                assert rank_plan(same, rank, same, operation) == [Exchange(rank, WHOLE, WHOLE)]


def test_holders_of_a_head_share_the_work_evenly() -> None:
    for source, destination, total in CASES:
        sources, destinations = engine(source, total), engine(destination, total)
        found = moves(sources, destinations, "write")
        for head in range(total or 1):
            holders = [rank for rank, held in enumerate(sources) if head in heads_in(WHOLE, held)]
            given = Counter(giver for giver, _, moved in found if moved == head)
            shares = [given[rank] for rank in holders]
            assert max(shares) - min(shares) <= 1, (source, destination, total)


def test_two_ranks_exchange_the_same_parts_in_both_directions() -> None:
    """So one connection serves both."""
    for here, there, total in CASES:
        local, remote = engine(here, total), engine(there, total)
        for rank in range(here):
            both = {*rank_plan(local, rank, remote, "read"), *rank_plan(local, rank, remote, "write")}
            assert len({exchange.rank for exchange in both}) == len(both), (here, there, total)


@pytest.mark.parametrize(
    ("local", "remote", "rank", "operation", "plan"),
    [
        # Two ranks of two heads each give to one of four.
        ((2, 4), (1, 4), 1, "write", [Exchange(0, WHOLE, Part(2, 2, 4))]),
        ((1, 4), (2, 4), 0, "read", [Exchange(0, Part(0, 2, 4), WHOLE), Exchange(1, Part(2, 2, 4), WHOLE)]),
        # One head each to four ranks of which two hold the same.
        ((2, 2), (4, 2), 0, "write", [Exchange(0, WHOLE, WHOLE), Exchange(1, WHOLE, WHOLE)]),
        ((4, 2), (2, 2), 2, "write", [Exchange(1, WHOLE, WHOLE)]),
        ((4, 2), (2, 2), 3, "write", []),
        ((4, 2), (2, 2), 3, "read", [Exchange(1, WHOLE, WHOLE)]),
        # Blocks not divided by heads.
        ((4, None), (2, None), 1, "write", []),
        ((4, None), (2, None), 1, "read", [Exchange(0, WHOLE, WHOLE)]),
        # Neither number of ranks is a multiple of the other.
        ((2, 6), (3, 6), 0, "write", [
            Exchange(0, Part(0, 2, 3), WHOLE), Exchange(1, Part(2, 1, 3), Part(0, 1, 2)),
        ]),
    ],
)  # fmt: skip
def test_plans(
    local: tuple[int, int | None],
    remote: tuple[int, int | None],
    rank: int,
    operation: Operation,
    plan: list[Exchange],
) -> None:
    assert rank_plan(engine(*local), rank, engine(*remote), operation) == plan


@pytest.mark.parametrize(
    ("rank", "ranks", "total", "held"),
    [
        (0, 1, 8, HeadRange(0, 8, 8)),
        (3, 4, 8, HeadRange(6, 2, 8)),
        (2, 4, 4, HeadRange(2, 1, 4)),
        (5, 8, 2, HeadRange(1, 1, 2)),
        (7, 8, 1, HeadRange(0, 1, 1)),
    ],
)
def test_heads_of_a_rank(rank: int, ranks: int, total: int, held: HeadRange) -> None:
    assert heads_of(rank, ranks, total) == held


@pytest.mark.parametrize(
    ("rank", "ranks", "total", "words"),
    [
        (0, 4, 6, "6 KV heads can't be divided evenly among 4 ranks"),
        (0, 3, 2, "2 KV heads can't be divided evenly among 3 ranks"),
        (2, 2, 4, "rank 2 of 2 ranks"),
        (-1, 2, 4, "rank -1 of 2 ranks"),
        (0, 1, 0, "0 KV heads"),
    ],
)
def test_what_is_no_division(rank: int, ranks: int, total: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        heads_of(rank, ranks, total)


@pytest.mark.parametrize(
    ("local", "remote", "words"),
    [
        (engine(2, 4), engine(2, 8), "KV heads in all: 4 here, 8 there"),
        (engine(2, 4), engine(2, None), "KV heads in all: 4 here, None there"),
        (engine(2, None), engine(2, 2), "KV heads in all: None here, 2 there"),
        ([HeadRange(0, 2, 4), HeadRange(0, 2, 8)], engine(2, 4), "KV heads in all: 4, 8 here, 4 there"),
        (engine(2, 4), [HeadRange(0, 1, 4)], "KV head 1 is held by no rank of the source"),
        ([HeadRange(0, 3, 3)], [HeadRange(1, 1, 3), HeadRange(0, 3, 3)], r"KV heads \[0, 2\] are no range"),
    ],
)  # fmt: skip
def test_engines_that_do_not_fit(local: list[Heads], remote: list[Heads], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rank_plan(local, 0, remote, "read")
