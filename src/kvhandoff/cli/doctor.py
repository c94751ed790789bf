"""`kvhandoff doctor`: what is in use at engines that run, and what is wrong with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from kvhandoff.cli.common import CLUSTER_KEY_ENV, ClusterKeyFile, cluster_key
from kvhandoff.cli.consoles import plain_console, wrong
from kvhandoff.core.errors import check_once


def doctor(
    engine: list[str] = typer.Option(
        ..., help="URL of an engine, or URL,internal=URL (see `router`); may be given several times."
    ),
    cluster_key_file: Path | None = ClusterKeyFile,
) -> None:
    """Say what is in use at engines, and what is wrong. Exit code 0: nothing; 1: something; 2: bad input.

    Without a cluster key, whether the engines have the router's is not checked.
    """
    from kvhandoff.cli.checkup import Finding, disagreements, examine, same_engines
    from kvhandoff.router.address import parse_address

    addresses = [parse_address("engine", text) for text in engine]
    check_once([address.url for address in addresses], where="engine: ")
    given = cluster_key_file is not None or os.environ.get(CLUSTER_KEY_ENV)
    key = cluster_key(cluster_key_file) if given else None

    async def examine_all() -> list[Finding]:
        return await asyncio.gather(*(examine(address, key) for address in addresses))

    findings = asyncio.run(examine_all())
    console = plain_console()
    for finding in findings:
        console.print(finding.address.url, style="bold")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for name, value in finding.facts.items():
            table.add_row(name, value)
        if finding.facts:
            console.print(table)
        for problem in finding.problems:
            console.print(Text("  ") + wrong("wrong", problem))
    between = [f"they refuse each other: {difference}" for difference in disagreements(findings)]
    between += same_engines(findings)
    for problem in between:
        console.print(wrong("wrong", problem))
    if key is None:
        console.print(f"The cluster key was not checked: set ${CLUSTER_KEY_ENV} or --cluster-key-file.")
    if between or any(finding.problems for finding in findings):
        raise typer.Exit(1)
    console.print("Nothing is wrong.")
