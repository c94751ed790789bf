"""What the documents say of the code, held against the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import Counter

from kvhandoff.core.reasons import Reason
from kvhandoff.engine.metrics import EngineMetrics
from kvhandoff.handoff.messages import Body
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.router.metrics import RouterMetrics
from tests.handoff.tables.table import MODULES, rows_of

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
SOURCE = TESTS.parent / "src" / "kvhandoff"


def tables(docstring: str) -> str:
    """The indented tables of a module's docstring."""
    lines = docstring.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = max(i for i, line in enumerate(lines) if line.startswith("    "))
    return textwrap.dedent("\n".join(lines[start : end + 1]))


@pytest.mark.parametrize("name", MODULES)
def test_state_tables_are_the_codes_own(name: str) -> None:
    text = (DOCS / "protocol.md").read_text()
    shown = re.search(rf"<!-- table: {name} -->\n```\n(.*?)\n```\n<!-- end -->", text, re.DOTALL)
    assert shown is not None
    assert shown[1] == tables(MODULES[name].__doc__ or "")


def test_every_duration_message_and_ticket_field_is_explained() -> None:
    text = (DOCS / "protocol.md").read_text()
    tags = [body.__struct_config__.tag for body in get_args(Body)]
    names = [*HandoffSettings.__struct_fields__, *Ticket.__struct_fields__, *tags]
    assert [name for name in names if f"`{name}`" not in text] == []


REFERENCE = r"`((?:(?:e2e|router|handoff|embedded|engine|vllm|transport|core)/)?[a-z0-9_]+):([a-z_0-9]+)`"
"""`e2e/push:lengths` stands for `tests/e2e/test_push.py::test_lengths`."""


def _attacks() -> str:
    text = (DOCS / "protocol.md").read_text()
    return text[text.index("## What a driver must promise") :]


def test_what_shows_a_rule_is_a_test() -> None:
    references = re.findall(REFERENCE, _attacks())
    assert references
    missing = []
    for where, name in references:
        folder, _, module = where.rpartition("/")
        file = TESTS / folder / f"test_{module}.py"
        if not file.exists() or not re.search(
            rf"^(async )?def test_{name}\(", file.read_text(), re.MULTILINE
        ):
            missing.append(f"{where}:{name}")
    assert missing == []


def test_what_shows_a_rule_is_a_row() -> None:
    rows = {
        (row.machine.rpartition(".")[2], row.state, row.event) for name in MODULES for row in rows_of(name)
    }
    machines = "|".join({machine for machine, _, _ in rows})
    named = re.findall(rf"`({machines})/([^/`]+)/([^`]+)`", _attacks())
    assert named
    assert [row for row in named if row not in rows] == []


def test_what_shows_a_rule_is_a_planted_bug() -> None:
    named = set(re.findall(r"planted: ([a-z_]+)", _attacks()))
    assert named
    planted = (TESTS / "handoff/test_planted_bugs.py").read_text()
    assert [name for name in sorted(named) if f"def {name}(" not in planted] == []


def test_what_upholds_a_rule_is_code() -> None:
    text = (DOCS / "protocol.md").read_text()
    source = [file.read_text() for file in SOURCE.rglob("*.py")]
    missing = []
    for owner, member in set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text)):
        bodies = [body for body in source if re.search(rf"^class {owner}\b", body, re.MULTILINE)]
        if not any(re.search(rf"\b(def {member}\(|{member}: )", body) for body in bodies):
            missing.append(f"{owner}.{member}")
    assert missing == []


@pytest.mark.parametrize(
    ("prefix", "metrics"), [("kvhandoff_router_", RouterMetrics), ("kvhandoff_engine_", EngineMetrics)]
)
def test_every_metric_is_explained(prefix: str, metrics: Any) -> None:
    """Under the router's or the engine's heading, with its labels."""
    text = (DOCS / "operations.md").read_text()
    table = text[text.index(f"`{prefix}…`") :]
    table = table[: table.index("\n\n")]
    missing = []
    for collector in metrics()._registry._collector_to_names:
        name = collector._name.removeprefix(prefix)
        name += "_total" if isinstance(collector, Counter) else ""
        shown = f"{name}{{{','.join(collector._labelnames)}}}" if collector._labelnames else name
        if f"`{shown}`" not in table:
            missing.append(shown)
    assert missing == []


def test_every_reason_is_explained() -> None:
    text = (DOCS / "operations.md").read_text()
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []
