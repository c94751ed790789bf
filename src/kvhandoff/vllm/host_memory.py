"""Makes a cache in host memory ready: in huge pages where the kernel has them, and all of it really there.

vLLM's CPU cache is memory that the kernel has promised only. So the first transfer into a block waits for its
pages: 22,000 small ones for 90 MB, which takes about as long as moving the bytes. (Linux; `madvise(2)`.)
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable

log = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, Linux 5.14; it changes no byte. Python's mmap module doesn't name it."""


def make_ready(ranges: Iterable[tuple[int, int]]) -> bool:
    """Ask for huge pages, then for all pages, of (address, bytes). Contents stay as they are.

    Memory works without either, only slower at first: what the kernel refuses is logged. Returns whether it
    refused nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page, ready = mmap.PAGESIZE, True
    for address, size in ranges:
        first, end = address // page * page, address + size
        for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) != 0:
                why = os.strerror(ctypes.get_errno())
                log.info("the cache's pages come when they are first used: madvise %d: %s", advice, why)
                ready = False
    return ready
