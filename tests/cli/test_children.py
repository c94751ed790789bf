"""What a parent and its children tell each other, and children that can't be started for a while."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvhandoff.cli.children import SHORT_LIFE_S, Child, ChildFailed, keep_running, keep_until
from kvhandoff.core.clock import ManualClock

DEADLINE_S = 30.0

Python = Callable[[str], Path]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Python:
    """Makes a stand-in for Python that says `said` on standard output and lives until its standard input
    ends."""
    path = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(path))

    def make(said: str) -> Path:
        words = tmp_path / f"said-{len(list(tmp_path.iterdir()))}"
        words.write_text(said)
        script = words.with_suffix(".sh")
        script.write_text(f"#!/bin/sh\ncat {words}\nread line\n")
        script.chmod(0o755)
        return script.replace(path)  # at once: a keeper may be about to start it

    return make


@asynccontextmanager
async def child() -> AsyncIterator[Child]:
    made = Child("decode-0", ["engine"], dict(os.environ))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield made
    finally:
        await made.stop()


async def test_a_child_that_serves(python: Python) -> None:
    python('{"url":"http://[::1]:8123","transport":"shm"}\n')
    async with child() as made:
        assert await made.start() == {"url": "http://[::1]:8123", "transport": "shm"}
        assert made.serves
        assert made.port == 8123


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("[1] UCX  WARN  unused environment variable\n", "'[1] UCX  WARN  unused environment variable\\n'"),
        ("[]\n", "'[]\\n'"),
        ("{}\n", "'{}\\n'"),
        ('{"url":"nowhere"}\n', """'{"url":"nowhere"}\\n'"""),
        ("x" * 200_000, "a line that is too long"),
    ],
)
async def test_a_child_that_says_something_else(python: Python, said: str, shown: str) -> None:
    python(said)
    async with child() as made:
        with pytest.raises(ChildFailed) as failed:
            await made.start()
        assert str(failed.value) == f"decode-0 said {shown}, allowed is JSON with its url"
        assert not made.serves
        assert made.process is not None
        assert made.process.returncode == -signal.SIGKILL


async def test_a_child_that_can_not_be_started_for_a_while(python: Python) -> None:
    """As when Python is being replaced, or no process is left: it is tried until it works."""
    path = python('{"url":"http://127.0.0.1:8123"}\n')
    lines: asyncio.Queue[str] = asyncio.Queue()
    async with child() as made:
        await made.start()
        path.unlink()
        clock = ManualClock(100.0)
        keeper = asyncio.create_task(keep_running(made, lines.put_nowait, first_pause=0.1, clock=clock))
        try:
            made.kill()
            assert await lines.get() == "decode-0 ended (killed by signal 9); it is started again"
            for pause in ("0.1", "0.2"):
                line = await lines.get()
                assert line.startswith("decode-0 could not be started: [Errno 2] No such file or directory")
                assert line.endswith(f"; next try in {pause} s")
            python("nothing\n")
            while (line := await lines.get()).startswith("decode-0 could not be started"):
                pass
            assert line.startswith("decode-0 said 'nothing\\n', allowed is JSON with its url; next try in ")
            python('{"url":"http://127.0.0.1:8123"}\n')
            while (line := await lines.get()).startswith("decode-0 said"):
                pass
            assert line == "decode-0 serves again at port 8123"
            assert made.serves
            clock.advance(SHORT_LIFE_S)
            made.kill()  # the pauses begin anew
            path.unlink()
            assert await lines.get() == "decode-0 ended (killed by signal 9); it is started again"
            assert (await lines.get()).endswith("; next try in 0.1 s")
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def test_a_child_that_comes_up_and_ends(python: Python) -> None:
    """At once the first time; not again and again without a pause."""
    python('{"url":"http://127.0.0.1:8123"}\n')
    lines: asyncio.Queue[str] = asyncio.Queue()
    clock = ManualClock(100.0)
    async with child() as made:
        await made.start()
        keeper = asyncio.create_task(keep_running(made, lines.put_nowait, first_pause=0.1, clock=clock))
        try:
            made.kill()
            assert await lines.get() == "decode-0 ended (killed by signal 9); it is started again"
            for pause in ("0.1", "0.2"):
                assert await lines.get() == "decode-0 serves again at port 8123"
                clock.advance(2.0)
                made.kill()
                ended = "decode-0 ended (killed by signal 9) 2.0 s after it had come up"
                assert await lines.get() == f"{ended}; next try in {pause} s"
            assert await lines.get() == "decode-0 serves again at port 8123"
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def test_an_error_of_a_keeper_is_raised() -> None:
    """Nobody would keep its child any more."""
    others: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            others.append("ended")

    async def fails() -> None:
        raise LookupError("not foreseen")

    stop = asyncio.Event()
    with pytest.raises(LookupError, match="not foreseen"):
        await keep_until(stop, [forever(), fails()])
    assert others == ["ended"]
    asyncio.get_running_loop().call_soon(stop.set)
    await keep_until(stop, [forever()])
    assert others == ["ended"] * 2


async def test_only_the_line_is_on_standard_output() -> None:
    code = """
import os, sys
from kvhandoff.cli.announce import take_stdout
print("before")
announce = take_stdout()
os.write(1, b"native ")
print("python", flush=True)
announce({"url": "http://h:1"})
print("after", flush=True)
sys.stdin.read()
"""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            before, line = (await process.stdout.read()).splitlines()  # to its end, while the process lives
            assert process.returncode is None
            assert (before, json.loads(line)) == (b"before", {"url": "http://h:1"})
            process.stdin.close()
            assert await process.stderr.read() == b"native python\nafter\n"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
