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
    what the clients show does not depend on what this machine's engines are found to cost."""
    with running(tmp_path_factory.mktemp("up"), "--path", "pull", "--return", "on") as deployment:
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
