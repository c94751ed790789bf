"""Both data planes between real processes: the right bytes, and the right end of those that can't be."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from kvhandoff.core.spans import Copy, coalesce
from kvhandoff.transport.lanes import MIN_COPIES
from tests.transport.processes import Engine, block_of, engines, identity

BLOCKS = 16


@pytest.fixture(scope="module")
def pair(kind: str) -> Iterator[tuple[Engine, Engine]]:
    """Two connected engines; the second has more blocks than the first."""
    with engines() as make:
        a = make(kind, "a", blocks=BLOCKS)
        b = make(kind, "b", blocks=BLOCKS + 8)
        assert a.connect(b) is None
        assert b.connect(a) is None
        yield a, b
        a.quit()
        b.quit()


LISTS = {
    "one": ([3], [5]),
    "contiguous": ([2, 3, 4, 5], [6, 7, 8, 9]),
    "all": (list(range(BLOCKS)), list(range(BLOCKS))),
    "fragmented": ([0, 7, 3, 15, 9], [4, 1, 14, 0, 8]),
    "reversed": ([9, 8, 7, 6], [1, 2, 3, 4]),
    "runs": ([0, 1, 2, 8, 9, 4], [5, 6, 7, 10, 11, 3]),
    "one source twice": ([3, 3], [5, 9]),
    "remote end": ([20, 23], [0, 1]),
    "none": ([], []),
}


@pytest.mark.parametrize(("source", "destination"), LISTS.values(), ids=LISTS.keys())
def test_a_read_brings_exactly_these_blocks(
    pair: tuple[Engine, Engine], source: list[int], destination: list[int]
) -> None:
    a, b = pair
    a.fill(1)
    b.fill(2)
    assert a.move("read", b, coalesce(source, destination)) == "done"
    expected = a.expected(1)
    for src, dst in zip(source, destination, strict=True):
        expected[dst] = block_of(2, src, b.block_bytes)
    assert a.content() == expected
    assert b.content() == b.expected(2)


# Turned round for writes; two sources for one destination would have no right outcome.
WRITES = {name: lists for name, lists in LISTS.items() if name != "one source twice"}


@pytest.mark.parametrize(("destination", "source"), WRITES.values(), ids=WRITES.keys())
def test_a_write_brings_exactly_these_blocks(
    pair: tuple[Engine, Engine], source: list[int], destination: list[int]
) -> None:
    a, b = pair
    a.fill(1)
    b.fill(2)
    assert a.move("write", b, coalesce(source, destination)) == "done"
    expected = b.expected(2)
    for src, dst in zip(source, destination, strict=True):
        expected[dst] = block_of(1, src, a.block_bytes)
    assert b.content() == expected
    assert a.content() == a.expected(1)


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ([(BLOCKS + 8, 0, 1)], "blocks 24 to 24 of b@0, which has blocks 0 to 23"),
        ([(BLOCKS + 7, 0, 2)], "blocks 24 of b@0"),
        ([(0, BLOCKS, 1)], "blocks 16 to 16 of this engine"),
        ([(0, BLOCKS - 1, 2)], "blocks 15 to 16 of this engine"),
        ([(-1, 0, 1)], "blocks -1 to -1 of b@0"),
        ([(0, -1, 1)], "blocks -1 to -1 of this engine"),
        ([(0, 0, 0)], "a copy of 0 blocks"),
        ([(5, 5, -1)], "a copy of -1 blocks"),
        ([(0, 0, 2**70)], "of this engine"),
    ],
)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_blocks_outside_a_region_are_refused_before_any_byte_moves(
    pair: tuple[Engine, Engine], operation: str, copies: list[tuple[int, int, int]], words: str
) -> None:
    a, b = pair
    a.fill(1)
    b.fill(2)
    first = (1, 2, 3)  # a good copy stands before the bad one
    if operation == "write":
        copies = [(local, remote, count) for remote, local, count in copies]
    answer = a.move(operation, b, [first, *copies])
    assert answer.startswith("refused: ")
    assert words.replace("blocks 24 of", "blocks 23 to 24 of") in answer
    assert a.content() == a.expected(1)
    assert b.content() == b.expected(2)


SCATTERED = 400
"""Blocks that are no neighbours: enough for a transfer that NIXL's lanes share."""


def scattered() -> tuple[list[int], list[int]]:
    """Blocks of a source of 900 and of a destination of 1000, hardly any two beside each other."""
    rng = random.Random(31)
    return rng.sample(range(900), SCATTERED), rng.sample(range(1000), SCATTERED)


