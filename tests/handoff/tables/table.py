"""The state tables as data: read from the docstrings that hold them, and the scenarios registered for their
rows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from types import ModuleType
from typing import Any

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import grants, offers, peers, reads, writes
from kvhandoff.handoff.events import Event

MODULES: dict[str, ModuleType] = {
    "offers": offers,
    "writes": writes,
    "reads": reads,
    "grants": grants,
    "peers": peers,
}

ANY = "any"
"""A row's state: whichever; its next state is the same."""

Key = tuple[str, str, str]
"""Machine, state, event: the name of a row."""


@dataclass(frozen=True)
class Row:
    """In `state`, `event` has `effect`, and leads to `next`."""

    machine: str
    state: str
    event: str
    effect: str
    next: str

    @property
    def key(self) -> Key:
        return self.machine, self.state, self.event

    def effects(self, why: Reason | None) -> list[str]:
        """The effects, one phrase each; "why" stands for the reason that the scenario brings about."""
        phrases = [] if self.effect == "-" else self.effect.split(", ")
        return [re.sub(r"\bwhy$", str(why), phrase) for phrase in phrases]

    def nexts(self) -> set[str]:
        return set(self.next.split(" or "))


def rows_of(name: str) -> list[Row]:
    """All rows of a module's tables, in their order. A machine is named for its module, and for what its
    table's first column is called when that isn't "state"."""
    lines = (MODULES[name].__doc__ or "").splitlines()
    rows = []
    for number, line in enumerate(lines):
        if re.fullmatch(r" {4}-+(?: +-+){3}", line):
            heading = lines[number - 1].split()[0]
            machine = name if heading == "state" else f"{name}.{heading}"
            starts = [run.start() for run in re.finditer("-+", line)]
            rows += [Row(machine, *cells) for cells in _cells(lines[number + 1 :], starts)]
    return rows


def _cells(lines: list[str], starts: list[int]) -> Iterator[list[str]]:
    """Each row's four cells, those that go on in the next line put together."""
    current: list[str] = []
    for line in lines:
        if not line.strip():
            break
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if not cells[0]:
            current = [f"{known} {more}".strip() for known, more in zip(current, cells, strict=True)]
            continue
        if current:
            yield current
        current = cells
    if current:
        yield current


def misuse_of(name: str) -> set[tuple[str, str]]:
    """(state, event's word) of what a module's docstring calls misuse, e.g. "Misuse: OPEN, ENDED: started,
    grown; …" up to a full stop."""
    text = textwrap.dedent(MODULES[name].__doc__ or "")
    found = re.search(r"^Misuse[^:]*: (.*?)\.(?:\s|$)", text, re.DOTALL | re.MULTILINE)
    pairs = set()
    for part in " ".join(found[1].split()).split("; ") if found else ():
        states, words = part.split(": ")
        pairs |= {(state, word) for state in states.split(", ") for word in words.split(", ")}
    return pairs


@dataclass(frozen=True)
class Scenario:
    """How to bring a row about."""

    key: Key
    arrange: Callable[..., Event]
    """Gets a fresh scene, leads it to the row's state (of an `any` row: to what it needs beside), and gives
    back the event."""
    why: Reason | None
    given: dict[str, Any]

    def __str__(self) -> str:
        extra = [f"{name}={_brief(value)}" for name, value in self.given.items() if name != "at"]
        return ": ".join([*self.key, *extra])


def _brief(value: object) -> str:
    """For a test's name."""
    value = getattr(value, "func", value)
    name = getattr(value, "__name__", None)
    return name if name is not None else re.sub(r"\(.{25,}\)$", "", str(value))


SCENARIOS: list[Scenario] = []


def row(
    machine: str, state: str, event: str, why: Reason | None = None, /, **given: Any
) -> Callable[[Callable[..., Event]], Callable[..., Event]]:
    """Register a scenario for a row. Several for one row are its variants; `given` goes to the function, and
    so does the row's state if it asks for it by a parameter `at`."""

    def register(arrange: Callable[..., Event]) -> Callable[..., Event]:
        at = {"at": state} if "at" in signature(arrange).parameters else {}
        SCENARIOS.append(Scenario((machine, state, event), arrange, why, given | at))
        return arrange

    return register
