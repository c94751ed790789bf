"""The processes that `kvhandoff up` keeps running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhandoff.core.errors import ConfigError, KVHandoffError

STOP_S = 10.0
"""A child that hasn't ended this long after SIGTERM is killed, unless it may take longer."""


class ChildFailed(KVHandoffError):
    """A child ended before it served."""


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
        self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends them in order
        )
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            code = await self.process.wait()
            if code == 2:
                raise ConfigError(f"{self.name} could not start; its message is above")
            raise ChildFailed(f"{self.name} ended with exit code {code} before it served")
        facts: dict[str, str] = json.loads(line)
        self.port = int(facts["url"].rsplit(":", 1)[1])
        self.served = True
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


async def keep_running(child: Child, say: Callable[[str], None], *, first_pause: float = 0.5) -> None:
    """Start `child` again whenever it ends, with growing pauses; until cancelled."""
    pause = first_pause
    while True:
        code = await child.ended()
        say(f"{child.name} ended ({_how(code)}); it is started again")
        while True:
            try:
                await child.start()
                break
            except (ChildFailed, ConfigError) as error:
                say(f"{error}; next try in {pause:.1f} s")
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
        pause = first_pause
        say(f"{child.name} serves again at port {child.port}")


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
