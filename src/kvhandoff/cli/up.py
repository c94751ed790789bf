"""`kvhandoff up`: engines and router on this machine, with one command."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import typer
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvhandoff.cli.children import STOP_S, Child, ChildFailed, keep_running, keep_until
from kvhandoff.cli.common import CLUSTER_KEY_ENV, MOST_GIB, check_port, stop_event
from kvhandoff.cli.consoles import plain_console, wrong
from kvhandoff.cli.engine import Dtype, DtypeOption, TransportChoice
from kvhandoff.cli.logs import Format, Level, LogFormat, set_up_logging
from kvhandoff.cli.router_options import (
    Binding,
    BindingOption,
    MissOption,
    PathOption,
    Retain,
    RetainOption,
    ReturnMode,
    ReturnOption,
    ShutdownTimeout,
    Tenants,
)
from kvhandoff.cli.traces import Traces, traces_endpoint
from kvhandoff.cli.up_vllm import Kind, vllm_children
from kvhandoff.core.errors import ConfigError

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)  # its few lines say what runs where, whatever level is asked of the others

_Result = TypeVar("_Result")


def up(
    context: typer.Context,
    engine: Kind = typer.Option(Kind.EMBEDDED, help="Kind of the engines; what follows -- is for vLLM."),
    vllm_command: str = typer.Option("vllm", help="With --engine vllm: how vLLM is called."),
    model: str = typer.Option("smollm2", help="smollm2, a model directory, or a Hugging Face id."),
    prefill: int = typer.Option(1, min=0, help="Prefill engines."),
    decode: int = typer.Option(1, min=1, help="Decode engines."),
    host: str = typer.Option("127.0.0.1", help="Address of the router; engines stay on 127.0.0.1."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port of the router; 0 takes a free one."),
    path: PathOption = typer.Option(PathOption.AUTO, help="Path of requests that don't force one."),
    binding: BindingOption = Binding,
    return_mode: ReturnOption = ReturnMode,
    retain: RetainOption = Retain,
    transport: TransportChoice = typer.Option(
        TransportChoice.AUTO, help="NIXL if installed, or shared memory."
    ),
    on_miss: MissOption = typer.Option(MissOption.RECOMPUTE, help="When a request's KV can't be used."),
    shutdown_timeout: float = ShutdownTimeout,
    tenants: Path | None = Tenants,
    dtype: Dtype = DtypeOption,
    exact: bool = typer.Option(False, help="Logits bit-equal in any batch and chunking; slower."),
    kv_memory: float = typer.Option(1.0, min=0.001, max=MOST_GIB, help="GiB of KV for each engine."),
    block_size: int = typer.Option(16, min=1, help="Tokens in a KV block."),
    max_num_seqs: int = typer.Option(16, min=1, help="Sequences in a step."),
    prefix_cache: bool = typer.Option(True, help="Reuse the KV of prompts with the same beginning."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; default: cores / engines."),
    traces: str | None = Traces,
    log_level: Level = typer.Option(Level.WARNING, help="The least serious events that are logged."),
    log_format: Format = LogFormat,
) -> None:
    """Serve a model through prefill engines, decode engines and a router on this machine."""
    set_up_logging(log_level, log_format, "up")
    spans_to = traces_endpoint(traces)  # whether it can be used, before anything is started
    seeing = [*("--log-level", log_level), *("--log-format", log_format)]
    traced = [] if traces is None else ["--traces", traces]
    check_port(host, port)
    if tenants is not None:  # before anything is started
        from kvhandoff.router.tenants import read_tenants
        from kvhandoff.router.watched import read_file

        read_tenants(tenants, read_file("tenants", tenants))
    engines = [("prefill", f"prefill-{i}") for i in range(prefill)]
    engines += [("decode", f"decode-{i}") for i in range(decode)]
    environment = {**os.environ, CLUSTER_KEY_ENV: secrets.token_hex(32)}

    def embedded() -> list[Child]:
        from kvhandoff.embedded.models import resolve_model

        if context.args:
            given = " ".join(context.args)
            raise ConfigError(f"arguments: got {given}, allowed without --engine vllm are none")
        common = [
            *("--model", str(resolve_model(model)), "--model-name", model),
            *("--transport", transport, "--dtype", dtype, "--exact" if exact else "--no-exact"),
            *("--kv-memory", str(kv_memory), "--block-size", str(block_size)),
            *("--max-num-seqs", str(max_num_seqs), *seeing, *traced),
            "--prefix-cache" if prefix_cache else "--no-prefix-cache",
            *("--threads", str(threads or max(1, (os.cpu_count() or 1) // len(engines)))),
        ]
        return [
            Child(name, ["engine", "--role", role, "--engine-id", name, *common], environment)
            for role, name in engines
        ]

    def vllm() -> list[Child]:
        return vllm_children(
            context,
            engines,
            model,
            vllm_command,
            environment,
            on_miss=on_miss,
            log_level=log_level,
            seeing=seeing,
            traces=spans_to,
        )

    def router(urls: list[str]) -> Child:
        arguments = ["router", "--host", host, *seeing, *traced]
        arguments += [
            "--path",
            path,
            "--binding",
            binding,
            "--return",
            return_mode,
            "--retain",
            retain,
            "--on-miss",
            on_miss,
            "--shutdown-timeout",
            str(shutdown_timeout),
        ]
        if tenants is not None:
            arguments += ["--tenants", str(tenants)]
        for index, url in enumerate(urls):
            arguments += ["--prefill" if index < prefill else "--decode", url]
        return Child("router", arguments, environment, port=port, stop_s=shutdown_timeout + STOP_S)

    in_json = log_format is Format.JSON
    children = vllm() if engine is Kind.VLLM else embedded()
    uvloop.run(_serve(children, router, model, keys=tenants is not None, in_json=in_json))


async def _serve(
    engines: list[Child],
    make_router: Callable[[list[str]], Child],
    model: str,
    *,
    keys: bool,
    in_json: bool,
) -> None:
    """`in_json`: what is said goes to the log, and nothing is drawn between its lines."""
    console = plain_console(stderr=True, quiet=in_json)
    say: Callable[[str], None] = _log.warning if in_json else console.print
    stop = stop_event(lifeline=False)
    children = list(engines)
    try:
        with console.status(Text(f"starting {len(engines)} engines with {model} …")):
            started = await _unless(stop, asyncio.gather(*(child.start() for child in engines)))
            if started is None:
                return
            router = make_router([facts.get("address", facts["url"]) for facts in started])
            children.append(router)
            facts = await _unless(stop, router.start())
            if facts is None:
                return
        _tell(console, model, engines, started, facts["url"], keys=keys)
        if in_json:
            served = {child.name: each["url"] for child, each in zip(engines, started, strict=True)}
            _log.info("ready at %s", facts["url"], extra={"url": facts["url"], "engines": served})
        await keep_until(stop, [keep_running(child, say) for child in children])
    except ChildFailed as error:
        console.print(wrong("error", error))
        if in_json:
            _log.error("%s", error)
        raise typer.Exit(1) from error
    finally:
        with console.status("stopping …"):
            for group in (children[len(engines) :], engines):  # the router first: it has nobody to wait for
                await asyncio.gather(*(child.stop() for child in group))


async def _unless(stop: asyncio.Event, work: Awaitable[_Result]) -> _Result | None:
    """The result of `work`, or None if `stop` comes first."""
    working, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (stopped, working):
            task.cancel()
        await asyncio.gather(stopped, working, return_exceptions=True)


def _tell(
    console: Console,
    model: str,
    engines: list[Child],
    started: list[dict[str, str]],
    url: str,
    *,
    keys: bool,
) -> None:
    """What runs where, and how to try it."""
    table = Table("process", "address", "transport", box=None, padding=(0, 2, 0, 0))
    for child, facts in zip(engines, started, strict=True):
        table.add_row(child.name, facts["url"], facts["transport"])
    table.add_row("router", url)
    console.print(table)
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "max_tokens": 50, "temperature": 0, "messages": [message]})
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    command = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"\nReady. Try:\n\n{command}\n")
    console.print(f"and then {url}/v1/handoffs/ID with the answer's id. Ctrl-C ends all.")
