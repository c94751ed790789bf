"""What the documents say of the code, held against the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import offers, peers, reads

DOCS = Path(__file__).parent.parent / "docs"
MODULES = {"offers": offers, "reads": reads, "peers": peers}


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


def test_every_reason_is_explained() -> None:
    text = (DOCS / "operations.md").read_text()
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []
