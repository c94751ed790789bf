"""The engines of `kvhandoff up --engine vllm`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import typer

from kvhandoff.cli.children import Child
from kvhandoff.cli.router_options import MissOption
from kvhandoff.cli.vllm_engine import VllmEngine
from kvhandoff.cli.vllm_machine import engine_environment
from kvhandoff.core.errors import ConfigError
from kvhandoff.web import free_port

DEFAULT_MODEL = "smollm2"

_ELSEWHERE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?|\w+://.+", re.ASCII)
"""A Hugging Face id, or the URL of a store vLLM loads from. vLLM finds out whether it leads anywhere."""

_TRACES = "--otlp-traces-endpoint"

_EMBEDDED_ONLY = (
    *("transport", "dtype", "exact", "kv_memory", "block_size", "max_num_seqs", "prefix_cache", "threads"),
)


class Kind(StrEnum):
    """Which engines serve."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


def vllm_children(
    context: typer.Context,
    engines: Sequence[tuple[str, str]],
    model: str,
    command: str,
    environment: Mapping[str, str],
    *,
    on_miss: MissOption,
    log_level: str,
    seeing: Sequence[str],
    traces: str | None,
) -> list[Child]:
    """One child for each (role, name) of `engines`. `traces`: where vLLM is to post its own spans, unless it
    is told so by the user. Raises ConfigError for what vLLM's can't be told so."""
    for name in _EMBEDDED_ONLY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise ConfigError(f"{option}: allowed with --engine vllm are vLLM's own arguments, after --")
    if on_miss is MissOption.ERROR:
        raise ConfigError("on-miss: got error, allowed with --engine vllm is recompute")

    given = tuple(context.args)
    if traces is not None and not any(argument.startswith(_TRACES) for argument in given):
        given = (_TRACES, traces, *given)
        environment = {**environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}

    children = []
    for index, (role, name) in enumerate(engines):
        engine = VllmEngine(
            command=command,
            model=_model(model),
            model_name=model,
            role=role,
            engine_id=name,
            port=0,
            internal_port=free_port(),
            arguments=given,
        )
        engine.command_line(log_level=log_level)  # whether it can be run, before anything is started
        arguments = [
            *("vllm-engine", "--role", role, "--engine-id", name, "--model", engine.model),
            *("--model-name", model, "--internal-port", str(engine.internal_port)),
            *("--vllm-command", command, *seeing, "--", *engine.arguments),
        ]
        added = engine_environment(environment, index, len(engines))
        # Chosen here: two engines that choose for themselves at once may choose the same one.
        children.append(Child(name, arguments, {**environment, **added}, port=free_port()))
    return children


def _model(model: str) -> str:
    """What vLLM is told to serve: a directory or a Hugging Face id as it is, the default one converted."""
    if model != DEFAULT_MODEL:
        if not (_ELSEWHERE.fullmatch(model) or (model and Path(model).is_dir())):
            raise ConfigError(f"model: got {model!r}, allowed is a directory or a Hugging Face id")
        return model
    try:
        from kvhandoff.embedded.models import resolve_model
    except ImportError as error:
        raise ConfigError(
            f"model: got {model}, allowed without kvhandoff[embedded] are a directory or a Hugging Face id"
        ) from error
    return str(resolve_model(model))
