"""Engines of several ranks, each over NIXL agents of its own: every head lands where it belongs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Handle, HeadRange, Operation, TransferState, TransportError
from kvhandoff.transport.nixl import NixlPlane
from kvhandoff.transport.ranks import RankedPlane, decode_ranks, encode_ranks
from tests.transport.caches import Order, RankCache, rank_caches
from tests.transport.processes import DEADLINE, identity

pytestmark = pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed")

P, D = identity("p"), identity("d")
COPIES: list[Copy] = [(3, 5, 1), (9, 0, 3), (6, 4, 1), (5, 3, 1), (0, 9, 2), (15, 7, 1)]
"""Neighbours, some in descending order, and blocks alone; of a source of 16, to a destination of 12."""


@dataclass
class RankedEngine:
    me: Identity
    caches: list[RankCache]
    planes: list[RankedPlane]

    def metadata(self) -> bytes:
        return encode_ranks([plane.metadata() for plane in self.planes])

    def connect(self, peer: RankedEngine) -> None:
        for plane in self.planes:
            plane.connect(peer.me, peer.metadata())

    def fill(self, seed: int) -> None:
        for cache in self.caches:
            cache.fill(seed)

    def move(self, operation: Operation, peer: RankedEngine, copies: Sequence[Copy]) -> list[Handle]:
        """On every rank, to the end."""
        handles = [plane.post(operation, peer.me, copies) for plane in self.planes]
        for plane, handle in zip(self.planes, handles, strict=True):
            assert ended(plane, handle) is TransferState.DONE
        return list(handles)

    def is_filled_with(self, seed: int) -> bool:
        return all(cache.content() == cache.expected(seed, 0, []) for cache in self.caches)

    def has_received(self, seed: int, source_seed: int, copies: Sequence[Copy]) -> bool:
        return all(cache.content() == cache.expected(seed, source_seed, copies) for cache in self.caches)

    def close(self) -> None:
        for plane in self.planes:
            plane.close()


@contextmanager
def ranked(
    me: Identity, ranks: int, total: int | None, blocks: int, order: Order = "layers first"
) -> Iterator[RankedEngine]:
    caches = rank_caches(ranks, total, blocks, order)
    planes = [RankedPlane(partial(NixlPlane, f"{me}/{rank}"), rank, ranks) for rank in range(ranks)]
    for plane, cache in zip(planes, caches, strict=True):
        plane.register(cache.region)
    engine = RankedEngine(me, caches, planes)
    try:
        yield engine
    finally:
        engine.close()


def ended(plane: RankedPlane, handle: Any) -> TransferState:
    deadline = time.monotonic() + DEADLINE
    while (state := plane.poll(handle)) is TransferState.PENDING:
        assert time.monotonic() < deadline, "the transfer does not end"
        plane.service()
    return state


def settle(plane: RankedPlane) -> None:
    """Until the first reads of its connections have ended."""
    deadline = time.monotonic() + DEADLINE
    while plane.service_interval is not None:
        assert time.monotonic() < deadline, "a first read does not end"
        plane.service()


DIVISIONS = [
    (1, 1, 4),
    (2, 1, 4),
    (1, 2, 4),
    (2, 2, 4),
    (4, 2, 4),
    (2, 4, 2),  # each head on two ranks of D
    (4, 2, 2),  # each head on two ranks of P
    (4, 4, 2),
    (2, 3, 6),  # a rank of D takes from two ranks of P, of one of them a third
    (2, 1, None),
    (1, 2, None),
    (2, 2, None),
    (2, 4, None),
]


@pytest.mark.parametrize(("p_ranks", "d_ranks", "total"), DIVISIONS)
def test_every_head_lands_where_it_belongs(p_ranks: int, d_ranks: int, total: int | None) -> None:
    """Field case 11, for reads and for writes. P keeps blocks layer by layer, D block by block."""
    with (
        ranked(P, p_ranks, total, blocks=16) as p,
        ranked(D, d_ranks, total, blocks=12, order="blocks first") as d,
    ):
        p.connect(d)
        d.connect(p)
        moved = sum(count for _, _, count in COPIES)
        to_move = moved * sum(cache.region.block_bytes for cache in d.caches)
        for move in (partial(d.move, "read", p), partial(p.move, "write", d)):
            p.fill(1)
            d.fill(2)
            handles = move(COPIES)
            assert d.has_received(2, 1, COPIES)
            assert p.is_filled_with(1)
            assert sum(handle.bytes for handle in handles) == to_move


def test_a_rank_that_has_nothing_to_give_is_done_at_once() -> None:
    with ranked(P, 2, None, blocks=4) as p, ranked(D, 1, None, blocks=4) as d:
        p.connect(d)
        handle = p.planes[1].post("write", D, [(0, 0, 4)])
        assert (p.planes[1].poll(handle), handle.bytes) == (TransferState.DONE, 0)
        d.fill(2)
        p.fill(1)
        assert ended(p.planes[0], p.planes[0].post("write", D, [(0, 0, 4)])) is TransferState.DONE
        assert d.has_received(2, 1, [(0, 0, 4)])


def test_connecting_again_and_disconnecting() -> None:
    with ranked(P, 2, 4, blocks=4) as p, ranked(D, 1, 4, blocks=4) as d:
        d.connect(p)
        d.connect(p)
        d.planes[0].disconnect(P)
        d.planes[0].disconnect(P)
        with pytest.raises(TransportError, match="read p@0: not connected"):
            d.planes[0].post("read", P, [(0, 0, 1)])
        d.connect(p)
        p.fill(1)
        d.fill(2)
        d.move("read", p, [(0, 1, 2)])
        assert d.has_received(2, 1, [(0, 1, 2)])


def test_blocks_outside_a_region_are_refused_before_any_byte_moves() -> None:
    with ranked(P, 2, 4, blocks=8) as p, ranked(D, 1, 4, blocks=4) as d:
        d.connect(p)
        p.fill(1)
        d.fill(2)
        with pytest.raises(TransportError, match="blocks 8 to 8 of p#0@0, which has blocks 0 to 7"):
            d.planes[0].post("read", P, [(0, 0, 1), (8, 1, 1)])
        with pytest.raises(TransportError, match="blocks 3 to 4 of this engine"):
            d.planes[0].post("read", P, [(0, 0, 1), (0, 3, 2)])
        assert d.is_filled_with(2)


@pytest.mark.parametrize(
    ("p_total", "d_total", "words"),
    [
        (4, 8, "connect p@0: KV heads in all: 8 here, 4 there"),
        (4, None, "connect p@0: KV heads in all: None here, 4 there"),
    ],
)
def test_engines_of_other_heads_are_refused(p_total: int, d_total: int | None, words: str) -> None:
    with ranked(P, 2, p_total, blocks=4) as p, ranked(D, 2, d_total, blocks=4) as d:
        with pytest.raises(TransportError, match=words):
            d.connect(p)
        with pytest.raises(TransportError, match="not connected"):
            d.planes[0].post("read", P, [(0, 0, 1)])


def test_a_region_of_other_heads_than_its_rank_holds_is_refused() -> None:
    cache = RankCache(HeadRange(0, 2, 4), 4, "layers first")
    plane = RankedPlane(lambda: NixlPlane("d/1"), 1, 2)
    with pytest.raises(TransportError, match=r"rank 1 of 2 holds .*first=0.*, expected .*first=2"):
        plane.register(cache.region)
    plane.close()
    odd = RankCache(HeadRange(0, 2, 5), 4, "layers first")
    plane = RankedPlane(lambda: NixlPlane("d/0"), 0, 2)
    with pytest.raises(TransportError, match="rank 0: 5 KV heads can't be divided evenly among 2 ranks"):
        plane.register(odd.region)
    plane.close()


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, 65)])
def test_what_is_no_rank(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
        RankedPlane(lambda: NixlPlane("never"), rank, ranks)


def test_metadata_that_lie_are_refused() -> None:
    with ranked(P, 2, 4, blocks=4) as p, ranked(D, 1, 4, blocks=4) as d:
        ranks = [plane.metadata() for plane in p.planes]
        facts = [msgspec.msgpack.decode(rank) for rank in ranks]

        def refusal(*told: bytes) -> str:
            with pytest.raises(TransportError, match=r"^connect p(#\d)?@0: ") as refused:
                d.planes[0].connect(P, encode_ranks(told))
            settle(d.planes[0])
            return str(refused.value)

        def lie(**lies: Any) -> bytes:
            return msgspec.msgpack.encode(facts[1] | lies)

        assert "rank 0 of 1 is said to be rank 0 of 2" in refusal(ranks[0])
        assert "rank 0 of 2 is said to be rank 1 of 2" in refusal(ranks[1], ranks[0])
        assert "rank 1 of 2 is said to be rank 0 of 2" in refusal(ranks[0], ranks[0])
        assert "expected" in refusal(ranks[0], lie(heads={"first": 0, "count": 4, "total": 4}))
        assert "expected" in refusal(ranks[0], lie(heads=None))
        assert "malformed metadata of rank 1" in refusal(ranks[0], lie(heads={"first": -1}))
        assert "malformed metadata of rank 1" in refusal(ranks[0], lie(extra=1))
        assert "malformed nixl metadata" in refusal(ranks[0], lie(plane=b"no"))
        other = facts[1] | {"plane": facts[0]["plane"]}
        assert "is connected as p#0@0" in refusal(ranks[0], msgspec.msgpack.encode(other))
        # Heads that its memory can't be: each of four times the bytes of one here.
        one_head = [lie(rank=0, ranks=4, heads={"first": 0, "count": 1, "total": 4})]
        one_head += [lie(rank=r, ranks=4, heads={"first": r, "count": 1, "total": 4}) for r in (1, 2, 3)]
        assert "blocks have 144 bytes here, 288 bytes there" in refusal(*one_head)
        d.connect(p)
        p.fill(1)
        d.fill(2)
        d.move("read", p, [(0, 0, 4)])
        assert d.has_received(2, 1, [(0, 0, 4)])


def test_ranks_of_an_engine_as_one() -> None:
    ranks = (b"a", bytes(range(256)) * 30, b"\x00")
    assert decode_ranks(encode_ranks(ranks)) == ranks


@pytest.mark.parametrize("ranks", [[], [b""], [b"x"] * 65, [bytes((1 << 20) + 1)]])
def test_what_can_not_be_the_ranks_of_an_engine(ranks: list[bytes]) -> None:
    with pytest.raises(ValueError, match="malformed metadata of ranks"):
        encode_ranks(ranks)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RankedEngine, RankedEngine]]:
    with ranked(P, 2, 4, blocks=4) as p, ranked(D, 1, 4, blocks=4) as d:
        yield p, d


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_metadata_are_refused(pair: tuple[RankedEngine, RankedEngine], data: st.DataObject) -> None:
    """With the checksum of each rank's, a change is either seen or changes nothing that is used."""
    p, d = pair
    truth = p.metadata()
    at = data.draw(st.integers(0, len(truth) - 1))
    cut = data.draw(st.integers(0, 8))
    damaged = truth[:at] + data.draw(st.binary(max_size=8)) + truth[at + cut :]
    if damaged == truth:
        return
    with pytest.raises(TransportError, match=r"^connect p"):
        d.planes[0].connect(P, damaged)
