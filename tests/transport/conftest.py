from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.transport.processes import Engine, engines

KINDS = [
    pytest.param(("shm", None), id="shm"),
    pytest.param(("nixl", None), id="nixl"),
    pytest.param(("nixl", "tcp,self"), id="nixl-tcp"),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each data plane; NIXL also without its same-host transports, as between two hosts."""
    kind, transports = request.param
    if kind == "nixl" and not find_spec("nixl_cu12"):
        pytest.skip("NIXL is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if transports:
            patch.setenv("UCX_TLS", transports)  # of the processes started from here on
        yield kind


@pytest.fixture
def engine() -> Iterator[type[Engine]]:
    with engines() as make:
        yield make
