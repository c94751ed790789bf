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

from kvhandoff.cli import watch
from kvhandoff.cli.children import Child
from kvhandoff.cli.workers import run_workers, worker_arguments
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


@pytest.mark.processes
async def test_a_worker_that_hangs_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(watch, "ANSWER_S", 2.0)
    arguments = ["router", "--workers", "2", "--return", "off", "--decode", "http://127.0.0.1:1"]
    monkeypatch.setattr(sys, "argv", ["kvhandoff", *arguments])
    monkeypatch.setenv("KVHANDOFF_CLUSTER_KEY", CLUSTER_KEY.decode())
    before = psutil.Process().children()
    announced: list[object] = []

    def workers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before]

    caplog.set_level("INFO", "kvhandoff")
    parent = asyncio.create_task(
        run_workers(2, "127.0.0.1", 0, announced.append, shutdown_s=0.0, lifeline=False)
    )
    try:
        await until(lambda: any("2 workers at" in message for message in caplog.messages))
        hung, other = workers()
        assert [list(facts) for facts in announced] == [["url"]]
        hung.send_signal(signal.SIGSTOP)
        await until(lambda: any("serves again" in message for message in caplog.messages))
        assert not alive(hung.pid)
        assert other in workers()
        assert len(workers()) == 2
    finally:
        parent.cancel()
        await asyncio.gather(parent, return_exceptions=True)


@pytest.mark.parametrize(("answers", "killed"), [("--+--+--+", False), ("+--+---", True)])
async def test_a_worker_hangs_when_it_misses_several_times_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str, killed: bool
) -> None:
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.0)
    asked, left = asyncio.Event(), list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not left:
            asked.set()
        if not left or left.pop(0) == "+":  # a worker that serves nobody now is none that hangs
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b"nothing\r\n\r\n")
        writer.close()

    sleeper = await asyncio.create_subprocess_exec("sleep", "600")
    worker = Child("worker 0", [], {}, process=sleeper, served=True)
    async with await asyncio.start_unix_server(answer, tmp_path / "0.sock"):
        watching = asyncio.create_task(watch.kill_when_hung(worker, tmp_path / "0.sock"))
        try:
            async with asyncio.timeout(DEADLINE_S):
                if killed:
                    assert await worker.ended() == -signal.SIGKILL
                    assert not left
                else:
                    await asked.wait()
                    assert worker.serves
        finally:
            watching.cancel()
            worker.kill()
            await worker.ended()


async def test_a_worker_that_is_ending_does_not_hang(tmp_path: Path) -> None:
    """It has closed its door, and still has requests under way."""
    door = tmp_path / "0.sock"
    async with await asyncio.start_unix_server(lambda *_: None, door):
        pass
    assert await watch.answers(door)  # refused
    door.unlink(missing_ok=True)
    assert await watch.answers(door)  # gone
