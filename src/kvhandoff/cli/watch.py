"""Whether a worker that runs still does anything: one that hangs keeps its part of the port's connections."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp

from kvhandoff.cli.children import Child

log = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
"""Between two questions to a worker."""
ANSWER_S = 5.0
"""A worker whose event loop is never held up for long has answered by then."""
MISSES = 3
"""Questions in a row without an answer, after which it is killed."""


async def kill_when_hung(worker: Child, door: Path) -> None:
    """Ask `worker` at its side door whenever it serves, and kill it once it does not answer, so that whoever
    keeps it running starts it again; until cancelled."""
    process, missed = None, 0
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        if not worker.serves or worker.process is not process:  # it starts, or is another life
            process, missed = worker.process, 0
            continue
        missed = 0 if await answers(door) else missed + 1
        if missed >= MISSES and worker.serves and worker.process is process:
            log.warning("%s gave no answer %d times in a row; it is killed", worker.name, missed)
            worker.kill()


async def answers(door: Path) -> bool:
    """Whether it does not hang. A connection for each question: an old one may be of another life."""
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(door))) as session,
            session.get("http://worker/health", allow_redirects=False),
        ):
            return True
    except aiohttp.ClientConnectorError as error:  # nobody listens any more: it is ending, by itself
        return isinstance(error.os_error, ConnectionRefusedError | FileNotFoundError)
    except (aiohttp.ClientError, OSError):  # which a timeout is, too
        return False
