"""Whether an engine has died, and what its output says of it.

vLLM's API server ends by itself when the engine behind it does: it answers what it has taken with HTTP 500,
and `/health` with 503, as long as it listens at all. Why, only its output says.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp

from benchmarks.vllm_engines import Running

HEALTH_S = 10.0
TRACEBACK = "Traceback (most recent call last):"

_PROCESS = re.compile(r"\(\S+ pid=\d+\) ")
_STAMP = re.compile(r"[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] ")
_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+), in ')


async def is_dead(engine: Running, session: aiohttp.ClientSession) -> bool:
    """Whether it has ended, or says that it will. One that doesn't answer at all hangs: it is not dead."""
    try:
        async with asyncio.timeout(HEALTH_S), session.get(f"{engine.url}/health") as answer:
            return answer.status != 200
    except TimeoutError:
        return False
    except aiohttp.ClientError:
        return True


def cause_of_death(log: Path, since: int) -> str:
    """The first exception in an engine's output, with the line that raised it; what follows it are only its
    consequences. Without any, the last line.

    :param since: bytes of the output that are of before.
    """
    lines = log.read_bytes()[since:].decode(errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.endswith(TRACEBACK)), None)
    if start is None:
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        return f"no exception in its output, which ends with: {last}"
    return _raised(_of_the_same_process(lines[start:]))


def _of_the_same_process(lines: list[str]) -> list[str]:
    """Without what other processes of the engine have written in between, and without whose line it is."""
    process = _PROCESS.match(lines[0])
    own = process[0] if process else ""
    return [_STAMP.sub("", line.removeprefix(own), count=1) for line in lines if line.startswith(own)]


def _raised(traceback: list[str]) -> str:
    """`AssertionError at worker.py:12: assert few <= many`: the exception and where the last frame stands."""
    where = ""
    for number, line in enumerate(traceback[1:], 1):
        if frame := _FRAME.match(line):
            source = traceback[number + 1].strip() if number + 1 < len(traceback) else ""
            where = f" at {Path(frame['path']).name}:{frame['line']}: {source}"
        elif line and not line.startswith(" "):
            return f"{line}{where}"
    return f"an exception{where}"
