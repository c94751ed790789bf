"""`kvhandoff router`: the OpenAI-compatible front."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

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
from kvhandoff.core.errors import ConfigError

if TYPE_CHECKING:
    from kvhandoff.web import Server

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


class ConnectorOption(StrEnum):
    """What moves KV between the engines."""

    KVHANDOFF = "kvhandoff"
    NIXL = "nixl"
    NIXL_PUSH = "nixl-push"


class PairTestOption(StrEnum):
    """Whether pairs of engines are tested when they come up."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


Fleet = typer.Option(
    None,
    "--fleet",
    help="More engines, in a YAML file: lists `prefill` and `decode` of {url, internal, drain}. It is "
    "watched; replace it by renaming.",
    dir_okay=False,
)
Registration = typer.Option(
    False, "--registration", help="Take in engines that register themselves with the cluster key."
)
PairTests = typer.Option(
    PairTestOption.AUTO,
    "--pair-tests",
    help="Send two blocks through each pair of engines as they come up, to see whether they hand over; auto: "
    "up to 64 pairs.",
)
Connector = typer.Option(
    ConnectorOption.KVHANDOFF,
    "--connector",
    help="kvhandoff, or vLLM's own NixlConnector or NixlPushConnector, whose transfers nobody verifies. With "
    "those, engines are URL[,engine_id=ID][,side_channel=HOST:PORT][,tp_size=N].",
)
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
    prefill: list[str] = typer.Option(
        [],
        help="A prefill engine; may be given several times. URL, or URL,internal=URL for a vLLM engine whose "
        "connector (kv_port) is not at port 14579 of the same host.",
    ),
    decode: list[str] = typer.Option(
        [],
        help="A decode engine, in the same form; may be given several times. dns+http://NAME:PORT stands for "
        "an engine at each of the name's addresses.",
    ),
    fleet: Path | None = Fleet,
    registration: bool = Registration,
    pair_tests: PairTestOption = PairTests,
    host: str = typer.Option("127.0.0.1", help="Address to listen at."),
    port: int = typer.Option(8000, min=0, max=65535, help="0 takes a free one."),
    path: PathOption = typer.Option(PathOption.AUTO, help="Path of requests that don't force one."),
    return_mode: ReturnOption = ReturnMode,
    retain: RetainOption = Retain,
    connector: ConnectorOption = Connector,
    on_miss: MissOption = typer.Option(MissOption.RECOMPUTE, help="When a request's KV can't be used."),
    cluster_key_file: Path | None = ClusterKeyFile,
    log_level: Level = LogLevel,
    lifeline: bool = Lifeline,
) -> None:
    """Run the router in front of engines that are up."""
    set_up_logging(log_level, "router")
    if not (decode or fleet or registration):
        raise ConfigError("--decode: got none, allowed is one or more, --fleet FILE, or --registration")
    if connector is not ConnectorOption.KVHANDOFF:
        if on_miss is not MissOption.RECOMPUTE or retain is not RetainOption.RENEWABLE:
            raise ConfigError(
                f"on-miss, retain: allowed with --connector {connector.value} is to leave them out"
            )
        if fleet is not None or registration:
            raise ConfigError(f"fleet, registration: allowed with --connector {connector.value} is --decode")
        _run(_upstream(connector, prefill, decode, host, port, path, return_mode), host, lifeline=lifeline)
        return

    from kvhandoff.router.app import serve
    from kvhandoff.router.config import RouterConfig

    config = RouterConfig(
        prefill=tuple(prefill),
        decode=tuple(decode),
        fleet_file=fleet,
        registration=registration,
        pair_tests=pair_tests.value,
        cluster_key=cluster_key(cluster_key_file),
        host=host,
        port=port,
        path=path.value,
        return_mode=return_mode.value,
        retain=retain.value,
        on_miss=on_miss.value,
    )

    _run(lambda: serve(config), host, lifeline=lifeline)


def _upstream(
    connector: ConnectorOption,
    prefill: list[str],
    decode: list[str],
    host: str,
    port: int,
    path: PathOption,
    return_mode: ReturnOption,
) -> Callable[[], Awaitable[Server]]:
    """Starts a router of stock vLLM engines with upstream's connectors. Raises ConfigError."""
    from kvhandoff.router.upstream import serve_upstream
    from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig

    config = UpstreamConfig(
        connector="nixl" if connector is ConnectorOption.NIXL else "nixl-push",
        prefill=tuple(map(UpstreamAddress.parse, prefill)),
        decode=tuple(map(UpstreamAddress.parse, decode)),
        host=host,
        port=port,
        path=path.value,
        keep_references=return_mode is not ReturnOption.OFF,
    )
    return lambda: serve_upstream(config)


def _run(serve: Callable[[], Awaitable[Server]], host: str, *, lifeline: bool) -> None:
    """Serve until told to end; the line on standard output says where."""

    async def run() -> None:
        stop = stop_event(lifeline=lifeline)
        server = await serve()
        url = f"http://{host}:{server.port}"
        sys.stdout.write(msgspec.json.encode({"url": url}).decode() + "\n")
        sys.stdout.flush()
        _log.info("router at %s", url)
        try:
            await stop.wait()
        finally:
            await server.close()

    import uvloop

    uvloop.run(run())
