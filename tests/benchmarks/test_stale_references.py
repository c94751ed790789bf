"""The scenes of `stale_references`: what is sent in which order, and how it is judged, on systems without
engines."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.stale_references import SCENES, Played, judge, play, story, table
from benchmarks.stale_systems import Reference, Served, System
from rich.console import Console

from benchmarks import stale_references


class Naive(System):
    """Reads whatever a reference names, from blocks that later prompts overwrite: as upstream does."""

    def __init__(self, *, verified: bool = False) -> None:
        self.pair = SimpleNamespace(kind=SimpleNamespace(name="naive"))  # type: ignore[assignment]
        self.verified = verified
        self.memory: dict[int, str] = {}
        self.made = 0
        self.steps: list[str] = []

    async def prefill(self, prompt: str, history: Reference | None = None) -> tuple[Reference, str]:
        self.steps.append("prefill" if history is None else "prefill with history")
        self.made += 1
        held = None if history is None else self.memory[history]
        self.memory[self.made] = held if held is not None and not self.verified else prompt
        return self.made, "history: read" if held else "computed"

    async def decode(self, prompt: str, reference: Reference) -> Served:
        self.steps.append("decode")
        held = self.memory[reference]
        return Served(200, right(prompt if self.verified else held), "checked", kept=reference)

    async def alone(self, prompt: str) -> str:
        return right(prompt)

    async def compute(self, prompt: str) -> None:
        self.steps.append("compute")
        self.memory = dict.fromkeys(self.memory, prompt)


def right(prompt: str) -> str:
    """What the model says."""
    return " " + prompt.split("secret word is ")[1].split(".")[0] if "secret" in prompt else " stone"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_references, "LEASE_S", -2.0)


async def test_unverified_references_are_found_out() -> None:
    verdicts = {scene: (await play(Naive(), scene)).verdict for scene in SCENES}
    assert verdicts == {
        "consumed": "right text",  # by luck: the blocks still hold it
        "recycled": "WRONG TEXT",
        "another prompt": "WRONG TEXT",
        "expired": "WRONG TEXT",
        "edited history": "WRONG TEXT",
    }


async def test_verified_references_give_the_right_text() -> None:
    played = [await play(Naive(verified=True), scene) for scene in SCENES]
    assert {each.verdict for each in played} == {"right text"}
    assert played[-1].reason == "history: read; checked"
    assert played[-1].right == " bottle"


@pytest.mark.parametrize(
    ("scene", "steps"),
    [
        ("consumed", ["prefill", "decode", "decode"]),
        ("recycled", ["prefill", "decode", "compute", "compute", "decode"]),
        ("another prompt", ["prefill", "decode"]),
        ("expired", ["prefill", "compute", "compute", "decode"]),
        ("edited history", ["prefill", "decode", "prefill with history", "decode"]),
    ],
)
async def test_steps(scene: str, steps: list[str]) -> None:
    system = Naive()
    await play(system, scene)
    assert system.steps == steps


def test_judgements() -> None:
    assert judge(Served(200, " apple"), " apple") == "right text"
    assert judge(Served(200, " apple."), " apple") == "WRONG TEXT"
    assert judge(Served(500, "load failed"), " apple") == "error"
    assert judge(Served(None, "no answer"), " apple") == "no answer"


def test_the_edit_is_beyond_the_first_block() -> None:
    """So that a part of the history still matches."""
    before, after = story("monkey"), story("bottle")
    same = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    assert same > 4 * 128


def test_the_table_shows_upstreams_row_as_it_is() -> None:
    row = Played(
        scene="recycled",
        system="upstream",
        right=" apple",
        came=" stone [not markup]",
        status=200,
        verdict="WRONG TEXT",
        reason="not recorded",
    )
    console = Console(width=200, record=True, file=StringIO())
    console.print(table([row]))
    shown: Any = console.export_text()
    assert "WRONG TEXT" in shown
    assert "' stone [not markup]'" in shown
