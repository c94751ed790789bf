"""`kvhandoff router --workers N` as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from kvhandoff.cli.workers import worker_arguments
from tests.cli.test_bad_input import run
from tests.cli.test_up import alive, until
from tests.router.engines import CLUSTER_KEY, MockEngine

DEADLINE_S = 60.0


def test_what_a_worker_is_started_with() -> None:
    """The last of an option's values holds."""
    made = worker_arguments(["router", "--workers", "2", "--port", "0"], 1, 2, 8123, Path("/d"))
    assert made[:5] == ["router", "--workers", "2", "--port", "0"]
    assert made[5:] == ["--port", "8123", "--workers", "2", "--worker", "1", "--doors", "/d"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "2"], "workers: got 2 with --index memory, allowed is 1"),
        (["--workers", "2", "--connector", "nixl"], "workers: got 2, allowed with --connector nixl is 1"),
        (
            ["--worker", "0"],
            "worker, doors: got 0 of 1 and no folder, allowed is neither: --workers N starts",
        ),
        (["--doors", "/d"], "worker, doors: got None of 1 and /d, allowed is neither"),
        (["--worker", "2", "--workers", "2", "--doors", "/d"], "worker, doors: got 2 of 2 and /d, allowed"),
    ],
)
def test_bad_flags(arguments: list[str], said: str) -> None:
    done = run("router", "--decode", "http://127.0.0.1:1", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


async def answered(session: aiohttp.ClientSession, url: str) -> int:
    try:
        async with session.get(f"{url}/v1/models", headers={"Connection": "close"}) as response:
            return response.status
    except aiohttp.ClientError:
        return 0


@pytest.mark.processes
async def test_a_worker_that_dies_is_started_again_and_all_end_together() -> None:
    engine = MockEngine("decode", "d")
    await engine.start()
    command = [
        *(sys.executable, "-m", "kvhandoff", "router", "--workers", "2", "--return", "off"),
        *("--port", "0", "--decode", engine.url),
    ]
    environment = {**os.environ, "KVHANDOFF_CLUSTER_KEY": CLUSTER_KEY.decode()}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            assert process.stdout is not None
            url = json.loads(await process.stdout.readline())["url"]
            parent = psutil.Process(process.pid)
            first = parent.children()
            assert len(first) == 2
            for _ in range(20):
                assert await answered(session, url) == 200
            first[0].send_signal(signal.SIGKILL)

            def again() -> list[psutil.Process]:
                return [child for child in parent.children() if child not in first]

            while not again():  # noqa: ASYNC110 - a process that others start
                await asyncio.sleep(0.01)
            streak = 0
            while streak < 30:  # both serve: no connection is refused or reset any more
                streak = streak + 1 if await answered(session, url) == 200 else 0
            everybody = parent.children(recursive=True)
            process.terminate()
            assert await process.wait() == 0
            await until(lambda: not any(alive(child.pid) for child in everybody))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.kill()
