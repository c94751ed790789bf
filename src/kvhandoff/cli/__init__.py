"""The command line: `kvhandoff up`, `engine`, `router`, `router-key`, `doctor`.

Bad input ends with a message on standard error and exit code 2; `--help` loads neither torch nor a model.
"""

from __future__ import annotations

import sys

import typer

from kvhandoff import __version__
from kvhandoff.cli import doctor, engine, router, router_key, up, vllm_engine
from kvhandoff.cli.command import Command
from kvhandoff.cli.consoles import plain_console, wrong
from kvhandoff.core.errors import ConfigError

app = typer.Typer(
    name="kvhandoff",
    help="Serve LLMs with prefill and decode on separate engines, and a verified KV handoff per request.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_WITH_VLLM_ARGUMENTS = {"allow_extra_args": True}
"""What follows `--` is for vLLM."""
app.command("up", cls=Command, context_settings=_WITH_VLLM_ARGUMENTS)(up.up)
app.command("engine", cls=Command)(engine.engine)
app.command("router", cls=Command)(router.router)
app.command("router-key", cls=Command)(router_key.router_key)
app.command("doctor", cls=Command)(doctor.doctor)
app.command("vllm-engine", cls=Command, hidden=True, context_settings=_WITH_VLLM_ARGUMENTS)(
    vllm_engine.vllm_engine
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        sys.stdout.write(f"kvhandoff {__version__}\n")
        raise typer.Exit


def main() -> None:
    """The `kvhandoff` command."""
    try:
        app()
    except ConfigError as error:
        plain_console(stderr=True).print(wrong("error", error))
        sys.exit(2)
