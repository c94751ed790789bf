"""The state tables at the heads of `handoff/*.py`, held against the code.

Each row is brought about on a real node: what it says is what is observed. Whatever has no row changes
nothing, and each event and message is some machine's. So a table can be neither wrong nor incomplete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import NamedTuple, get_args

import pytest

from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.rows import claims, grants, offers, peers, transfers, writes  # noqa: F401  registers
from tests.handoff.tables.scene import Kind, Scene, kind
from tests.handoff.tables.scenes.grants import Grants
from tests.handoff.tables.scenes.offers import Offers
from tests.handoff.tables.scenes.peers import Peers
from tests.handoff.tables.scenes.reads import Claims, Transfers
from tests.handoff.tables.scenes.writes import Writes
from tests.handoff.tables.table import (
    ANY,
    MODULES,
    SCENARIOS,
    Key,
    Row,
    Scenario,
    misuse_of,
    rows_of,
)

SCENES: dict[str, type[Scene]] = {
    scene.machine: scene for scene in (Offers, Writes, Claims, Transfers, Grants, Peers)
}
STATES = {machine: list(scene().arrivals()) for machine, scene in SCENES.items()}
ROWS = [row for name in MODULES for row in rows_of(name)]
BY_KEY: dict[Key, Row] = {row.key: row for row in ROWS}

WORDS = {
    ev.OfferStarted: "started",
    ev.OfferGrown: "grown",
    ev.Offered: "offered",
    ev.Retained: "retained",
    ev.ReadWanted: "wanted",
    ev.PushWanted: "wanted",
    ev.LoadAllocated: "allocated",
}
"""Events that can be misuse, as the tables call them."""


class Outcome(NamedTuple):
    """What a scenario came to."""

    before: str
    event: Kind
    effects: list[str]
    after: str


@cache
def _outcomes(number: int) -> tuple[Outcome, ...]:
    scenario = SCENARIOS[number]
    machine, state, _ = scenario.key
    states = STATES[machine] if state == ANY else [state]
    return tuple(_play(scenario, at if state == ANY else None) for at in states)


def _play(scenario: Scenario, at: str | None) -> Outcome:
    scene = SCENES[scenario.key[0]]()
    if at is not None:
        scene.arrive(at)
    event = scenario.arrange(scene, **scenario.given)
    before, due = scene.state(), scene.node.next_deadline()
    try:
        effects = scene.do(event)
    except ValueError:
        return Outcome(before, kind(event), ["ValueError"], scene.state())
    if isinstance(event, ev.Tick) and effects:
        assert due is not None, "nothing told when the tick is due"
        assert due <= scene.now
    return Outcome(before, kind(event), scene.say(effects, before), scene.state())


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=map(str, SCENARIOS))
def test_what_a_row_says_is_what_happens(number: int) -> None:
    scenario = SCENARIOS[number]
    row = BY_KEY.get(scenario.key)
    assert row is not None, f"no table has this row: {scenario.key}"
    for before, _, effects, after in _outcomes(number):
        assert row.state in (ANY, before), "the scenario leads elsewhere"
        assert effects == row.effects(scenario.why)
        assert after in ({before} if row.state == ANY else row.nexts())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ": ".join(row.key))
def test_each_row_is_brought_about_with_each_next_state(row: Row) -> None:
    numbers = [number for number, scenario in enumerate(SCENARIOS) if scenario.key == row.key]
    assert numbers, "no scenario"
    if row.state != ANY:
        assert {outcome.after for number in numbers for outcome in _outcomes(number)} == row.nexts()


def test_no_row_stands_twice() -> None:
    assert [key for key, count in Counter(row.key for row in ROWS).items() if count > 1] == []


@pytest.mark.parametrize("machine", SCENES)
def test_each_state_of_a_table_can_be_reached(machine: str) -> None:
    named = {state for row in ROWS if row.machine == machine for state in ({row.state} | row.nexts())}
    assert named - {ANY, "same"} == set(STATES[machine])


def _covered() -> dict[tuple[str, str], set[Kind]]:
    """(machine, state) → kinds of event that some row is about there."""
    covered = defaultdict(set)
    for number, scenario in enumerate(SCENARIOS):
        for outcome in _outcomes(number):
            covered[scenario.key[0], outcome.before].add(outcome.event)
    return covered


CELLS = [
    (machine, state, event)
    for machine, scene in SCENES.items()
    for state in STATES[machine]
    for event in scene.handles
]


@pytest.mark.parametrize(
    ("machine", "state", "event"), CELLS, ids=[f"{m}: {s}: {e.__name__}" for m, s, e in CELLS]
)
def test_whatever_has_no_row_changes_nothing(machine: str, state: str, event: Kind) -> None:
    if event in _covered()[machine, state]:
        return  # see above
    scene = SCENES[machine]()
    scene.arrive(state)
    assert scene.state() == state
    record = repr(scene.record())
    if (state, WORDS.get(event)) in misuse_of(scene.module):
        with pytest.raises(ValueError, match=r"(offer|read|load) h#\d"):
            scene.do(scene.probe(event))
    else:
        assert scene.say(scene.do(scene.probe(event)), state) == []
    assert scene.state() == state
    assert repr(scene.record()) == record


def test_each_event_and_message_is_some_machines() -> None:
    every = {*get_args(ev.Event), *get_args(msg.Body)} - {ev.Received}
    assert {event for scene in SCENES.values() for event in scene.handles} == every


@pytest.mark.parametrize("name", MODULES)
def test_misuse_is_refused_and_nothing_else(name: str) -> None:
    """What is called misuse is the misuse that there is: the cells above that raise are exactly these."""
    told = {(state, word) for state, word in misuse_of(name)}
    tried = {
        (state, WORDS.get(event))
        for machine, state, event in CELLS
        if machine.partition(".")[0] == name and event not in _covered()[machine, state]
    }
    assert told <= tried
