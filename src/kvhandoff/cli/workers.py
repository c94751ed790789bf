"""`kvhandoff router --workers N`: processes that share one port, and the parent that keeps them running.

The parent serves nothing. It holds the port, bound but not listening, so that no other program gets it while
a worker is being started again, and a folder with the workers' side doors (`router/worker.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kvhandoff.cli.announce import Announce
from kvhandoff.cli.children import STOP_S, Child, ChildFailed, keep_running, keep_until
from kvhandoff.cli.common import stop_event
from kvhandoff.cli.doors import doors_folder
from kvhandoff.cli.watch import kill_when_hung
from kvhandoff.core.errors import ConfigError
from kvhandoff.web import cannot_listen

log = logging.getLogger(__name__)


def worker_arguments(given: Sequence[str], index: int, count: int, port: int, doors: Path) -> list[str]:
    """The command line of one worker: the parent's, and what is its own, of which the last one holds."""
    own = ["--port", str(port), "--workers", str(count), "--worker", str(index), "--doors", str(doors)]
    return [*given, *own]


async def run_workers(
    count: int, host: str, port: int, announce: Announce, *, shutdown_s: float, lifeline: bool
) -> None:
    """Run `count` workers with this process's own command line until told to end; one that ends or
    hangs is started again. Announces where they serve, as a single router does.

    Raises ConfigError when the port can't be had, or a worker says that it can't start.
    """
    stop = stop_event(lifeline=lifeline)
    given = [argument for argument in sys.argv[1:] if argument != "--lifeline"]
    with doors_folder() as doors, _hold(host, port) as held:
        port = held.getsockname()[1]
        workers = [
            Child(
                f"worker {i}",
                worker_arguments(given, i, count, port, doors),
                dict(os.environ),
                port=port,
                stop_s=shutdown_s + STOP_S,
            )
            for i in range(count)
        ]
        await _keep(workers, doors, announce, stop)


async def _keep(workers: Sequence[Child], doors: Path, announce: Announce, stop: asyncio.Event) -> None:
    from kvhandoff.router.worker import side_door

    try:
        starting = asyncio.gather(*(worker.start() for worker in workers))
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: starting.cancel())
        try:
            facts = (await starting)[0]
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
            return  # told to end before all served
        finally:
            stopping.cancel()
        announce(facts)
        log.info("%d workers at %s", len(workers), facts["url"])
        keeping = [keep_running(worker, log.warning) for worker in workers]
        keeping += [kill_when_hung(worker, side_door(doors, i)) for i, worker in enumerate(workers)]
        await keep_until(stop, keeping)
    except ChildFailed as error:
        raise ConfigError(f"workers: {error}") from error
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


def _hold(host: str, port: int) -> socket.socket:
    """A socket that has the port, and leaves room for the workers' own. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except OSError:
            held.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return held
