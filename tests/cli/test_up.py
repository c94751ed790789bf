"""`kvhandoff up` as a user runs it: processes, their deaths, and their end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.callers import bearer, security
from tests.tinymodels import cached_tiny_model

pytestmark = pytest.mark.processes
PROMPT = "The quick brown fox jumps over the lazy dog."


def children(pid: int) -> dict[str, int]:
    """Name → process id of what a supervisor has started (`prefill-0`, `decode-0`, `router`)."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError, IndexError):
            continue  # no process, or one that has just ended
        if parent == pid and "kvhandoff" in words:
            name = words[words.index("--engine-id") + 1] if "--engine-id" in words else "router"
            found[name] = int(entry.name)
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Up:
    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)
    url: str = ""

    async def said(self, pattern: str, within: float = 60.0) -> re.Match[str]:
        """Wait until a line matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(within):
            while True:
                for line in self.log:
                    if match := re.search(pattern, line):
                        self.log.remove(line)
                        return match
                raw = await self.process.stderr.readline()
                assert raw, f"ended without saying {pattern}: {self.log}"
                self.log.append(raw.decode())


@asynccontextmanager
async def up(*arguments: str, **environment: str) -> AsyncIterator[Up]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "up", "--port", "0", "--kv-memory", "0.05", "--threads", "1"),
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    running = Up(process)
    try:
        running.url = (await running.said(r"^router +(http://\S+)"))[1]
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, **headers: str
) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    async with session.post(
        f"{url}/v1/completions", json=body, headers={"x-kvhandoff-path": "pull", **headers}
    ) as answer:
        return answer.status, await answer.json()


async def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  other processes have no event
            await asyncio.sleep(0.02)


async def test_up_serves_restarts_and_ends() -> None:
    model = str(cached_tiny_model("llama"))
    async with up("--model", model) as running, aiohttp.ClientSession() as session:
        pids = children(running.process.pid)
        assert set(pids) == {"prefill-0", "decode-0", "router"}
        status, first = await ask(session, running.url, model)
        assert status == 200
        async with session.get(f"{running.url}/v1/handoffs/{first['id']}") as answer:
            record = await answer.json()
        assert (record["path"], record["kv_source"]) == ("pull", "transferred")
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"], abs=0.001)

        for role in ("prefill-0", "decode-0"):
            os.kill(children(running.process.pid)[role], signal.SIGKILL)
            await running.said(f"{role} serves again")

            async with asyncio.timeout(60):
                status, again = await ask(session, running.url, model)
                while status != 200:  # the router has not seen the new life yet
                    await asyncio.sleep(0.05)
                    status, again = await ask(session, running.url, model)
            assert again["choices"][0]["text"] == first["choices"][0]["text"]

        pids = children(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        await until(lambda: not any(map(alive, pids.values())))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_is_ended_while_it_starts(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "up", "--port", "0", "--model", str(cached_tiny_model("llama"))),
        stderr=asyncio.subprocess.PIPE,
    )
    await until(lambda: len(children(process.pid)) == 2)
    pids = children(process.pid)
    process.send_signal(number)
    _, said = await process.communicate()
    assert (process.returncode, "Traceback" in said.decode()) == (0, False), said.decode()
    await until(lambda: not any(map(alive, pids.values())))


async def test_a_killed_supervisor_leaves_nothing_behind() -> None:
    misspelled = {"UCX_NET_DEVICE": "lo"}  # of which UCX warns on standard output
    arguments = ("--model", str(cached_tiny_model("llama")), "--prefill", "0")
    async with up(*arguments, **misspelled) as running:
        pids = children(running.process.pid)
        assert set(pids) == {"decode-0", "router"}
        running.process.kill()
        await running.process.wait()
        await until(lambda: not any(map(alive, pids.values())))


async def test_engines_without_a_prefix_cache() -> None:
    model = str(cached_tiny_model("llama"))
    arguments = ("--model", model, "--prefill", "0", "--no-prefix-cache")
    async with up(*arguments) as running, aiohttp.ClientSession() as session:
        for _ in range(2):
            status, answer = await ask(session, running.url, model)
            assert status == 200
            details = answer["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == 0  # by default, the second time finds the first one's blocks


async def test_tenants(tmp_path: Path) -> None:
    """The router asks for their keys; the one it is tried with is not in what is printed."""
    model, file = str(cached_tiny_model("llama")), security(tmp_path, {"models": ["other"]}).tenants
    arguments = ("--model", model, "--prefill", "0", "--tenants", str(file))
    async with up(*arguments) as running, aiohttp.ClientSession() as session:
        await running.said(r"^curl .* -H 'Authorization: Bearer KEY' ")
        assert (await ask(session, running.url, model))[0] == 401
        assert (await ask(session, running.url, model, **bearer("acme")))[0] == 403
        assert (await ask(session, running.url, model, **bearer("beta")))[0] == 200


async def test_a_bad_file_of_tenants_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "tenants").write_text("tenants: 7")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", "up", "--port", "0", "--model", "nowhere/at-all"),
        *("--tenants", str(tmp_path / "tenants")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"tenants: " in said
    assert b"tenants: got 7, allowed is an array" in said
