"""The scenes of `stale_references`: what is sent in which order, and how it is judged, on systems without
engines."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.stale_scenes import SCENES, Played, play, story
from benchmarks.stale_systems import Reference, Served, StepFailed

from benchmarks import stale_scenes
from tests.benchmarks.naive_system import Naive, right

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_scenes, "LEASE_S", -2.0)


async def played(system: Naive, scene: str, deadline_s: float = DEADLINE_S) -> Played:
    return await play(system, scene, deadline_s)


async def test_unverified_references_are_found_out() -> None:
    verdicts = {scene: (await played(Naive(), scene)).verdict for scene in SCENES}
    assert verdicts == {
        "consumed": "right text",  # by luck: the blocks still hold it
        "recycled": "WRONG TEXT",
        "another prompt": "WRONG TEXT",
        "longer prompt": "WRONG TEXT",
        "expired": "WRONG TEXT",
        "edited history": "WRONG TEXT",
    }


async def test_another_prompts_secret_is_told() -> None:
    row = await played(Naive(), "another prompt")
    assert (row.came, row.right, row.status) == (" silver", " dragon", 200)


async def test_verified_references_give_the_right_text() -> None:
    rows = [await played(Naive(verified=True), scene) for scene in SCENES]
    assert {(each.verdict, each.status) for each in rows} == {("right text", 200)}
    assert rows[-1].reason == "history: read; checked"
    assert (rows[-1].right, rows[-1].came) == (" bottle", " bottle")


@pytest.mark.parametrize(
    ("scene", "steps"),
    [
        ("consumed", ["prefill", "decode", "decode"]),
        ("recycled", ["prefill", "decode", "compute", "compute", "decode"]),
        ("another prompt", ["prefill", "decode"]),
        ("longer prompt", ["prefill", "decode"]),
        ("expired", ["prefill", "compute", "compute", "decode"]),
        ("edited history", ["prefill", "decode", "prefill with history", "decode"]),
    ],
)
async def test_steps(scene: str, steps: list[str]) -> None:
    system = Naive()
    await played(system, scene)
    assert system.steps == steps


class Refusing(Naive):
    """Answers the decode leg with HTTP 500; its decode engine may die of that."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.dies = dies
        self.dead = False

    async def decode(self, prompt: str, reference: Reference) -> Served:
        self.dead = self.dies
        raise StepFailed("the decode leg: EngineCore encountered an issue", 500)

    async def death(self) -> str | None:
        return "the decode engine died: AssertionError" if self.dead else None


async def test_an_engine_that_dies_of_a_scene() -> None:
    row = await played(Refusing(dies=True), "another prompt")
    assert row == Played(
        scene="another prompt",
        system="naive",
        verdict="the engine died",
        reason="the decode engine died: AssertionError",
        status=500,
    )
    assert row.engines_are_lost


async def test_an_error_of_an_engine_that_lives() -> None:
    row = await played(Refusing(dies=False), "another prompt")
    assert (row.verdict, row.status, row.came, row.right) == ("error", 500, None, None)
    assert row.reason == "the decode leg: EngineCore encountered an issue"
    assert not row.engines_are_lost


class DyingLater(Naive):
    """Dies of what it has answered."""

    async def death(self) -> str | None:
        return "the prefill engine died: KeyError"


async def test_an_engine_that_dies_after_its_answer() -> None:
    """What came is shown; that the engine is gone weighs more."""
    row = await played(DyingLater(verified=True), "consumed")
    assert (row.verdict, row.came, row.status) == ("the engine died", " apple", 200)
    assert row.reason == "the prefill engine died: KeyError"


class Hanging(Naive):
    """One of its engines never answers: the prefill engine other prompts, or the decode engine alone."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.hangs_in = step

    async def compute(self, prompt: str) -> None:
        await self.maybe_hang("compute")
        await super().compute(prompt)

    async def alone(self, prompt: str) -> str:
        await self.maybe_hang("alone")
        return await super().alone(prompt)

    async def maybe_hang(self, step: str) -> None:
        self.step = step
        if step == self.hangs_in:
            await asyncio.Event().wait()


async def test_an_engine_that_hangs() -> None:
    row = await played(Hanging("compute"), "recycled", 0.05)
    assert (row.verdict, row.status, row.came) == ("no answer", None, None)
    assert row.reason == "no answer in 0.05 s, of compute"
    assert row.engines_are_lost


async def test_what_came_before_an_engine_hung_is_shown() -> None:
    row = await played(Hanging("alone"), "consumed", 0.05)
    assert (row.verdict, row.came, row.status, row.right) == ("no answer", " apple", 200, None)
    assert row.reason == "no answer in 0.05 s, of alone"


def test_the_edit_is_beyond_the_first_block() -> None:
    """So that a part of the history still matches: a block is 128 tokens, a word at least one."""
    before, after = story("monkey").split(), story("bottle").split()
    assert before.index("monkey.") == after.index("bottle.") > 128


def test_another_prompt_is_as_long_and_another_from_its_first_word_on() -> None:
    own, other = story("silver", first="Good day. ").split(), story("dragon", first="Once more. ").split()
    assert len(own) == len(other)
    assert own[0] != other[0]


def test_the_longer_prompt_has_a_block_more() -> None:
    """Of the same words; see `LONGER` for tokens."""
    usual = story("copper")
    longer = story("forest", first="Once more. ", sentences=stale_scenes.LONGER)
    assert len(longer.split()) - len(usual.split()) > 128
    assert right(longer) == " forest"
