"""The processes that `kvhandoff up` and `kvhandoff router --workers` keep running."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.errors import ConfigError, KVHandoffError, describe, excerpt

STOP_S = 10.0
"""A child that hasn't ended this long after SIGTERM is killed, unless it may take longer."""


SHORT_LIFE_S = 10.0
"""A child that was started again and ends this soon after it had come up would be started without end."""


class ChildFailed(KVHandoffError):
    """A child could not be started, or has ended before it served, or says nothing that can be read."""


@dataclass(slots=True)
class Child:
    """One process: `python -m kvhandoff NAME ...`, which prints a line of JSON when it serves.

    Its standard input is a lifeline: it ends when this process does, however that happens.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str]
    port: int = 0
    """0 until the child has chosen one; it is given the same one when it is started again."""
    stop_s: float = STOP_S
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    served: bool = field(default=False, repr=False)
    """Whether `process` has said that it serves."""

    @property
    def serves(self) -> bool:
        """Whether it runs and has come up; it may hang."""
        return self.served and self.process is not None and self.process.returncode is None

    async def start(self) -> dict[str, str]:
        """Start it and wait until it serves; returns what it printed.

        Raises ConfigError when it ended with exit code 2 (it said why on standard error), ChildFailed else.
        """
        name, *arguments = self.arguments
        ours = [name, "--port", str(self.port), "--lifeline"]
        command = [sys.executable, "-m", "kvhandoff", *ours, *arguments]
        self.served = False
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,  # closed by the child after its line: see `take_stdout`
                env=self.environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends them in order
            )
        except OSError as error:  # no process or file is left, or Python is just being replaced
            raise ChildFailed(f"{self.name} could not be started: {describe(error)}") from error
        facts = await self._announced(self.process)
        self.served = True
        return facts

    async def _announced(self, process: asyncio.subprocess.Process) -> dict[str, str]:
        assert process.stdout is not None
        line = b""
        try:
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                if code == 2:
                    raise ConfigError(f"{self.name} could not start; its message is above")
                raise ChildFailed(f"{self.name} ended ({_how(code)}) before it served")
            facts = msgspec.json.decode(line, type=dict[str, str])
            self.port = int(facts["url"].rsplit(":", 1)[1])
        except (msgspec.DecodeError, LookupError, ValueError) as error:  # the last: of a line without an end
            self.kill()
            await process.wait()
            said = excerpt(line.decode(errors="replace")) if line else "a line that is too long"
            raise ChildFailed(f"{self.name} said {said}, allowed is JSON with its url") from error
        return facts

    async def ended(self) -> int:
        """Wait for its end; returns the exit code (negative: the signal that killed it)."""
        assert self.process is not None
        return await self.process.wait()

    def kill(self) -> None:
        """End it at once, in whatever state it is."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def stop(self) -> None:
        """End it; kill it if it doesn't."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(self.stop_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def keep_running(
    child: Child, say: Callable[[str], None], *, first_pause: float = 0.5, clock: Clock = monotonic
) -> None:
    """Start `child` again whenever it ends, until cancelled. What comes to nothing, a start that fails or a
    life that ends within `SHORT_LIFE_S`, is repeated with growing pauses."""
    pause, served_at = first_pause, float("-inf")
    while True:
        how = _how(await child.ended())
        lived = clock() - served_at
        if lived >= SHORT_LIFE_S:
            pause, problem = first_pause, None
            say(f"{child.name} ended ({how}); it is started again")
        else:
            problem = f"{child.name} ended ({how}) {lived:.1f} s after it had come up"
        while True:
            if problem is not None:
                say(f"{problem}; next try in {pause:.1f} s")
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
            try:
                await child.start()
                break
            except (ChildFailed, ConfigError) as error:
                problem = str(error)
        served_at = clock()
        say(f"{child.name} serves again at port {child.port}")


async def keep_until(stop: asyncio.Event, keeping: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of `keeping` until `stop`. None of it ends by itself: an error in one is raised, since nobody
    would keep that child any more."""
    stopped = asyncio.create_task(stop.wait())
    keepers = [asyncio.create_task(each) for each in keeping]
    try:
        done, _ = await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (stopped, *keepers):
            task.cancel()
        await asyncio.gather(stopped, *keepers, return_exceptions=True)


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
