"""A real Valkey or Redis server for tests: nothing is kept on disk, and it ends with the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from valkey.asyncio import Valkey
from valkey.exceptions import ValkeyError

from kvhandoff.web import free_port
from tests.router.engines import WAIT_S

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
WHY_NOT = "no valkey-server or redis-server; scripts/index_server.sh installs one where it may"


class ValkeyServer:
    """One server at a fixed port, through all its lives."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self.port = free_port()
        self.folder = folder
        self.password = password
        self._process: asyncio.subprocess.Process | None = None
        self.client = Valkey.from_url(self.url)
        """To look at it, and to change it."""

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        return f"valkey://{user}127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Returns when it serves."""
        assert BINARY is not None, WHY_NOT
        options = {"--port": str(self.port), "--bind": "127.0.0.1", "--dir": str(self.folder)}
        options |= {"--save": "", "--appendonly": "no", "--logfile": str(self.folder / "log")}
        if self.password:
            options["--requirepass"] = self.password
        self._process = await asyncio.create_subprocess_exec(
            BINARY, *(word for option in options.items() for word in option)
        )
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await self.client.ping()
                except (ValkeyError, OSError):
                    await asyncio.sleep(0.01)  # it is starting
                else:
                    return

    async def kill(self) -> None:
        """Its connections are reset."""
        if self._process is None:
            return
        self._process.kill()
        await self._process.wait()
        self._process = None
        await self.client.connection_pool.disconnect()

    def freeze(self) -> None:
        """It answers nothing, and keeps its connections."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def calls(self, command: str) -> int:
        """How often clients have sent it."""
        stats = (await self.client.info("commandstats")).get(f"cmdstat_{command}", {})
        return int(stats.get("calls", 0))


@asynccontextmanager
async def running_server(folder: Path, password: str = "") -> AsyncIterator[ValkeyServer]:
    """A server, until the context ends."""
    server = ValkeyServer(folder, password)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()
        await server.client.aclose()
