"""How engines die in the random schedules: process by process, and who hears of it.

Methods that a schedule may choose say whether there was anything to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvhandoff.core.ids import Identity
from kvhandoff.handoff import events as ev

if TYPE_CHECKING:
    from tests.handoff.ground import Ground
    from tests.handoff.toy import Engine


class Deaths:
    """The operating system of a world."""

    def __init__(self, world: Ground) -> None:
        self.world = world
        self.rng = world.rng
        self.ended: set[str] = set()
        """Processes that have ended."""
        self.outlived: list[tuple[Identity, str, str]] = []
        """Processes that run on after their engine's life: that life, where it listened, the process."""
        self.unheard: list[tuple[Engine, Identity, str]] = []
        """Which engine is yet to hear whose end for certain, and where that one listened."""

    def crash(self) -> bool:
        """kill -9 and a new life, at the same or at another address. What it was reading into is gone; what
        it was writing may land until its end is certain. Some of its processes may run on for a while."""
        world, rng = self.world, self.rng
        writes = [transfer for transfer in world.wire.transfers if transfer.is_write]
        engine = rng.choice(world.engines)
        if world.several and not writes and rng.random() < 0.7:
            return False  # rather when a process can outlive its engine with a write in flight
        if writes and rng.random() < 0.7:
            engine = rng.choice((writes[-1].poster, writes[-1].engine))
        life, address, killed = engine.identity, engine.address, engine.processes
        if len(killed) > 1 and rng.random() < 0.7:
            some = rng.sample(killed, rng.randrange(1, len(killed)))
            killed = rng.choice((killed[:1], tuple(some)))
        self.ended.update(killed)
        self.outlived += [(life, address, one) for one in engine.processes if one not in killed]
        world.outcomes["a writer outlives its engine"] += any(
            write.life == life and write.movers[rank] not in killed
            for write in writes
            for rank in write.parts
        )
        world.outcomes["crash while pushing"] += any(write.life == life for write in writes)
        world.outcomes["crash while pushed to"] += any(write.memory is engine.memory for write in writes)
        world.wire.transfers = [t for t in world.wire.transfers if t.life != life or t.is_write]
        world.connecting = [(e, peer) for e, peer in world.connecting if e is not engine]
        self.unheard = [entry for entry in self.unheard if entry[0] is not engine]
        self.look(life, address)
        if rng.random() < 0.3:
            engine.address = f"addr-{engine.name}-{engine.life}"
        engine.start()
        return True

    def process_ends(self) -> bool:
        """One that has outlived its engine."""
        if not self.outlived:
            return False
        life, address, process = self.outlived.pop(self.rng.randrange(len(self.outlived)))
        self.ended.add(process)
        self.look(life, address)
        return True

    def heard(self) -> bool:
        """The operating system tells an engine that a life has ended."""
        if not self.unheard:
            return False
        engine, life, _ = self.unheard.pop(self.rng.randrange(len(self.unheard)))
        self.certain(life)
        self.world.feed(engine, ev.PeerDied(life))
        return True

    def look(self, life: Identity, address: str) -> None:
        """Whoever watches this life is to hear of its end, if all processes that it watches have ended."""
        for engine in self.world.engines:
            if life in engine.watched and self.ended.issuperset(engine.watched[life]):
                self.world.outcomes["end of several processes"] += len(engine.watched.pop(life)) > 1
                self.unheard.append((engine, life, address))

    def nameless(self, engine: Engine) -> bool:
        """Whether a process of a former life still has its name: until then this life talks to nobody."""
        return any(life.engine_id == engine.name for life, _, _ in self.outlived)

    def certain(self, life: Identity) -> None:
        """Somebody has proof that a life has ended. It is good for those processes that have."""
        self.world.wire.died(life, self.ended)
