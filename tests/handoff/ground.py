"""What the random schedules stand on: clocks, a bad network, transfers; and nodes with their effects.

Each method that a schedule may choose says whether there was anything to do.
"""

from __future__ import annotations

import random
from collections import Counter

from msgspec.structs import replace

from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import ClaimGranted, WrongEpoch, decode, encode
from kvhandoff.handoff.settings import HandoffSettings
from tests.handoff.deaths import Deaths
from tests.handoff.toy import Engine, check
from tests.handoff.traffic import Traffic
from tests.handoff.wire import Transfer, Wire

SETTINGS = HandoffSettings(
    offer_lease_s=3.0,
    claim_lease_s=2.0,
    handshake_s=2.0,
    claim_s=2.0,
    read_s=1.5,
    queue_s=4.0,
    short_s=0.5,
    retry_s=0.25,
    rendezvous_s=3.0,
    progress_s=2.0,
    write_s=2.5,
    fence_s=3.0,
    revoke_cap_s=2.0,
    retain_lease_s=9.0,
    retain_fixed_s=6.0,
    remembered=8,
)
SLOW_READS = replace(SETTINGS, offer_lease_s=1.5, read_s=6.0)
"""Leases end long before a read is given up."""


class Ground:
    """Three engines, and all that is between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.time = 0.0
        self.wire = Wire()
        self.sluggish = rng.random() < 0.25
        """Whether bytes and answers tend to come when the leases end."""
        settings = SLOW_READS if self.sluggish else SETTINGS
        ranks, pool = rng.choice((1, 2)), rng.choice((8, 12, 24))
        self.several = rng.random() < 0.5
        """Whether engines have several processes."""
        self.engines = [
            Engine(
                name,
                f"addr-{name}",
                rng.uniform(0.96, 1.04),
                rng.uniform(0, 1000),
                ranks,
                pool,
                settings,
                self.several,
            )
            for name in ("e0", "e1", "e2")
        ]
        self.traffic = Traffic(self)
        self.deaths = Deaths(self)
        self.network: list[tuple[str, str, bytes]] = []
        """(sender's address, receiver's address, message)."""
        self.held: dict[tuple[str, str], float] = {}
        """(sender's address, receiver's address) → until when messages wait."""
        self.connecting: list[tuple[Engine, Identity]] = []
        self.outcomes: Counter[str] = Counter()
        self.shortages: dict[Identity, tuple[float, float]] = {}
        """Engine's life → since when it has said, without a break, that it is short, and when last."""
        self.punctual = rng.random() < 0.7
        """Whether a tick that is due is never forgotten."""
        self.haste = rng.choice((0.2, 0.5, 0.8))
        """How much of the time passes in small steps, so that more happens before a deadline."""
        self.in_order = rng.random() < 0.5

    def acquaint(self) -> None:
        """All engines have shaken hands."""
        for engine in self.engines:
            for other in self.engines:
                if other is not engine:
                    self.feed(engine, ev.PeerWanted(other.address))
        while self.network or self.connecting:
            while self.network:
                _, address, raw = self.network.pop()
                receiver = self._listening(address)
                assert receiver is not None
                self.feed(receiver, ev.Received(decode(raw)))
            while self.connecting:
                engine, peer = self.connecting.pop()
                self.feed(engine, ev.PeerConnected(peer, None))

    # ---------------------------------------------------------------------------------- time and network

    def advance(self) -> bool:
        """A little, or to some moment before, at or past a deadline of some engine."""
        rng = self.rng
        if rng.random() < self.haste:
            self.time += rng.uniform(0.0, 0.1)
            return True
        due = [(at - e.offset) / e.rate for e in self.engines if (at := e.next_deadline()) is not None]
        target = min(due, default=self.time + 1.0)
        if not self.punctual and due and rng.random() < 0.3:
            target = rng.choice(due)
        self.time = max(self.time + 0.01, target + rng.choice((-0.1, 0.0, 0.0, 0.0, 0.05, 0.3)))
        for engine in self.engines:
            at = engine.next_deadline()
            if at is not None and self.now(engine) >= at and (self.punctual or rng.random() < 0.8):
                self.feed(engine, ev.Tick())
        return True

    def now(self, engine: Engine) -> float:
        return engine.offset + engine.rate * self.time

    def deliver(self) -> bool:
        """Some messages arrive: the oldest ones, or any."""
        rng, network = self.rng, self.network
        if not network:
            return False
        for _ in range(rng.choice((1, 2, 4))):
            if not network:
                break
            index = 0 if self.in_order else rng.randrange(len(network))
            if self.held and self.time < self.held.get(network[index][:2], 0.0):
                index = rng.randrange(len(network))
                if self.time < self.held.get(network[index][:2], 0.0):
                    return False
            self._arrive(*network.pop(index))
        return True

    def _arrive(self, _: str, address: str, raw: bytes) -> None:
        engine = self._listening(address)
        if engine is not None:
            envelope = decode(raw)
            self.wire.received(engine, envelope)
            self.feed(engine, ev.Received(envelope))

    def lose(self) -> bool:
        if self.network:
            self.network.pop(self.rng.randrange(len(self.network)))
        return bool(self.network)

    def duplicate(self) -> bool:
        if self.network:
            self.network.append(self.rng.choice(self.network))
        return bool(self.network)

    def hold(self) -> bool:
        """Messages from one engine to another wait."""
        one, other = self.rng.sample(self.engines, 2)
        self._hold(one.address, other.address, self.rng.uniform(0.5, 4.0))
        return True

    def _hold(self, sender: str, receiver: str, seconds: float) -> None:
        self.held[sender, receiver] = max(self.time + seconds, self.held.get((sender, receiver), 0.0))

    def connected(self) -> bool:
        if not self.connecting:
            return False
        engine, peer = self.connecting.pop(self.rng.randrange(len(self.connecting)))
        fine = self.living(peer) is not None and self.rng.random() < 0.95
        self.feed(engine, ev.PeerConnected(peer, None if fine else "no such memory"))
        return True

    # ----------------------------------------------------------------------------------------- transfers

    def land_some(self) -> bool:
        """Some bytes land, whatever became of the request, or of the process that sent them."""
        transfer = self._some_transfer()
        if transfer is not None and transfer.parts:
            transfer.land(self.rng.choice(list(transfer.parts)), self.rng)
        return transfer is not None

    def report(self) -> bool:
        """One rank's part of a transfer ends, mostly well."""
        return self._report(fine=True)

    def fail(self) -> bool:
        """One rank's part of a transfer ends with an error."""
        return self._report(fine=False)

    def _report(self, *, fine: bool) -> bool:
        transfer = self._some_transfer()
        if transfer is not None:
            self.end_part(transfer, self.rng.choice(list(transfer.parts)), fine=fine)
        return transfer is not None

    def _some_transfer(self) -> Transfer | None:
        moving = [transfer for transfer in self.wire.transfers if transfer.starts_at <= self.time]
        return self.rng.choice(moving) if moving else None

    def end_part(self, transfer: Transfer, rank: int, *, fine: bool) -> None:
        engine, key = transfer.poster, transfer.key
        if engine.identity != transfer.life:
            return  # the dead report nothing
        fine = fine and not transfer.broken
        if fine:
            transfer.land(rank, None)
        del transfer.parts[rank]
        if not transfer.parts:
            self.wire.transfers.remove(transfer)
        if isinstance(key, ev.WriteKey):
            self.feed(
                engine, ev.WriteLanded(key, rank) if fine else ev.WriteFailed(key, "connection reset", rank)
            )
        elif fine:
            self.feed(engine, ev.ReadLanded(key))
        else:
            self.feed(engine, ev.ReadFailed(key, transfer.peer, "connection reset"))

    def cut_off(self) -> bool:
        """A control connection breaks, whether or not the process on the other side has ended."""
        engine, other = self.rng.sample(self.engines, 2)
        self.feed(engine, ev.PeerGone(other.address))
        return True

    # ----------------------------------------------------------------------------------------- plumbing

    def living(self, life: Identity) -> Engine | None:
        """The engine that lives this life now."""
        return next((engine for engine in self.engines if engine.identity == life), None)

    def feed(self, engine: Engine, event: ev.Event) -> None:
        """An event goes in, and its effects are carried out."""
        if isinstance(event, ev.MemoryShort):
            now = self.now(engine)
            since, told = self.shortages.get(engine.identity, (now, now))
            self.shortages[engine.identity] = (since if now <= told + 1.0 else now, now)
        for effect in engine.handle(self.now(engine), event):
            self._carry_out(engine, effect)

    def _carry_out(self, engine: Engine, effect: ev.Effect) -> None:
        match effect:
            case ev.Send():
                self._send(engine, effect)
            case ev.ConnectPeer():
                self.connecting.append((engine, effect.peer))
            case ev.PostRead():
                source = self._named(effect.peer)
                self.wire.post_read(engine, source, engine.loads[effect.load], effect.peer, effect.copies)
                if self.sluggish:
                    self.wire.transfers[-1].starts_at = self.time + self.rng.choice(
                        (0.0, self.rng.uniform(1.5, 4.0))
                    )
            case ev.PostWrite():
                self.wire.post_write(
                    engine, self._named(effect.peer), effect.write, effect.peer, effect.copies
                )
            case ev.FreeBlocks():
                self._freed(engine, effect.blocks)
            case ev.Loaded():
                check(effect.load in engine.loads, "rule 7", f"{effect.load} ended twice")
                self.traffic.loaded(engine, engine.loads[effect.load], effect.tokens, effect.push)
            case ev.Missed():
                self.traffic.missed(engine, effect.load, effect.reason)
            case ev.WatchPeer():
                engine.watched.setdefault(effect.peer, effect.processes)
                self.deaths.look(effect.peer, "")
            case ev.Noted():
                if effect.reason is Reason.SOURCE_SHORT:
                    self._check_shortage(engine)
                self.outcomes[f"noted {effect.reason}"] += 1
            case ev.DisconnectPeer():
                pass

    def _check_shortage(self, engine: Engine) -> None:
        """What is queued for is given up only by an engine that has been short for long."""
        since, _ = self.shortages[engine.identity]
        lasted = self.now(engine) - since
        check(
            lasted >= engine.settings.short_s,
            "rule 3",
            f"{engine.name} was short for {lasted} s, and gives up",
        )

    def _send(self, engine: Engine, send: ev.Send) -> None:
        body = send.body
        if self.deaths.nameless(engine):
            return
        if isinstance(body, WrongEpoch) and body.wanted.engine_id == engine.name:
            # It has its names, so that each process which had one before has ended for certain.
            self.deaths.certain(body.wanted)
        if self.sluggish and isinstance(body, ClaimGranted) and self.rng.random() < 0.8:
            self._tease(engine, send, body)
        self.wire.sent(engine, send)
        self.network.append((engine.address, send.address, encode(engine.node.envelope(send))))

    def _tease(self, source: Engine, send: ev.Send, granted: ClaimGranted) -> None:
        """The answer comes late, renewals later still, and the bytes when the lease ends."""
        rng, lease = self.rng, granted.lease_s
        self._hold(source.address, send.address, lease * rng.uniform(0.2, 1.0))
        self._hold(send.address, source.address, lease * rng.uniform(1.0, 2.0))
        for transfer in self.wire.transfers:
            if transfer.key == granted.reader:
                transfer.starts_at = self.time + lease * rng.uniform(0.9, 1.9)

    def _freed(self, engine: Engine, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            check(engine.kept[block] > 0, "rule 2", f"{engine.name} frees {block}, not the ledger's")
            load = engine.targets.get(block)
            told = load is None or engine.loads.get(load.key) is not load
            check(told, "rule 2", f"{engine.name} frees {block} before its owner is told")
        self.wire.check_freed(engine, blocks)
        engine.let_go(blocks)

    def _listening(self, address: str) -> Engine | None:
        here = (engine for engine in self.engines if engine.address == address)
        return next((engine for engine in here if not self.deaths.nameless(engine)), None)

    def _named(self, life: Identity) -> Engine:
        return next(engine for engine in self.engines if engine.name == life.engine_id)

    def check_books(self, engine: Engine) -> None:
        """What the ledgers say they hold is what they were given."""
        node, counts = engine.node, [0] * engine.pool
        reads, grants = node.reads, node.grants
        for held in (
            node.offers.blocks(),
            reads.loading(),
            reads.quarantined(),
            grants.granted(),
            grants.quarantined(),
        ):
            for block in held:
                counts[block] += 1
        self.outcomes["quarantined read"] += bool(reads.quarantined())
        self.outcomes["quarantined grant"] += bool(grants.quarantined())
        check(
            counts == engine.kept, "rule 4", f"{engine.name}: ledgers hold {counts}, were given {engine.kept}"
        )