@pytest.fixture(scope="module")
def large_pair(kind: str) -> Iterator[tuple[Engine, Engine]]:
    """Two connected engines with many small blocks."""
    with engines() as make:
        a = make(kind, "a", blocks=1000, block_bytes=1000)
        b = make(kind, "b", blocks=900, block_bytes=1000)
        assert a.connect(b) is None
        assert b.connect(a) is None
        yield a, b
        a.quit()
        b.quit()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_many_scattered_blocks_arrive_and_nothing_else(
    large_pair: tuple[Engine, Engine], operation: str
) -> None:
    """The source is `b`: it is read from, or writes."""
    a, b = large_pair
    a.fill(1)
    b.fill(2)
    source, destination = scattered()
    copies = coalesce(source, destination)
    assert len(copies) >= 3 * MIN_COPIES
    assert (a.move("read", b, copies) if operation == "read" else b.move("write", a, copies)) == "done"
    expected = a.expected(1)
    for src, dst in zip(source, destination, strict=True):
        expected[dst] = block_of(2, src, b.block_bytes)
    assert a.content() == expected
    assert b.content() == b.expected(2)


@pytest.mark.parametrize("at", [0, SCATTERED], ids=["first", "last"])
@pytest.mark.parametrize("bad", [(900, 0, 1), (0, 1000, 1), (0, 0, 0)])
def test_one_bad_copy_among_many_is_refused_before_any_byte_moves(
    large_pair: tuple[Engine, Engine], at: int, bad: Copy
) -> None:
    a, b = large_pair
    a.fill(1)
    b.fill(2)
    copies = coalesce(*scattered())
    copies.insert(at, bad)
    assert a.move("read", b, copies).startswith("refused: read b@0: ")
    assert a.content() == a.expected(1)
    copies.remove(bad)
    assert a.move("read", b, copies) == "done"


def test_an_unknown_peer_is_refused(pair: tuple[Engine, Engine]) -> None:
    a, _ = pair
    answer = a.ask("move", "read", identity("b", "another life"), [(0, 0, 1)])
    assert answer == "refused: read b@another life: not connected"


def test_connecting_again_is_a_no_op_and_disconnecting_forgets(kind: str, engine: type[Engine]) -> None:
    a, b = engine(kind, "a"), engine(kind, "b")
    b.fill(2)
    assert a.connect(b) is None
    assert a.connect(b) is None
    assert a.move("read", b, [(0, 0, 4)]) == "done"
    a.ask("disconnect", b.identity)
    a.ask("disconnect", b.identity)
    assert "not connected" in a.move("read", b, [(0, 0, 4)])
    assert a.connect(b) is None
    assert a.move("read", b, [(4, 4, 4)]) == "done"
    assert a.content()[:8] == b.expected(2)[:8]
    a.quit()
    b.quit()


def test_blocks_of_another_size_are_refused_with_both_sizes(kind: str, engine: type[Engine]) -> None:
    a, b = engine(kind, "a", block_bytes=4096), engine(kind, "b", block_bytes=8192)
    assert a.connect(b) == "connect b@0: blocks have 4096 bytes here, 8192 bytes there"


def test_a_peer_of_another_kind_is_refused(kind: str, engine: type[Engine]) -> None:
    other = "shm" if kind == "nixl" else "nixl"
    a, b = engine(kind, "a"), engine(other, "b")
    refusal = a.connect(b)
    assert refusal is not None
    assert f"malformed {kind} metadata (Invalid value '{other}'" in refusal


def test_a_killed_peer_fails_transfers_and_nothing_else(kind: str, engine: type[Engine]) -> None:
    a, b, c = engine(kind, "a"), engine(kind, "b"), engine(kind, "c")
    c.fill(3)
    assert a.connect(b) is None
    assert a.connect(c) is None
    assert a.move("read", b, [(0, 0, 1)]) == "done"
    b.kill()
    a.fill(1)
    assert a.move("read", b, [(0, 0, 16)]).startswith(
        "refused: " if kind == "shm" else ("refused: ", "failed: ")
    )
    assert a.move("write", b, [(0, 0, 16)]).startswith(("refused: ", "failed: "))
    if os.environ.get("UCX_TLS"):
        assert a.move("read", b, [(0, 0, 1)]) == "refused: read b@0: the connection is lost"
    assert a.move("read", c, [(0, 4, 4)]) == "done"
    assert a.content()[4:8] == c.expected(3)[:4]
    a.quit()


