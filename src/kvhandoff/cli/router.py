"""`kvhandoff router`: the OpenAI-compatible front."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvhandoff.cli.announce import Announce, take_stdout
from kvhandoff.cli.common import (
    ClusterKeyFile,
    Lifeline,
    check_port,
    cluster_key,
    stop_event,
)
from kvhandoff.cli.logs import Format, Level, LogFormat, LogLevel, set_up_logging
from kvhandoff.cli.router_options import (
    BOUND_BY,
    Binding,
    BindingOption,
    ChoiceOption,
    Connector,
    ConnectorOption,
    DecodePolicy,
    Doors,
    EngineCa,
    Fleet,
    Index,
    IndexTTL,
    MissOption,
    PairTestOption,
    PairTests,
    PathOption,
    PrefillPolicy,
    Registration,
    Retain,
    RetainOption,
    ReturnMode,
    ReturnOption,
    ShutdownTimeout,
    Tenants,
    TlsCert,
    TlsKey,
    WorkerIndex,
    Workers,
)
from kvhandoff.cli.traces import Traces, traces_endpoint
from kvhandoff.cli.workers import run_workers
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import root_url

if TYPE_CHECKING:
    from kvhandoff.router.security import Security
    from kvhandoff.router.wire import Server

_log = logging.getLogger(__name__)


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
    binding: BindingOption = Binding,
    prefill_policy: ChoiceOption = PrefillPolicy,
    decode_policy: ChoiceOption = DecodePolicy,
    return_mode: ReturnOption = ReturnMode,
    retain: RetainOption = Retain,
    index: str = Index,
    index_ttl: float = IndexTTL,
    connector: ConnectorOption = Connector,
    on_miss: MissOption = typer.Option(MissOption.RECOMPUTE, help="When a request's KV can't be used."),
    shutdown_timeout: float = ShutdownTimeout,
    tenants: Path | None = Tenants,
    tls_cert: Path | None = TlsCert,
    tls_key: Path | None = TlsKey,
    engine_ca: Path | None = EngineCa,
    cluster_key_file: Path | None = ClusterKeyFile,
    traces: str | None = Traces,
    workers: int = Workers,
    worker: int | None = WorkerIndex,
    doors: Path | None = Doors,
    log_level: Level = LogLevel,
    log_format: Format = LogFormat,
    lifeline: bool = Lifeline,
) -> None:
    """Run the router in front of engines that are up."""
    announce = take_stdout()

    from kvhandoff.router.security import Security

    set_up_logging(log_level, log_format, "router" if worker is None else f"router worker {worker}")
    spans_to = traces_endpoint(traces)
    security = Security(tenants=tenants, tls_cert=tls_cert, tls_key=tls_key, engine_ca=engine_ca)
    if (worker is None) != (doors is None) or (worker is not None and worker >= workers):
        got = f"got {worker} of {workers} and {doors or 'no folder'}"
        raise ConfigError(f"worker, doors: {got}, allowed is neither: --workers N starts its workers itself")
    if not (decode or fleet or registration):
        raise ConfigError("decode: got none, allowed is one or more, --fleet FILE, or --registration")
    if connector is not ConnectorOption.KVHANDOFF:
        ours = (
            ("binding", binding, binding is not BindingOption.AUTO),
            ("prefill-policy", prefill_policy, prefill_policy is not ChoiceOption.LEAST_WORK),
            ("decode-policy", decode_policy, decode_policy is not ChoiceOption.LEAST_WORK),
            ("on-miss", on_miss, on_miss is not MissOption.RECOMPUTE),
            ("retain", retain, retain is not RetainOption.RENEWABLE),
            ("index", "a server's URL", index != "memory"),
            ("workers", workers, workers > 1),
            ("fleet", fleet, fleet is not None),
            ("registration", "it", registration),
        )
        for name, value, given in ours:
            if given:
                allowed = f"allowed with --connector {connector} is to leave it out"
                raise ConfigError(f"{name}: got {value}, {allowed}")
        start = _upstream(
            connector,
            prefill,
            decode,
            host,
            port,
            path,
            return_mode,
            pair_tests,
            shutdown_timeout,
            security,
            spans_to,
        )
        check_port(host, port)
        _run(start, host, announce, tls=tls_cert is not None, lifeline=lifeline)
        return

    import uvloop

    from kvhandoff.router.app import serve
    from kvhandoff.router.config import RouterConfig
    from kvhandoff.router.index import IN_MEMORY
    from kvhandoff.router.policy import Policies
    from kvhandoff.router.worker import Worker

    config = RouterConfig(
        prefill=tuple(prefill),
        decode=tuple(decode),
        fleet_file=fleet,
        registration=registration,
        pair_tests=pair_tests.value,
        cluster_key=cluster_key(cluster_key_file),
        host=host,
        port=port,
        shutdown_s=shutdown_timeout,
        path=path.value,
        policies=Policies(prefill=prefill_policy.value, decode=decode_policy.value, binding=binding.value),
        return_mode=return_mode.value,
        retain=retain.value,
        on_miss=on_miss.value,
        security=security,
        index=index,
        index_ttl_s=index_ttl,
        traces=spans_to,
        worker=Worker(worker or 0, workers, doors),
    )
    if worker is None and path not in BOUND_BY[binding]:
        _log.warning(
            "binding %s: has no effect on requests of path %s, which is theirs unless they ask for another",
            binding.value,
            path.value,
        )
    if workers > 1 and worker is None:
        if index == IN_MEMORY and return_mode is not ReturnOption.OFF:
            raise ConfigError(
                f"workers: got {workers} with --index {index}, allowed is 1; --return off; or an index that "
                "they share (valkey://HOST:PORT/DB), since any worker may get a conversation's next turn"
            )
        uvloop.run(run_workers(workers, host, port, announce, shutdown_s=shutdown_timeout, lifeline=lifeline))
        return
    if workers == 1:  # several share it, and their parent has it
        check_port(host, port)
    _run(lambda: serve(config), host, announce, tls=tls_cert is not None, lifeline=lifeline)


def _upstream(
    connector: ConnectorOption,
    prefill: list[str],
    decode: list[str],
    host: str,
    port: int,
    path: PathOption,
    return_mode: ReturnOption,
    pair_tests: PairTestOption,
    shutdown_s: float,
    security: Security,
    traces: str | None,
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
        pair_tests=pair_tests.value,
        shutdown_s=shutdown_s,
        security=security,
        traces=traces,
    )
    return lambda: serve_upstream(config)


def _run(
    serve: Callable[[], Awaitable[Server]], host: str, announce: Announce, *, tls: bool, lifeline: bool
) -> None:
    """Serve until told to end; the line on standard output says where."""

    async def run() -> None:
        stop = stop_event(lifeline=lifeline)
        server = await serve()
        url = root_url(host, server.port, scheme="https" if tls else "http")
        announce({"url": url})
        _log.info("router at %s", url)
        try:
            await stop.wait()
        finally:
            await server.close()

    import uvloop

    # Nothing that a request leaves has cycles, and what is kept (records, index) is large: looking for
    # garbage after every 700 objects, as Python does, would go through all of that again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(run())
