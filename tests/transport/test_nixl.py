"""What is NIXL's own: backends, agents, connections of parts, and the one error that fences nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.api import WHOLE, MemoryKind, Part, TransferState, TransportError
from kvhandoff.transport.nixl import NixlPlane
from kvhandoff.transport.nixl_agent import NixlAgent, NixlError
from kvhandoff.transport.planes import PlaneOptions, nixl_plane
from kvhandoff.transport.shm import SharedMemoryPlane
from tests.transport.caches import RankCache
from tests.transport.processes import DEADLINE, identity

pytestmark = pytest.mark.skipif(not find_spec("nixl_cu12"), reason="NIXL is not installed")

PEER, OTHER = identity("peer"), identity("other")


@contextmanager
def planes(*names: str) -> Iterator[list[tuple[NixlPlane, RankCache]]]:
    """Planes in this process, each with a cache of four blocks."""
    made = []
    for name in names:
        plane, cache = NixlPlane(name), RankCache(None, 4, "layers first")
        plane.register(cache.region)
        made.append((plane, cache))
    try:
        yield made
    finally:
        for plane, _ in made:
            plane.close()


def ended(plane: NixlPlane, handle: Any) -> TransferState:
    deadline = time.monotonic() + DEADLINE
    while (state := plane.poll(handle)) is TransferState.PENDING:
        assert time.monotonic() < deadline, "the transfer does not end"
    return state


def settle(plane: NixlPlane) -> None:
    """Until the first reads of its connections have ended."""
    deadline = time.monotonic() + DEADLINE
    while plane.service_interval is not None:
        assert time.monotonic() < deadline, "a first read does not end"
        plane.service()


def test_an_agent_of_any_name_serves_a_peer() -> None:
    with planes("a worker", "b/0/5f") as [(mine, here), (theirs, there)]:
        mine.connect(PEER, theirs.metadata())
        there.fill(1)
        here.fill(2)
        assert ended(mine, mine.post("read", PEER, [(0, 2, 2)])) is TransferState.DONE
        assert here.content() == here.expected(2, 1, [(0, 2, 2)])


def test_one_agent_serves_one_peer() -> None:
    with planes("a", "b") as [(mine, _), (theirs, _)]:
        mine.connect(PEER, theirs.metadata())
        with pytest.raises(TransportError, match="connect other@0: agent b is connected as peer@0"):
            mine.connect(OTHER, theirs.metadata())
        mine.disconnect(PEER)
        settle(mine)
        mine.connect(OTHER, theirs.metadata())


def test_a_connection_is_for_these_parts_and_these_metadata() -> None:
    with planes("a", "b", "c") as [(mine, _), (theirs, _), (third, _)]:
        mine.connect(PEER, theirs.metadata(), Part(0, 1, 2), Part(1, 1, 2))
        mine.connect(PEER, theirs.metadata(), Part(0, 1, 2), Part(1, 1, 2))
        for metadata, parts in (
            (theirs.metadata(), (WHOLE, WHOLE)),
            (third.metadata(), (Part(0, 1, 2),) * 2),
        ):
            with pytest.raises(TransportError, match="connected with other metadata, or other parts"):
                mine.connect(PEER, metadata, *parts)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((Part(0, 1, 2), Part(0, 1, 4)), "connect peer@0: blocks have 72 bytes here, 36 bytes there"),
        ((Part(0, 1, 5), Part(0, 1, 5)), "a piece of 48 bytes can't be divided into 5 equal parts"),
    ],
)
def test_parts_that_do_not_fit(parts: tuple[Part, Part], words: str) -> None:
    with planes("a", "b") as [(mine, _), (theirs, _)]:
        with pytest.raises(TransportError, match=words):
            mine.connect(PEER, theirs.metadata(), *parts)
        mine.connect(PEER, theirs.metadata())


def test_memory_that_is_no_gpus_can_not_be_registered_as_such() -> None:
    plane, cache = NixlPlane("a"), RankCache(None, 4, "layers first")
    region = dataclasses.replace(cache.region, memory=MemoryKind.VRAM)
    with pytest.raises(TransportError, match="4 blocks of 144 bytes can't be registered"):
        plane.register(region)
    with pytest.raises(TransportError, match="no region is registered"):
        plane.metadata()
    plane.close()


def test_an_error_that_is_no_fence_leaves_the_transfer_in_flight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As LIBFABRIC's of a start: what it had handed to the network before still lands."""
    with planes("a", "b") as [(mine, _), (theirs, _)]:
        mine.connect(PEER, theirs.metadata())
        settle(mine)
        with monkeypatch.context() as patch:

            def start(agent: NixlAgent, transfer: int) -> bool:
                raise NixlError("NIXL_ERR_BACKEND", fence=False)

            patch.setattr(NixlAgent, "start", start)
            handle = mine.post("read", PEER, [(0, 0, 4)])
        assert mine.poll(handle) is TransferState.PENDING
        mine.disconnect(PEER)
        assert mine.poll(handle) is TransferState.PENDING
        assert "failed with bytes under way: NIXL_ERR_BACKEND" in caplog.text
        with pytest.raises(TransportError, match="1 transfers are in flight"):
            mine.drain(time.monotonic())
        mine._in_flight.clear()  # nothing is, really


@pytest.mark.parametrize(("backend", "fence"), [("UCX", True), ("LIBFABRIC", False)])
def test_only_a_failed_start_of_ucx_is_over(
    monkeypatch: pytest.MonkeyPatch, backend: str, fence: bool
) -> None:
    agent = NixlAgent("a")
    monkeypatch.setattr(agent, "_failed_start_is_over", backend == "UCX")
    with pytest.raises(NixlError) as refused:
        agent.start(0)
    assert refused.value.fence is fence


def test_a_backend_that_does_not_load_is_named_with_those_that_do() -> None:
    try:
        agent = NixlAgent("a", backend="LIBFABRIC")
    except ConfigError as error:
        assert "NIXL's LIBFABRIC backend can't be started (NIXL_ERR_NOT_FOUND)" in str(error)  # noqa: PT017
        assert str(error).endswith("backends that load here: UCX")  # noqa: PT017
    else:
        assert agent.metadata()


def test_options_reach_the_backend() -> None:
    with pytest.raises(ConfigError, match=r"UCX backend can't be started with \{'num_workers': 'some'\}"):
        nixl_plane("a", PlaneOptions(options={"num_workers": "some"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "TCP"}, "backend: got 'TCP', allowed is UCX or LIBFABRIC"),
        ({"lanes": 0}, "lanes: got 0, allowed is 1 to 16"),
        ({"lanes": 17}, "lanes: got 17, allowed is 1 to 16"),
        ({"options": {"num_threads": "4"}}, "options: num_threads is not allowed"),
        ({"options": {"num_workers": 4}}, "options: got 'num_workers': 4, allowed are strings"),
    ],
)
def test_options_that_can_not_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlaneOptions(**options)


def test_shared_memory_moves_no_memory_of_other_engines() -> None:
    cache = RankCache(None, 4, "layers first")
    words = "shm moves blocks of a SharedRegion, which peers can map, not of a ForeignRegion; memory that"
    with pytest.raises(TransportError, match=words):
        SharedMemoryPlane().register(cache.region)
