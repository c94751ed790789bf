"""No package imports one above it, and heavy libraries stay where the design puts them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvhandoff"

BELOW: dict[str, set[str]] = {"core": set(), "web": {"core"}, "tracing": {"core"}}
BELOW["transport"] = {"core"}
BELOW["handoff"] = {"core", "transport"}
BELOW["engine"] = BELOW["handoff"] | {"handoff", "web"}
BELOW["embedded"] = BELOW["engine"] | {"engine", "tracing"}
BELOW["vllm"] = BELOW["engine"] | {"engine"}
BELOW["router"] = BELOW["handoff"] | {"handoff", "web", "tracing"}
BELOW["cli"] = {"router", "embedded", "vllm", *BELOW["embedded"]}

HEAVY = {
    "torch": {"embedded", "vllm"},
    "transformers": {"embedded"},
    "vllm": {"vllm"},
    "nixl_cu12": {"transport"},
    "opentelemetry": {"tracing", "embedded", "router", "cli"},
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in BELOW)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_from_its_own_layer_and_those_below(path: Path):
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = BELOW[layer] | {layer}
    for module in imports(path):
        first, *rest = module.split(".")
        if first == "kvhandoff" and rest:
            assert rest[0] in allowed, f"{layer} imports {module}"
        assert layer in HEAVY.get(first, {layer}), f"{layer} imports {module}"
