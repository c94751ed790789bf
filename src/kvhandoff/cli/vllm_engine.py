"""`kvhandoff vllm-engine`: one engine of vLLM, kept by `kvhandoff up`.

It makes vLLM a child like the others: it prints one line of JSON when both of the engine's servers answer,
and ends the whole of the engine (vLLM's several processes) when it is told to, or when its lifeline breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from kvhandoff.cli.announce import Announce, take_stdout
from kvhandoff.cli.common import MOST_SECONDS, Lifeline, check_port, stop_event
from kvhandoff.cli.engine import Role
from kvhandoff.cli.logs import Format, Level, LogFormat, LogLevel, set_up_logging
from kvhandoff.core.errors import ConfigError, KVHandoffError
from kvhandoff.core.urls import root_url
from kvhandoff.web import free_port

HOST = "127.0.0.1"
END_S = 6.0
"""vLLM gets this long to end by itself; then its processes are killed. Less than `up` waits for this one."""
POLL_S = 0.25

_OURS = ("--host", "--port", "--kv-transfer-config")


class VllmEnded(KVHandoffError):
    """vLLM did not come to serve."""


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """How an engine is started. Raises ConfigError for arguments that can't be given."""

    command: str
    model: str
    model_name: str
    role: str
    engine_id: str
    port: int
    internal_port: int
    """Of the connector's pages for the router."""
    arguments: tuple[str, ...]
    """The user's, for vLLM; they win over what is set here."""

    def __post_init__(self) -> None:
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _OURS:
                raise ConfigError(f"{name}: got it for vLLM, allowed is to leave it to kvhandoff")

    def command_line(self, *, log_level: str) -> list[str]:
        """Raises ConfigError when there is no such command."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            allowed = f"a command as in a shell: {error}"
            raise ConfigError(f"vllm-command: got {self.command!r}, allowed is {allowed}") from error
        found = shutil.which(words[0]) if words else None
        if found is None:
            raise ConfigError(f"vllm-command: got {self.command!r}, allowed is a command that can be run")
        transfer = {
            "kv_connector": "KVHandoffConnector",
            "kv_role": "kv_both",
            "kv_port": self.internal_port,
            "engine_id": self.engine_id,
            "kv_connector_extra_config": {"role": self.role},
        }
        return [
            *(found, *words[1:], "serve", self.model, "--served-model-name", self.model_name),
            *("--uvicorn-log-level", log_level),
            *self.arguments,
            *("--host", HOST, "--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)),
        ]


def vllm_engine(
    context: typer.Context,
    model: str = typer.Option(...),
    model_name: str = typer.Option(...),
    role: Role = typer.Option(...),
    engine_id: str = typer.Option(...),
    port: int = typer.Option(0, min=0, max=65535),
    internal_port: int = typer.Option(..., min=1, max=65535),
    vllm_command: str = typer.Option("vllm"),
    start_timeout: float = typer.Option(
        900.0, min=1.0, max=MOST_SECONDS, help="Seconds until it must serve."
    ),
    log_level: Level = LogLevel,
    log_format: Format = LogFormat,
    lifeline: bool = Lifeline,
) -> None:
    """Run one engine of vLLM; what follows `--` is for vLLM."""
    announce = take_stdout()
    set_up_logging(log_level, log_format, engine_id)
    engine = VllmEngine(
        command=vllm_command,
        model=model,
        model_name=model_name,
        role=role.value,
        engine_id=engine_id,
        port=port or free_port(),
        internal_port=internal_port,
        arguments=tuple(context.args),
    )
    for taken in (engine.port, engine.internal_port):
        check_port(HOST, taken)
    command = engine.command_line(log_level=log_level.value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())

    async def run() -> None:
        await run_vllm(engine, command, announce, stop_event(lifeline=lifeline), start_timeout)

    try:
        asyncio.run(run())
    except VllmEnded as error:
        sys.stderr.write(f"{engine_id}: {error}\n")
        raise typer.Exit(1) from error


async def run_vllm(
    engine: VllmEngine,
    command: Sequence[str],
    announce: Announce,
    stop: asyncio.Event,
    start_s: float,
) -> None:
    """Returns after `stop`; nothing of the engine runs then. Raises VllmEnded."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,  # the line of JSON is alone on standard output
        start_new_session=True,
    )
    told, over = asyncio.create_task(stop.wait()), asyncio.create_task(process.wait())
    try:
        served = asyncio.create_task(_served(engine))
        done, _ = await asyncio.wait(
            {told, over, served}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED
        )
        served.cancel()
        if served in done and over not in done:
            announce(served.result())
            await asyncio.wait({told, over}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            code = over.result() if over.done() else None
            why = f"did not serve in {start_s:g} s" if code is None else f"ended with exit code {code}"
            raise VllmEnded(f"vLLM {why}; what it said is above")
    finally:
        told.cancel()
        await _end(process, over)


async def _served(engine: VllmEngine) -> dict[str, str]:
    """Wait until both of its servers answer; returns what to tell of it."""
    import aiohttp

    from kvhandoff.router.address import EngineAddress
    from kvhandoff.router.side import NoReport, SidePages

    url, internal = (root_url(HOST, port) for port in (engine.port, engine.internal_port))
    async with aiohttp.ClientSession(trust_env=False) as session:
        pages = SidePages(EngineAddress(url, internal), session)
        while True:
            try:
                state = await pages.state(0)
            except (NoReport, aiohttp.ClientError, OSError):
                await asyncio.sleep(POLL_S)
                continue
            address = f"{url},internal={internal}"
            return {"url": url, "address": address, "epoch": state.epoch, "transport": state.data_plane}


async def _end(process: asyncio.subprocess.Process, over: asyncio.Task[int]) -> None:
    """End vLLM, and whatever of its processes has outlived it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await asyncio.wait({over}, timeout=END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await over
