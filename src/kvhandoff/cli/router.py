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
    LOCAL = "local"


class MissOption(StrEnum):
    """What happens when a request's KV can't be used."""

    RECOMPUTE = "recompute"
    ERROR = "error"


def router(
    prefill: list[str] = typer.Option([], help="URL of a prefill engine; may be given several times."),
    decode: list[str] = typer.Option(..., help="URL of a decode engine; may be given several times."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at."),
    port: int = typer.Option(8000, min=0, max=65535, help="0 takes a free one."),
    path: PathOption = typer.Option(PathOption.AUTO, help="Path of requests that don't force one."),
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
