"""A small world for the protocol: engines with few blocks, a bad network, crashes, and late bytes.

Each engine is a real `HandoffNode` with a toy engine around it (`toy.py`); each is the source of some
requests and the destination of others. A router sends requests (`routing.py`), engines compute and load them
(`traffic.py`), they die process by process (`deaths.py`), and time, messages and bytes come as they come
(`ground.py`). A schedule is a sequence of random choices among what could happen; its *mood* says how likely
each kind is, so that some schedules are calm, some lossy, some full of crashes. Rules are checked as they may
break:

1. right KV or none    - `Loaded`: the request's blocks hold the labels of its own chain, and so do those
                         that a prompt is computed on; a write carries only what was granted for (`wire.py`)
2. no use after free   - bytes land only in blocks that the ledger was given for that very load; nothing is
                         freed that isn't owned, or that a transfer may still take from or land in; no write
                         follows its own `Fenced` or `Commit` (`wire.py`)
3. no wait without end - `settle()`: with no further choice, and even with no further message, every load
                         ends by the deadlines alone
4. no leak             - `settle()`: every pool is back at its baseline; what the ledgers say they hold is
                         what they were given
5. one live attempt    - a source writes for the latest attempt only (`wire.py`)
7. a reason for each   - each load ends exactly once: loaded, missed with a reason, or dropped
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from tests.handoff.ground import Ground
from tests.handoff.routing import Router
from tests.handoff.toy import RuleBroken, check

__all__ = ["STEPS", "RuleBroken", "World"]

STEPS = 80
"""Choices of one schedule."""

Choice = Callable[[], bool]


class World(Ground):
    """Three engines, one schedule."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.router = Router(self)
        self._choices, self._weights = self._mood()
        self._drawn: list[Choice] = []
        if self.sluggish or rng.random() < 0.7:
            self.acquaint()
        for name in rng.choice(((), (), ("turn-1",), ("turn-1", "turn-2"))):
            self.traffic.past_turn(name)

    # ------------------------------------------------------------------------------------- the schedule

    def _mood(self) -> tuple[list[Choice], list[float]]:
        """What may be chosen, and how often: work always, each kind of trouble only in some schedules."""
        router, traffic, rng = self.router, self.traffic, self.rng
        work = {
            router.request: 4.0,
            router.bind: 3.0,
            router.leg: 8.0,
            traffic.compute: 9.0,
            traffic.allocate_some: 8.0,
            traffic.finish_some: 4.0,
            self.deliver: 40.0,
            self.connected: 20.0,
            self.land_some: 3.0,
            self.report: 10.0,
            self.advance: 1.0,
        }
        trouble = {
            self.lose: 2.0,
            self.duplicate: 4.0,
            self.hold: 0.3,
            self.advance: 2.0,
            self.fail: 1.0,
            router.rebind: 1.0,
            traffic.short: 0.3,
            router.withdraw: 0.3,
            traffic.drop_some: 1.0,
            traffic.abandon_some: 0.5,
            self.deaths.crash: 1.5 if self.several else 0.3,
            self.deaths.process_ends: 1.0,
            self.deaths.heard: 1.0,
            self.cut_off: 0.2,
        }
        if self.sluggish:
            work |= {self.advance: 4.0, router.request: 8.0, router.bind: 8.0}
            trouble = {traffic.short: 2.0, router.withdraw: 0.3, traffic.drop_some: 0.3}
        work[self.report] *= rng.choice((0.1, 0.3, 1.0))
        weights = {choice: weight * rng.choice((0.6, 1.0, 1.5)) for choice, weight in work.items()}
        for choice, weight in trouble.items():
            weights[choice] = weights.get(choice, 0.0) + weight * rng.choice((0.0, 0.0, 1.0, 2.0))
        return list(weights), list(accumulate(weights.values()))

    def step(self) -> None:
        """One choice that is possible now."""
        for _ in range(16):
            if not self._drawn:
                self._drawn = self.rng.choices(self._choices, cum_weights=self._weights, k=64)
            if self._drawn.pop()():
                return
        self.advance()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """No further choice: deadlines pass, at first perhaps without any message. All must end."""
        traffic = self.traffic
        if self.rng.random() < 0.5:
            self.router.legs.clear()
        while self.router.legs:
            self.router.leg()
        self.sluggish = False
        self.held.clear()
        for engine in self.engines:
            self.check_books(engine)
        if self.rng.random() < 0.2:
            self._settle_alone()
        self._end_deaths()
        starved = self.rng.random() < 0.1
        for turn in range(400):  # far beyond what the deadlines and retries of a few loads need
            self._catch_up()
            for engine in self.engines:
                for load in [] if starved else list(engine.loads.values()):
                    traffic.allocate(engine, load)
                for job in list(engine.jobs.values()):
                    if turn > 30 or not traffic.compute_some(engine, job):
                        traffic.abandon(engine, job)
                while engine.running:
                    traffic.finish(engine, retain=False)
            if self.network or self.connecting or any(engine.jobs for engine in self.engines):
                continue
            if all(engine.next_deadline() is None for engine in self.engines):
                break
            self.haste = 0.0
            self.advance()
        for engine in self.engines:
            check(not engine.loads, "rule 3", f"{engine.name} still waits for {list(engine.loads)}")
            self.check_books(engine)
            back = (
                sorted(engine.free) == list(range(engine.pool))
                and not any(engine.kept)
                and not any(engine.held)
            )
            check(
                back, "rule 4", f"{engine.name}: free {engine.free}, kept {engine.kept}, held {engine.held}"
            )

    def _end_deaths(self) -> None:
        """Processes that have outlived their engine end; perhaps a next life tells of it, and nobody else."""
        deaths = self.deaths
        for _ in range(10 if deaths.outlived else 0):  # what is heard before that proves nothing
            self.advance()
            while self.network:
                self.deliver()
            while deaths.unheard:
                deaths.heard()
        while deaths.outlived:
            deaths.process_ends()
        if self.rng.random() < 0.5:
            there = {(engine.name, engine.address) for engine in self.engines}
            deaths.unheard = [d for d in deaths.unheard if (d[1].engine_id, d[2]) not in there]

    def _settle_alone(self) -> None:
        """No message arrives and no block is allocated: the deadlines alone end every load."""
        until, self.haste = self.time + 40.0, 0.0
        while self.time < until and any(engine.loads for engine in self.engines):
            self.network.clear()
            self.advance()
        for engine in self.engines:
            check(not engine.loads, "rule 3", f"{engine.name}, cut off, waits for {list(engine.loads)}")
            self.check_books(engine)

    def _catch_up(self) -> None:
        """All that is on its way arrives."""
        while self.network:
            self.deliver()
        while self.connecting:
            self.connected()
        while self.deaths.unheard:
            self.deaths.heard()
        for transfer in list(self.wire.transfers):
            for rank in list(transfer.parts):
                self.end_part(transfer, rank, fine=True)
