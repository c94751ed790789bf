"""The `openai` client for Node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.deployment import Deployment, run

HERE = Path(__file__).parent / "node"


def test_node_client(up: Deployment, record_property: Callable[[str, object], None]) -> None:
    node, installed = shutil.which("node"), HERE / "node_modules" / "openai" / "package.json"
    if node is None or not installed.is_file():
        pytest.skip("no Node, or no openai for it: `make clients` installs it")
    record_property("client", "openai (Node)")
    record_property("version", json.loads(installed.read_text())["version"])
    before = up.counts()
    found = json.loads(run([node, str(HERE / "client.mjs"), up.url, up.model], cwd=HERE))
    records = [up.record(name) for name in found["turns"]]
    assert [record["reused_tokens"]["returned"] > 0 for record in records] == [False, True, True]
    changes = up.since(before)
    assert changes.answered() == 6 + len(records)
    assert changes.others() == {"404": 1, "400": 1, "499": 2}
    record_property("figures", changes.figures())
