"""A cache in host memory is all there, unchanged, before the first transfer into it."""

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhandoff.vllm.host_memory import make_ready

SIZE = 8 << 20


@pytest.fixture
def promised() -> Iterator[tuple[mmap.mmap, int]]:
    """Memory that no page of is there yet, and its address."""
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        yield memory, ctypes.addressof(view)
        del view


def resident(address: int) -> int:
    """Bytes that are there, of the mapping that begins at or before an address and holds it."""
    held = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(part, 16) for part in found.groups())
            inside = start <= address < end
        elif inside and line.startswith("Rss:"):
            held = int(line.split()[1]) << 10
    return held


def test_all_pages_are_there_and_keep_their_bytes(promised: tuple[mmap.mmap, int]) -> None:
    memory, address = promised
    memory[:5] = b"bytes"
    before = resident(address)

    assert make_ready([(address, SIZE)])

    assert before <= SIZE // 2
    assert resident(address) >= SIZE
    assert memory[:5] == b"bytes"
    assert not any(memory[5:])


def test_a_range_may_begin_within_a_page(promised: tuple[mmap.mmap, int]) -> None:
    _, address = promised

    assert make_ready([(address + 100, SIZE - 100)])

    assert resident(address) >= SIZE


def test_memory_that_the_kernel_refuses_is_logged_and_left(
    promised: tuple[mmap.mmap, int], caplog: pytest.LogCaptureFixture
) -> None:
    _, address = promised
    caplog.set_level("INFO")

    assert not make_ready([(0, mmap.PAGESIZE), (address, SIZE)])

    assert "madvise" in caplog.text
    assert resident(address) >= SIZE, "what can be made ready is"