def test_a_peer_killed_before_the_connect_is_refused(kind: str, engine: type[Engine]) -> None:
    a, b = engine(kind, "a"), engine(kind, "b")
    b.kill()
    refusal = a.connect(b)
    # NIXL over TCP connects in the background; there the first transfer tells.
    assert refusal is not None or a.move("read", b, [(0, 0, 1)]).startswith(("refused: ", "failed: "))
    a.quit()


MANY = 256
"""Blocks of 256 KiB: over TCP, more than any buffer between a reader and a stopped peer holds."""

LARGE = {
    "contiguous": [(0, 0, MANY)],
    "scattered": [(block, MANY - 1 - block, 1) for block in range(MANY)],
}
large = pytest.mark.parametrize("copies", LARGE.values(), ids=LARGE.keys())


@pytest.mark.parametrize(
    ("operation", "copies"),
    [("read", LARGE["contiguous"]), ("read", LARGE["scattered"]), ("write", LARGE["scattered"])],
    ids=["read", "read scattered", "write scattered"],
)
def test_a_peer_killed_during_a_transfer(
    kind: str, engine: type[Engine], operation: str, copies: list[Copy]
) -> None:
    """Its outcome is a fence either way; over TCP the stopped peer makes sure that it is in flight."""
    a, b = (engine(kind, name, blocks=MANY, block_bytes=1 << 18) for name in "ab")
    assert a.connect(b) is None
    assert a.move("read", b, [(0, 0, 1)]) == "done"
    b.stop()
    posted = a.ask("post", operation, b.identity, copies)
    assert posted == "pending" or not os.environ.get("UCX_TLS")
    b.kill()
    outcome = a.ask("wait")
    assert outcome == "done" if posted == "done" else outcome.startswith("failed: ")
    content = a.content()
    assert a.move(operation, b, copies).startswith(("refused: ", "failed: "))
    assert a.content() == content
    a.quit()


@large
def test_a_disconnect_during_a_transfer_waits_for_its_fence(
    kind: str, engine: type[Engine], copies: list[Copy]
) -> None:
    a, b = (engine(kind, name, blocks=MANY, block_bytes=1 << 18) for name in "ab")
    assert a.connect(b) is None
    assert a.move("read", b, [(0, 0, 1)]) == "done"
    b.stop()
    posted = a.ask("post", "read", b.identity, copies)
    a.ask("disconnect", b.identity)
    assert "not connected" in a.move("read", b, [(0, 0, 1)])
    b.kill()
    assert a.ask("wait").startswith("failed: " if posted == "pending" else "done")
    a.quit()


@large
def test_a_peer_that_is_connected_again_during_a_transfer_stays(
    kind: str, engine: type[Engine], copies: list[Copy]
) -> None:
    a, b = (engine(kind, name, blocks=MANY, block_bytes=1 << 18) for name in "ab")
    b.fill(2)
    assert a.connect(b) is None
    assert a.move("read", b, [(0, 0, 1)]) == "done"
    b.stop()
    a.ask("post", "read", b.identity, copies)
    a.ask("disconnect", b.identity)
    assert a.connect(b) is None
    b.go_on()
    assert a.ask("wait") == "done"
    assert a.content() == b.expected(2)[:: 1 if len(copies) == 1 else -1]
    a.ask("disconnect", b.identity)
    assert "not connected" in a.move("read", b, [(0, 0, 1)])
    a.quit()
    b.quit()


def test_a_restarted_peer_is_another_one(kind: str, engine: type[Engine]) -> None:
    """Field case 9: same engine id, other epoch, other number of blocks; no read uses old addresses."""
    a, old = engine(kind, "a", blocks=40), engine(kind, "b", epoch="1", blocks=16)
    assert a.connect(old) is None
    assert a.move("read", old, [(0, 0, 16)]) == "done"
    old.kill()
    new = engine(kind, "b", epoch="2", blocks=40)
    new.fill(7)
    assert a.connect(new) is None
    assert a.move("read", new, [(0, 0, 40)]) == "done"
    assert a.content() == new.expected(7)
    assert a.move("read", old, [(0, 0, 1)]).startswith(("refused: ", "failed: "))
    a.ask("disconnect", old.identity)
    refusal = a.connect(old)
    assert refusal is not None or not a.move("read", old, [(0, 0, 1)]).startswith("done")
    assert a.content() == new.expected(7)
    a.quit()
    new.quit()


def test_the_memory_of_a_dead_peer_is_let_go(kind: str, engine: type[Engine]) -> None:
    a, b = engine(kind, "a"), engine(kind, "b")
    assert a.connect(b) is None
    assert a.mapped() == (2 if kind == "shm" else 0)
    b.kill()
    a.wait_until(lambda: a.mapped() == (1 if kind == "shm" else 0))
    a.quit()


