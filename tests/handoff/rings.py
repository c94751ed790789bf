"""A world that is poor of memory: prefill and decode engines of a few blocks each, whose memory waits for
each other.

Engines behave as real ones do: they admit strictly in order of arrival, say at each step that they lack
blocks, and drop nothing. A request that misses computes where it is, in its place. So whatever stands still
is the protocol's: `run` checks that something goes on all the time, and that all requests end. Some messages
may be lost or late; no engine dies.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import OfferRef
from tests.handoff.ground import SETTINGS, Ground
from tests.handoff.toy import Engine, Job, Load, Path, Prompt, check, prompt
from tests.handoff.traffic import Handoff, Traffic

PATIENT = replace(
    SETTINGS,
    short_s=1.5,
    claim_lease_s=6.0,
    queue_s=1e6,
    retain_lease_s=1e6,
    retain_fixed_s=1e6,
    read_s=30.0,
    progress_s=30.0,
)
"""No other deadline ends a wait for blocks."""
STANDSTILL_S = PATIENT.short_s + PATIENT.claim_lease_s / 3 + 1.0
"""Longest time without progress, when no message is lost: the shortage, a renewal, and some steps."""
HELD_S = 1.5
"""Longest time for which one engine does not hear another."""
LOSSY_STANDSTILL_S = PATIENT.short_s + PATIENT.claim_lease_s + 2 * HELD_S + 1.0
"""The same when some are lost or late: a lease instead of a renewal."""


class Orderly(Traffic):
    """Engines that give up nothing by themselves."""

    tells = 1.0

    def _room(self, load: Load) -> int:
        return len(load.prompt.labels)

    def missed(self, engine: Engine, key: HandoffKey, reason: Reason) -> None:
        load = engine.loads[key]
        super().missed(engine, key, reason)
        if load.job is None:
            engine.jobs[key] = Job(key, load.prompt, "local")


class Rings(Ground):
    """One or two engines of each role, and requests that come in quick succession."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.sluggish, self.in_order = False, True
        self.traffic = Orderly(self)
        roles = rng.choice(("pd", "pd", "ppd", "pdd", "ppdd"))
        self.engines = [self._engine(f"{role}{i}") for i, role in enumerate(roles)]
        self.sources = [engine for engine in self.engines if engine.name[0] == "p"]
        self.destinations = [engine for engine in self.engines if engine.name[0] == "d"]
        self.lossy = rng.random() < 0.4
        self.queues: dict[str, list[HandoffKey]] = {engine.name: [] for engine in self.engines}
        """By engine, its requests in their order of arrival."""
        self.unbound: list[tuple[Handoff, Engine]] = []
        """Pulled prompts whose decode engine is not told yet."""
        self.acquaint()
        for number in range(rng.randrange(5)):
            self._past_turn(HandoffKey(HandoffId(f"turn{number}"), 0), number)

    def _engine(self, name: str) -> Engine:
        rate, offset = self.rng.uniform(0.96, 1.04), self.rng.uniform(0, 1000)
        return Engine(name, f"addr-{name}", rate, offset, 1, self.rng.choice((8, 9, 12)), PATIENT)

    def _past_turn(self, key: HandoffKey, number: int) -> None:
        engine, turn = self.rng.choice(self.destinations), _prompt(number, self.rng.choice((8, 12)))
        if len(turn.labels) > len(engine.free):
            return
        blocks = engine.take(len(turn.labels), self.rng)
        for block, label in zip(blocks, turn.labels, strict=True):
            engine.write(block, label)
        self._keep(engine, key, turn, blocks)

    def _keep(self, engine: Engine, key: HandoffKey, turn: Prompt, blocks: tuple[int, ...]) -> None:
        self.traffic._retain(engine, key, turn, blocks)
        engine.drop(blocks)

    # ------------------------------------------------------------------------------------- the requests

    def request(self, number: int) -> None:
        """A new one, on any path; of a push both legs arrive at once."""
        rng = self.rng
        source, destination = rng.choice(self.sources), rng.choice(self.destinations)
        key, wanted, load = (
            HandoffKey(HandoffId(f"h{number}"), 0),
            _prompt(100 + number, rng.randrange(4, 21)),
            None,
        )
        path: Path = rng.choice(("pull", "push"))
        if self.traffic.histories and rng.random() < 0.5:
            history, past = self.traffic.histories.pop(0)
            wanted = prompt(past.salt, (*past.tokens, *range(500 + 9 * number, 504 + 9 * number)))
            load = Load(key, wanted, history, "return")
        job = Job(key, wanted, path, load)
        offer = OfferRef(key=key, source=source.identity, control_address=source.address)
        handoff = self.traffic.handoffs[key] = Handoff(wanted, offer, path)
        source.jobs[key] = job
        self.queues[source.name].append(key)
        if path == "push":
            self.feed(source, ev.OfferStarted(key, wanted.chain))
            self._bind(handoff, destination)
        else:
            self.unbound.append((handoff, destination))
        if load is not None:
            load.job = job
            self.traffic.want(source, load)

    def _bind(self, handoff: Handoff, destination: Engine) -> None:
        offer = handoff.descriptor or handoff.offer
        load = Load(handoff.offer.key, handoff.prompt, offer, "push" if handoff.path == "push" else "pull")
        self.queues[destination.name].append(load.key)
        self.traffic.want(destination, load)

    # ---------------------------------------------------------------------------------- steps of engines

    def engine_step(self, engine: Engine) -> None:
        """All that have blocks go on; those that have none get them in their order."""
        queue, traffic, full = self.queues[engine.name], self.traffic, False
        for key in list(queue):
            load, job = engine.loads.get(key), engine.jobs.get(key)
            if load is not None:
                full = full or (load.blocks is None and not traffic.allocate(engine, load))
            elif job is not None and not (full and job.blocks is None):
                traffic.compute_some(engine, job)
                full = full or (job.key in engine.jobs and job.blocks is None)
        queue[:] = [key for key in queue if key in engine.loads or key in engine.jobs]
        if engine.running and self.rng.random() < 0.3:
            running = engine.running.pop(0)
            engine.drop(running.blocks)

    def _deliver_all(self) -> None:
        """What is on its way arrives; now and then some is lost, or all of one engine to another late."""
        rng, late = self.rng, []
        if self.lossy and rng.random() < 0.05:
            one, other = rng.sample(self.engines, 2)
            self._hold(one.address, other.address, rng.uniform(0.0, HELD_S))
        while self.network:
            message = self.network.pop(0)
            if self.time < self.held.get(message[:2], 0.0):
                late.append(message)
            elif not self.lossy or rng.random() > 0.05:
                self._arrive(*message)
        self.network += late

    def _carry_out(self, engine: Engine, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Noted) and effect.reason is Reason.SOURCE_SHORT and not self.lossy:
            readers = [
                load for e in self.engines for load in e.loads.values() if load.offer.key == effect.key
            ]
            here = [
                load for load in readers if load.offer.source == engine.identity and load.blocks is not None
            ]
            check(not here, "rule 3", f"{effect.key} is given up under {here}, which have blocks")
        super()._carry_out(engine, effect)

    # --------------------------------------------------------------------------------------- the schedule

    def run(self) -> None:
        """Eight to sixteen requests, and time until all have ended."""
        rng, number, progress, since = self.rng, 0, (), self.time
        total = rng.randrange(8, 17)
        bound = LOSSY_STANDSTILL_S if self.lossy else STANDSTILL_S
        while number < total or any(self.queues.values()) or self.unbound:
            while number < total and rng.random() < 0.7:
                self.request(number)
                number += 1
            for handoff, destination in list(self.unbound):
                if handoff.descriptor is not None:
                    self.unbound.remove((handoff, destination))
                    self._bind(handoff, destination)
            self._deliver_all()
            for engine in rng.sample(self.engines, len(self.engines)):
                self.engine_step(engine)
                self._deliver_all()
            for transfer in list(self.wire.transfers):
                if rng.random() < 0.5:
                    self.end_part(transfer, next(iter(transfer.parts)), fine=True)
            self.time += rng.uniform(0.05, 0.15)
            for engine in self.engines:
                due = engine.next_deadline()
                if due is not None and self.now(engine) >= due:
                    self.feed(engine, ev.Tick())
            if progress != self._progress() or any(engine.running for engine in self.engines):
                progress, since = self._progress(), self.time
            check(self.time - since < bound, "rule 3", f"nothing goes on for {bound} s: {self.queues}")
            check(self.time < 400.0, "rule 3", f"no end: {self.queues}")
        for engine in self.engines:
            self.check_books(engine)

    def _progress(self) -> tuple[object, ...]:
        """Who has which blocks, and what is in them."""
        return tuple(
            (
                tuple(self.queues[engine.name]),
                tuple(load.key for load in engine.loads.values() if load.blocks is not None),
                tuple((job.key, job.blocks is not None, job.ready) for job in engine.jobs.values()),
                len(engine.running),
                len(engine.free),
            )
            for engine in self.engines
        )


def _prompt(number: int, tokens: int) -> Prompt:
    """Of tokens that no other has."""
    return prompt(0, tuple(range(1000 * number, 1000 * number + tokens)))
