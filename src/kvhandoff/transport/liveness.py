"""Whether a peer's process has ended, for certain: the operating system of its host says so.

A broken connection or a timeout proves nothing, since bytes of a transfer may still land. The end of the
process does. It can be watched from the same host and PID namespace; elsewhere nobody tells, and `Watcher`
watches nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from kvhandoff.core.ids import Identity


def host() -> str:
    """Names this boot of this host and the PID namespace: where a process id means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def this_process() -> str:
    """A name of this process that `Watcher` understands. Empty where the platform has none."""
    try:
        return f"{host()}/{os.getpid()}/{_started(os.getpid())}"
    except OSError:
        return ""


class Watcher:
    """Watches processes of this host on the event loop's thread."""

    def __init__(self, on_end: Callable[[Identity], None]) -> None:
        """`on_end` is called once for each watched life, on the loop's thread."""
        self._on_end = on_end
        self._watched: dict[Identity, int] = {}
        """Life → pidfd, which names that one process for good."""

    def watch(self, peer: Identity, process: str) -> None:
        """Tell when `process`, the peer's name for its own, ends; at once if it has. Nothing is told of one
        that lives elsewhere. Again is a no-op."""
        here, _, rest = process.rpartition("/")[0].rpartition("/")
        started = process.rpartition("/")[2]
        if peer in self._watched or not rest.isdigit() or here != _host_or_none():
            return
        try:
            pidfd = os.pidfd_open(int(rest))
        except ProcessLookupError:
            self._on_end(peer)
            return
        except OSError:
            return
        try:
            same = _started(int(rest)) == started
        except OSError:
            same = False
        if not same:  # a later process has its number
            os.close(pidfd)
            self._on_end(peer)
            return
        self._watched[peer] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, peer)

    def close(self) -> None:
        """Watch no more."""
        for peer in list(self._watched):
            self._forget(peer)

    def _ended(self, peer: Identity) -> None:
        self._forget(peer)
        self._on_end(peer)

    def _forget(self, peer: Identity) -> None:
        pidfd = self._watched.pop(peer)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; two processes of one number differ in it. Raises
    OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _host_or_none() -> str | None:
    try:
        return host()
    except OSError:
        return None