def test_a_plane_that_has_nothing_to_do_is_not_woken(kind: str, engine: type[Engine]) -> None:
    """But for the look after dead peers once a second."""
    a, b = engine(kind, "a"), engine(kind, "b")
    assert a.ask("service_interval") is None
    assert a.connect(b) is None
    a.wait_until(lambda: a.ask("service_interval") == (1.0 if kind == "shm" else None))
    a.quit()
    b.quit()


def sealed(facts: dict[str, Any]) -> bytes:
    """Metadata whose checksum is right, if there is one."""
    if "checksum" in facts:
        digest = blake2b(msgspec.msgpack.encode(facts | {"checksum": b""}), digest_size=16).digest()
        facts |= {"checksum": digest}
    return msgspec.msgpack.encode(facts)


def test_metadata_that_lie_are_refused(kind: str, engine: type[Engine]) -> None:
    a, b = engine(kind, "a"), engine(kind, "b")
    truth = msgspec.msgpack.decode(b.metadata)
    assert sealed(dict(truth)) == b.metadata
    lies: dict[str, tuple[dict[str, Any], str]] = {
        "more blocks": ({"num_blocks": 17}, "not registered" if kind == "nixl" else "its metadata say 69632"),
        "countless blocks": ({"num_blocks": 2**50}, "more than" if kind == "nixl" else "its metadata say"),
        "no blocks": ({"num_blocks": 0}, "Expected `int` >= 1 - at `$.num_blocks`"),
        "negative": ({"num_blocks": -1}, "Expected `int` >= 1 - at `$.num_blocks`"),
        "beyond 64 bits": ({"num_blocks": 2**63}, "Expected `int` <= 4611686018427387904"),
        "a string": ({"num_blocks": "16"}, "Expected `int`, got `str` - at `$.num_blocks`"),
        "unknown field": ({"extra": 1}, "unknown field `extra`"),
    }
    if kind == "shm":
        lies |= {
            "fewer blocks": ({"num_blocks": 15}, "its metadata say 61440"),
            "another host": ({"host": "elsewhere/pid:[1]"}, "one host"),
            "another region": ({"name": "kvhandoff-0"}, "is not the region of that name"),
            "another file": ({"fd": 0}, "is not the region of that name"),
            "a closed file": ({"fd": 2**31 - 1}, "No such file"),
            "a recycled pid": ({"pid": a.process.pid}, "can't map the memory"),
            "no such pid": ({"pid": 2**31 - 1}, "can't map the memory"),
        }
    else:
        [[address, stride, size]] = truth["pieces"]
        lies |= {
            "another agent": ({"agent_name": "b@1"}, "the metadata of b@1 are those of agent b@0"),
            "another backend": ({"backend": "LIBFABRIC"}, "NIXL's backend is UCX here, LIBFABRIC there"),
            "other memory": ({"pieces": [[4096, stride, size]]}, "16 blocks at 0x1000 are not registered"),
            "a GPU's memory": ({"memory": "vram"}, "not registered"),
            "a wider stride": ({"pieces": [[address, stride + 1, size]]}, "not registered"),
            "a narrower stride": ({"pieces": [[address, stride - 1, size]]}, "size must be 1 to stride"),
            "smaller blocks": ({"pieces": [[address, stride, 4]]}, "4096 bytes here, 4 bytes there"),
            "more pieces": (
                {"pieces": [[address, stride, size // 2], [address + size // 2, stride, size // 2]]},
                "blocks have 1 pieces here, 2 pieces there",
            ),
            "overlapping pieces": ({"pieces": [[address, stride, size]] * 2}, "pieces overlap"),
            "no pieces": ({"pieces": []}, "Expected `array` of length >= 1"),
            "beyond memory": ({"pieces": [[2**62, 2**60, size]]}, "reaches beyond memory"),
        }
    for what, (lie, words) in lies.items():
        refusal = a.ask("connect", b.identity, sealed(truth | lie))
        assert refusal is not None, what
        assert refusal.startswith("connect b@0: "), what
        assert words in refusal, (what, refusal)
    missing = dict(truth)
    del missing["num_blocks"]
    assert "num_blocks" in a.ask("connect", b.identity, sealed(missing))
    if kind == "nixl":
        damaged = truth | {"agent_metadata": truth["agent_metadata"][:-1]}
        assert "(checksum)" in a.ask("connect", b.identity, msgspec.msgpack.encode(damaged))
    assert a.connect(b) is None
    assert a.move("read", b, [(0, 0, 16)]) == "done"
    a.quit()
    b.quit()
