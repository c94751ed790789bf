"""Memory of the data planes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.planes import allocate_region, create_plane, default_kind
from kvhandoff.transport.region import HUGE_PAGE, PrivateRegion, SharedRegion
from tests.transport.processes import identity

KINDS = [SharedRegion, PrivateRegion]


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_its_blocks_and_zero(kind: type[SharedRegion] | type[PrivateRegion]) -> None:
    region = kind.allocate(7, 1000)
    assert (region.num_blocks, region.block_bytes, len(region.buffer)) == (7, 1000, 7000)
    assert not any(region.buffer)
    region.buffer[6999] = 5
    assert np.frombuffer(region.buffer, np.uint8).ctypes.data == region.address
    region.close()
    region.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_under_a_view_leaves_the_view_intact(
    kind: type[SharedRegion] | type[PrivateRegion],
) -> None:
    region = kind.allocate(4, 4096)
    view = np.frombuffer(region.buffer, np.uint8)
    view[:] = 9
    region.close()
    assert int(view.sum()) == 9 * 4 * 4096


def test_a_private_region_starts_on_a_huge_page() -> None:
    region = PrivateRegion.allocate(3, 5000)
    assert region.address % HUGE_PAGE == 0
    region.close()


def test_nobody_can_shrink_a_shared_region_under_its_peers() -> None:
    region = SharedRegion.allocate(4, 4096)
    for size in (0, 4096, 5 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    region.close()


def test_a_killed_process_leaves_no_shared_memory_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    script = (
        "import os, signal\n"
        "from kvhandoff.transport.region import SharedRegion\n"
        "SharedRegion.allocate(16, 4096).buffer[0] = 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=30).returncode == -9
    left = [path.name for path in set(Path("/dev/shm").iterdir()) - before if "kvhandoff" in path.name]
    assert left == []


@pytest.mark.parametrize("kind", ["shm", "nixl"])
@pytest.mark.parametrize(
    ("blocks", "size", "words"),
    [
        (0, 4096, "num_blocks is 0, allowed is 1 or more"),
        (4, -1, "block_bytes is -1, allowed is 1 or more"),
        (2**40, 2**20, "memory available is"),
    ],
)
def test_impossible_sizes_are_refused(kind: str, blocks: int, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        allocate_region(kind, blocks, size)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ConfigError, match="transport: got 'tcp', allowed is nixl or shm"):
        allocate_region("tcp", 1, 1)
    with pytest.raises(ConfigError, match="transport: got 'tcp', allowed is nixl or shm"):
        create_plane("tcp", identity("me"))
    assert default_kind() in ("nixl", "shm")


def test_nixl_without_its_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(ConfigError, match=r"install kvhandoff\[nixl\] or use shm"):
        create_plane("nixl", identity("me"))
