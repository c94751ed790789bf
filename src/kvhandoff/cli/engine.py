"""`kvhandoff engine`: one embedded engine."""

from __future__ import annotations

import secrets
import socket
from enum import StrEnum
from pathlib import Path

import typer

from kvhandoff.cli.announce import take_stdout
from kvhandoff.cli.common import (
    MOST_GIB,
    MOST_SECONDS,
    ClusterKeyFile,
    Lifeline,
    check_port,
    cluster_key,
    stop_event,
)
from kvhandoff.cli.logs import Format, Level, LogFormat, LogLevel, set_up_logging
from kvhandoff.cli.traces import Traces, traces_endpoint
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import check_engine_id, engine_id_of
from kvhandoff.handoff.settings import MIN_RETURN_TOKENS, HandoffSettings


class Role(StrEnum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class TransportChoice(StrEnum):
    """How KV blocks move."""

    AUTO = "auto"
    NIXL = "nixl"
    SHM = "shm"


class Dtype(StrEnum):
    """The model's numbers."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Register = typer.Option(
    [],
    "--register",
    help="A router's URL (its --registration is on) to register with; may be given several times.",
)
RegisterUrl = typer.Option(
    None, "--register-url", help="Where routers reach this engine, if not at --host and --port."
)
DtypeOption = typer.Option(Dtype.AUTO, help="auto: the checkpoint's, float32 in exact mode.")


def engine(
    role: Role = typer.Option(..., help="What this engine does for a request."),
    model: str = typer.Option("smollm2", help="smollm2, a model directory, or a Hugging Face id."),
    model_name: str | None = typer.Option(None, help="Name under which it is served; default: --model."),
    engine_id: str | None = typer.Option(
        None, help="One process at a time may have it; default: role, host and port."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen at."),
    port: int = typer.Option(0, min=0, max=65535, help="0 takes a free one."),
    control: str = typer.Option("tcp://127.0.0.1:0", help="Where other engines reach this one."),
    transport: TransportChoice = typer.Option(
        TransportChoice.AUTO, help="NIXL if installed, or shared memory."
    ),
    dtype: Dtype = DtypeOption,
    exact: bool = typer.Option(False, help="Logits bit-equal in any batch and chunking; slower."),
    device: str = typer.Option("cpu", help="cpu, or cuda (untested)."),
    block_size: int = typer.Option(16, min=1, help="Tokens in a KV block."),
    kv_memory: float | None = typer.Option(None, min=0.001, max=MOST_GIB, help="GiB of KV; default 1."),
    kv_blocks: int | None = typer.Option(None, min=1, help="KV blocks, instead of --kv-memory."),
    max_num_seqs: int = typer.Option(16, min=1, help="Sequences in a step."),
    max_step_tokens: int = typer.Option(512, min=1, help="Tokens in a step: the prefill chunk."),
    prefix_cache: bool = typer.Option(True, help="Reuse the KV of prompts with the same beginning."),
    threads: int | None = typer.Option(None, min=1, help="Threads of the model; default: torch's."),
    offer_lease: float = typer.Option(
        HandoffSettings().offer_lease_s, min=0.1, max=MOST_SECONDS, help="Seconds."
    ),
    claim_lease: float = typer.Option(
        HandoffSettings().claim_lease_s, min=0.1, max=MOST_SECONDS, help="Seconds."
    ),
    retain_lease: float = typer.Option(
        HandoffSettings().retain_lease_s,
        min=0.1,
        max=MOST_SECONDS,
        help="Seconds that a turn is kept after its last use.",
    ),
    retain_time: float = typer.Option(
        HandoffSettings().retain_fixed_s,
        min=0.1,
        max=MOST_SECONDS,
        help="Seconds that a turn is kept with `--retain fixed`.",
    ),
    min_return_tokens: int = typer.Option(
        MIN_RETURN_TOKENS, min=1, help="With fewer to gain, a history is computed, not read."
    ),
    register: list[str] = Register,
    register_url: str | None = RegisterUrl,
    cluster_key_file: Path | None = ClusterKeyFile,
    traces: str | None = Traces,
    log_level: Level = LogLevel,
    log_format: Format = LogFormat,
    lifeline: bool = Lifeline,
) -> None:
    """Run one embedded engine. When it serves, it prints one line of JSON with its addresses."""
    announce = take_stdout()

    from kvhandoff.embedded.process import EngineConfig, choose_transport, prepare, run_engine
    from kvhandoff.engine.register import check_registration
    from kvhandoff.transport.control import check_control

    if kv_memory is not None and kv_blocks is not None:
        raise ConfigError("kv-memory and kv-blocks: got both, allowed is one of them")
    if engine_id is None:
        engine_id = engine_id_of(role, socket.gethostname(), port or secrets.token_hex(3))
    check_engine_id("engine-id", engine_id)
    if model_name is not None and not model_name.strip():
        raise ConfigError(f"model-name: got {model_name!r}, allowed is a name, or to leave it out")
    set_up_logging(log_level, log_format, engine_id)
    # All that can be known to be wrong before a model is looked for, which may mean to fetch it.
    check_port(host, port)
    check_control("control", control)
    check_registration(register, role, register_url, host, url_name="register-url")
    choose_transport(transport.value)
    key = cluster_key(cluster_key_file)
    spans_to = traces_endpoint(traces)
    prepare(exact=exact, threads=threads)

    from kvhandoff.embedded.models import resolve_model
    from kvhandoff.web import run_main

    config = EngineConfig(
        model_dir=resolve_model(model),
        model_name=model if model_name is None else model_name,
        role=role.value,
        engine_id=engine_id,
        cluster_key=key,
        host=host,
        port=port,
        control=control,
        transport=transport.value,
        dtype=dtype.value,
        exact=exact,
        device=device,
        block_size=block_size,
        kv_bytes=None if kv_memory is None else int(kv_memory * 2**30),
        num_blocks=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
        threads=threads,
        settings=HandoffSettings(
            offer_lease_s=offer_lease,
            claim_lease_s=claim_lease,
            retain_lease_s=retain_lease,
            retain_fixed_s=retain_time,
        ),
        min_return_tokens=min_return_tokens,
        register=tuple(register),
        register_url=register_url,
        traces=spans_to,
    )

    async def serve() -> None:
        await run_engine(config, announce, stop_event(lifeline=lifeline))

    run_main(serve())
