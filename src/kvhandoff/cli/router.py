"""`kvhandoff router`: the OpenAI-compatible front."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path

import msgspec
import typer

from kvhandoff.cli.common import (
    ClusterKeyFile,
    Level,
    Lifeline,
    LogLevel,
    cluster_key,
    set_up_logging,
    stop_event,
)

_log = logging.getLogger(__name__)


class PathOption(StrEnum):
    """The path of requests that don't force one."""

    AUTO = "auto"
    PULL = "pull"
    PUSH = "push"
    LOCAL = "local"


class ReturnOption(StrEnum):
    """Whether a conversation's next turn gets the history from the decode engine that keeps it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class RetainOption(StrEnum):
    """How long decode engines keep a turn for the next one."""

    RENEWABLE = "renewable"
    FIXED = "fixed"
    OFF = "off"


class MissOption(StrEnum):
    """What happens when a request's KV can't be used."""

    RECOMPUTE = "recompute"
    ERROR = "error"


ReturnMode = typer.Option(
    ReturnOption.AUTO,
    "--return",
    help="Whether a conversation's next turn gets its history back.",
)
Retain = typer.Option(
    RetainOption.RENEWABLE,
    "--retain",
    help="Keep turns under a renewed lease, for a fixed time, or not at all.",
)


def router(
    prefill: list[str] = typer.Option([], help="URL of a prefill engine; may be given several times."),
    decode: list[str] = typer.Option(..., help="URL of a decode engine; may be given several times."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at."),
    port: int = typer.Option(8000, min=0, max=65535, help="0 takes a free one."),
    path: PathOption = typer.Option(PathOption.AUTO, help="Path of requests that don't force one."),
    return_mode: ReturnOption = ReturnMode,
    retain: RetainOption = Retain,
    on_miss: MissOption = typer.Option(MissOption.RECOMPUTE, help="When a request's KV can't be used."),
    cluster_key_file: Path | None = ClusterKeyFile,
    log_level: Level = LogLevel,
    lifeline: bool = Lifeline,
) -> None:
    """Run the router in front of engines that are up."""
    from kvhandoff.router.app import serve
    from kvhandoff.router.config import RouterConfig

    set_up_logging(log_level, "router")
    config = RouterConfig(
        prefill=tuple(prefill),
        decode=tuple(decode),
        cluster_key=cluster_key(cluster_key_file),
        host=host,
        port=port,
        path=path.value,
        return_mode=return_mode.value,
        retain=retain.value,
        on_miss=on_miss.value,
    )

    async def run() -> None:
        stop = stop_event(lifeline=lifeline)
        server = await serve(config)
        url = f"http://{host}:{server.port}"
        sys.stdout.write(msgspec.json.encode({"url": url}).decode() + "\n")
        sys.stdout.flush()
        _log.info("router at %s: %d prefill, %d decode", url, len(prefill), len(decode))
        try:
            await stop.wait()
        finally:
            await server.close()

    import uvloop

    uvloop.run(run())
