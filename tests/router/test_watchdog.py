"""An engine that answers for its state and does nothing is found, and comes back when it moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvhandoff.core.records import BlockCounts, EngineState
from kvhandoff.router.watchdog import Watchdog
from tests.router.engines import held, soon, until

STUCK_S = 60.0


def blocks(**counts: int) -> BlockCounts:
    named = dict.fromkeys(("total", "free", "cached", "used", "offered", "loading", "quarantined"), 0)
    return BlockCounts(**(named | counts))


def report(**fields: Any) -> EngineState:
    facts: dict[str, Any] = {
        "engine_id": "d",
        "epoch": "1",
        "role": "decode",
        "model": "tiny",
        "model_fingerprint": "f",
        "max_model_len": 64,
        "block_size": 16,
        "control_address": "tcp://d:1",
        "data_plane": "shm",
        "now": 0.0,
        "running": 1,
        "waiting": 0,
        "loading": 0,
        "blocks": blocks(),
        "records": [],
        "cursor": 3,
        "progress": 7,
    }
    return EngineState(**{**facts, **fields})


@pytest.mark.parametrize(
    "stuck",
    [
        {},
        {"running": 0, "waiting": 2},
        {"running": 0, "waiting": 2, "blocks": blocks(offered=4, retained=4)},
        {"running": 1, "waiting": 9, "loading": 9},
    ],
    ids=str,
)
def test_work_without_progress_is_found(stuck: dict[str, Any]) -> None:
    dog = Watchdog(STUCK_S)
    assert dog.look(report(**stuck), 100.0) is None
    assert dog.look(report(**stuck), 159.9) is None
    problem = dog.look(report(**stuck), 160.0)
    assert problem is not None
    assert problem.startswith("no progress for 60 s, though it answers: ")
    assert dog.look(report(**stuck), 170.0) is not None
    # More requests that wait are no progress.
    assert dog.look(report(**(stuck | {"waiting": 50, "loading": 0})), 171.0) is not None
    assert dog.look(report(**(stuck | {"progress": 8})), 172.0) is None
    assert dog.look(report(**(stuck | {"progress": 8})), 173.0) is None


@pytest.mark.parametrize(
    "moves",
    [{"progress": 8}, {"cursor": 4}, {"epoch": "2"}, {"running": 0}, {"running": 0, "loading": 1}],
    ids=str,
)
def test_what_moves_or_has_no_work_of_its_own_is_well(moves: dict[str, Any]) -> None:
    dog = Watchdog(STUCK_S)
    dog.look(report(), 0.0)
    assert dog.look(report(**moves), 59.0) is None
    assert dog.look(report(), 61.0) is None, "counted anew from the last change"


@pytest.mark.parametrize(
    "state",
    [
        {"running": 0},
        {"running": 0, "waiting": 3, "loading": 1},
        {"running": 0, "waiting": 3, "blocks": blocks(offered=5, retained=4)},
        {"running": 0, "waiting": 3, "blocks": blocks(granted=1)},
        {"progress": None},
    ],
    ids=str,
)
def test_not_watched(state: dict[str, Any]) -> None:
    """Idle; waiting for what other engines do or hold, with deadlines; an engine that counts no steps."""
    dog = Watchdog(STUCK_S)
    for now in (0.0, 100.0, 1000.0):
        assert dog.look(report(**state), now) is None


def test_what_was_not_seen_is_not_held_against_it() -> None:
    dog = Watchdog(STUCK_S)
    dog.look(report(), 0.0)
    dog.forget()  # reports were missed
    assert dog.look(report(), 100.0) is None
    assert dog.look(report(), 160.0) is not None


async def test_a_stuck_engine_gets_no_legs_until_it_moves(cluster: Any) -> None:
    """Its prefill leg is ended, and the request goes on; here the engine stands still at once."""
    async with cluster(prefill=2, poll_interval_s=0.01, timeouts={"progress_s": 0.05}, path="pull") as c:
        stuck, other = c.prefill
        stuck.script = held
        request = c.start(c.body())
        await soon(stuck.legs.get())
        stuck.load, stuck.progress = 1, 5

        assert (await soon(request))[0] == 200
        assert other.legs.qsize() == 1
        (said,) = [e for e in (await c.get("/ready"))[1]["engines"] if e["url"] == stuck.url]
        assert said["healthy"] is False
        assert "no progress for" in said["problem"]
        assert "1 running, 0 waiting" in said["problem"]
        assert (await c.post(c.body()))[0] == 200
        assert stuck.legs.empty()

        stuck.gate.set()
        stuck.load = 0
        await c.healthy()
        await until(lambda: stuck.cancelled.qsize() == 1)
        assert (await asyncio.gather(c.post(c.body()), c.post(c.body())))[0][0] == 200
        assert not stuck.legs.empty()
