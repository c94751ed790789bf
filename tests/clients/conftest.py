"""Clients that others have written, unmodified, against a whole deployment. `make clients` runs them and
writes `build/clients.json`; `docs/clients.md` says what each needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.clients.deployment import ROOT, Deployment, running

REPORT = ROOT / "build" / "clients.json"
_results: list[dict[str, Any]] = []


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The default model on embedded engines. All is pulled and, where a history is known, returned, so that
    nothing depends on what this machine's engines are found to cost. They have no prefix caches: a turn's
    history comes back, or is computed again."""
    logs = tmp_path_factory.mktemp("up")
    with running(logs, "--path", "pull", "--return", "on", "--no-prefix-cache") as deployment:
        yield deployment


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model's, for clients that count tokens."""
    from kvhandoff.embedded.models import resolve_model

    return resolve_model("smollm2")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test says of its client."""
    if report.when == "call" or report.outcome == "skipped":
        facts = dict(report.user_properties)
        skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else None
        _results.append(
            {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            | ({"why": skipped} if skipped else {})
            | facts
        )


def pytest_sessionfinish() -> None:
    """Write the report."""
    if _results:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(
            json.dumps({"kvhandoff": version("kvhandoff"), "clients": _results}, indent=2) + "\n"
        )
