"""Whether all of a peer's processes have ended, for certain: the operating system of their host says so.

A broken connection or a timeout proves nothing, since bytes of a transfer may still land. The end of every
process that could write them does; the end of one of several does not. It can be watched from the same host
and PID namespace; elsewhere nobody tells, and `Watcher` watches nothing."""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections.abc import Callable, Collection
from pathlib import Path

from kvhandoff.core.ids import Identity

_NAME = re.compile(r"(.+)/([1-9][0-9]{0,8})/([0-9]+)", re.ASCII)
"""Host, process id, start time; see `this_process`."""


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
        self._watched: dict[Identity, set[int]] = {}
        """Life → a pidfd for each of its processes that has not ended, which names that one for good."""

    def watch(self, peer: Identity, processes: Collection[str]) -> None:
        """Tell when the last of `processes`, all that the peer has by its own names for them, has ended; at
        once if all have. Nothing is told if there are none, or if one of them lives elsewhere or can't be
        watched: it could outlive the others. Again is a no-op."""
        if peer in self._watched or not processes:
            return
        living = _open_living(processes)
        if living is None:
            return
        if not living:
            self._on_end(peer)
            return
        self._watched[peer] = living
        for pidfd in living:
            asyncio.get_running_loop().add_reader(pidfd, self._ended, peer, pidfd)

    def close(self) -> None:
        """Watch no more."""
        for pidfds in self._watched.values():
            for pidfd in pidfds:
                _forget(pidfd)
        self._watched.clear()

    def _ended(self, peer: Identity, pidfd: int) -> None:
        """One of them has; of several, the others may still write."""
        _forget(pidfd)
        self._watched[peer].remove(pidfd)
        if not self._watched[peer]:
            del self._watched[peer]
            self._on_end(peer)


def _forget(pidfd: int) -> None:
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


def _open_living(processes: Collection[str]) -> set[int] | None:
    """A pidfd for each that has not ended. None if it can't be known of one whether it has."""
    here, distinct = _host_or_none(), set(processes)
    names = [name for process in distinct if (name := _NAME.fullmatch(process)) and name[1] == here]
    if len(names) < len(distinct):
        return None
    living: set[int] = set()
    try:
        for name in names:
            pidfd = _open(int(name[2]), started=name[3])
            if pidfd is not None:
                living.add(pidfd)
    except OSError:
        for pidfd in living:
            os.close(pidfd)
        return None
    return living


def _open(pid: int, *, started: str) -> int | None:
    """A pidfd of the process that has this number since then; None if it has ended. Raises OSError when the
    operating system does not say."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        lives = _started(pid) == started  # else a later process has its number
    except OSError:  # the process has ended meanwhile, or its entry can't be read
        if not _has_ended(pidfd):
            os.close(pidfd)
            raise
        lives = False
    if lives:
        return pidfd
    os.close(pidfd)
    return None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; two processes of one number differ in it. Raises
    OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _host_or_none() -> str | None:
    try:
        return host()
    except OSError:
        return None
