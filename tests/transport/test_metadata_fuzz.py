"""Metadata from the wire, damaged in any way: refused with TransportError, and the plane goes on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhandoff.transport.api import DataPlane, TransferState, TransportError
from kvhandoff.transport.planes import allocate_region, create_plane
from kvhandoff.transport.region import PrivateRegion, SharedRegion
from tests.transport.processes import block_of, identity

ME, PEER = identity("me"), identity("peer")
SIZE = 4096
FUZZ = settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Planes:
    """Two planes in this process."""

    def __init__(self, kind: str) -> None:
        self.regions: list[SharedRegion | PrivateRegion] = [allocate_region(kind, 4, SIZE) for _ in range(2)]
        self.mine, self.theirs = create_plane(kind, ME), create_plane(kind, PEER)
        self.mine.register(self.regions[0])
        self.theirs.register(self.regions[1])

    def close(self) -> None:
        for plane, region in zip((self.mine, self.theirs), self.regions, strict=True):
            plane.close()
            region.close()


@pytest.fixture(scope="module", params=["shm", "nixl"])
def planes(request: pytest.FixtureRequest) -> Iterator[Planes]:
    if request.param == "nixl" and not find_spec("nixl_cu12"):
        pytest.skip("NIXL is not installed")
    made = Planes(request.param)
    yield made
    made.close()


@FUZZ
@given(raw=st.binary(max_size=600))
def test_any_bytes_are_refused(planes: Planes, raw: bytes) -> None:
    with pytest.raises(TransportError, match=r"^connect peer@0: "):
        planes.mine.connect(PEER, raw)


@FUZZ
@given(data=st.data())
def test_damaged_metadata_are_refused(planes: Planes, data: st.DataObject) -> None:
    truth = planes.theirs.metadata()
    at = data.draw(st.integers(0, len(truth) - 1))
    cut = data.draw(st.integers(0, 8))
    insert = data.draw(st.binary(max_size=8))
    damaged = truth[:at] + insert + truth[at + cut :]
    if damaged == truth:
        return
    with pytest.raises(TransportError, match=r"^connect peer@0: "):
        planes.mine.connect(PEER, damaged)


def test_afterwards_the_true_metadata_work(planes: Planes) -> None:
    with pytest.raises(TransportError):
        planes.mine.connect(PEER, planes.theirs.metadata()[:-1])
    planes.regions[1].buffer[:] = b"".join(block_of(2, block, SIZE) for block in range(4))
    planes.mine.connect(PEER, planes.theirs.metadata())
    assert read_all(planes.mine) is TransferState.DONE
    assert planes.regions[0].buffer == planes.regions[1].buffer


def read_all(plane: DataPlane) -> TransferState:
    handle = plane.post("read", PEER, [(0, 0, 4)])
    while (state := plane.poll(handle)) is TransferState.PENDING:
        pass
    return state
