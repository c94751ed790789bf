"""A small world for the protocol: engines with few blocks, a bad network, crashes, and late bytes.

Each engine is a real `HandoffNode` with a toy engine around it. Memory holds, per block, a label of the
content written last: the block's token-chain hash, or poison. Everything that could happen at some moment is
one of `World.actions()`; a schedule is a sequence of choices among them. Rules are checked as they may break:

1. right KV or none     - `Loaded`: the request's blocks hold the labels of its own chain
2. no use after free    - bytes land only in blocks the ledger owns; frees only of blocks it owns; no offer is
                          freed while a reader may trust its claim
3. no wait without end  - `settle()`: with no further choice, every read ends by the deadlines alone
4. no leak              - `settle()`: every pool is back at its baseline
7. a reason for each    - each read ends exactly once: loaded, missed with a reason, or dropped
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Copy, to_spans
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import PROTOCOL_VERSION, Hello, OfferDescriptor, decode, encode
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.settings import HandoffSettings

BLOCK_SIZE = 4
POOL_BLOCKS = 10
POISON = b"poison"
SETTINGS = HandoffSettings(
    offer_lease_s=3.0,
    claim_lease_s=2.0,
    handshake_s=2.0,
    claim_s=2.0,
    read_s=2.5,
    retry_s=0.25,
    remembered=64,
)
LAYOUT = KVLayout(
    order="block", dtype="label", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, block_bytes=1
)
TOKENS = [  # shared prefixes, block-aligned and not
    list(range(16)),
    [*range(8), 50, 51, 52, 53, 54, 55],
    [*range(6), 60],
    [70, 71, 72, 73],
]
ROOTS = [chain_root("model", LAYOUT.fingerprint(), salt) for salt in ("a", "b")]


class RuleBroken(AssertionError):
    """One of the rules of docs/protocol.md did not hold."""


def check(holds: bool, rule: str, detail: str) -> None:
    if not holds:
        raise RuleBroken(f"{rule}: {detail}")


def labels(chain: TokenChain) -> list[bytes]:
    return [*chain.blocks, *([chain.tail] if chain.tail else [])]


@dataclass
class Read:
    """A request on the destination, until it has ended."""

    key: HandoffKey
    chain: TokenChain
    descriptor: OfferDescriptor
    blocks: tuple[int, ...] | None = None
    cached: int = 0
    outcome: str | None = None


@dataclass
class Transfer:
    """Bytes on their way; any part may land at any time until the end is reported."""

    engine: Engine
    read: HandoffKey
    source: Engine
    source_memory: list[bytes]
    """The memory of the life it reads from: that of a dead process stays as it was."""
    pairs: list[tuple[int, int]]
    landed: set[int] = field(default_factory=set)


@dataclass
class Engine:
    """One engine process: a node, memory, and who holds which block."""

    name: str
    address: str
    rate: float
    offset: float
    life: int = 0
    node: HandoffNode = field(init=False)
    memory: list[bytes] = field(init=False)
    free: list[int] = field(init=False)
    engine_owned: set[int] = field(init=False)
    ledger_owned: set[int] = field(init=False)
    reads: dict[HandoffKey, Read] = field(init=False)
    running: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.life += 1
        self.memory = [POISON] * POOL_BLOCKS
        self.free = list(range(POOL_BLOCKS))
        self.engine_owned, self.ledger_owned = set(), set()
        self.reads, self.running = {}, []
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint="model",
            layout=LAYOUT,
            num_blocks=POOL_BLOCKS,
            data_plane="toy",
            data_plane_metadata=b"",
        )
        self.node = HandoffNode(self.identity, self.address, hello, SETTINGS)

    @property
    def identity(self) -> Identity:
        return Identity(EngineId(self.name), Epoch(f"{self.life}"))

    def take(self, count: int, rng: random.Random) -> tuple[int, ...]:
        """Blocks in any order, so that neighbours are not neighbours."""
        rng.shuffle(self.free)
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def give_back(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.memory[block] = POISON
        self.free += blocks


class World:
    """Two prefill engines, two decode engines, one schedule."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.time = 0.0
        self.engines = [
            Engine(name, f"addr-{name}", self.rng.uniform(0.98, 1.02), self.rng.uniform(0, 1000))
            for name in ("p0", "p1", "d0", "d1")
        ]
        self.network: list[tuple[str, bytes]] = []
        self.offers: list[tuple[OfferDescriptor, TokenChain]] = []
        self.transfers: list[Transfer] = []
        self.connecting: list[tuple[Engine, Identity]] = []
        self.serial = 0
        self.outcomes: dict[str, int] = {}
        self.log: list[str] = []

    # ------------------------------------------------------------------------------------- the schedule

    def actions(self) -> list[Callable[[], None]]:
        """Whatever could happen now; likelier things stand more than once."""
        prefills, decodes = self.engines[:2], self.engines[2:]
        possible: list[Callable[[], None]] = [self.advance, self.advance]
        possible += [lambda e=e: self.prefill(e) for e in prefills if len(e.free) >= 4]
        if self.offers:
            possible += [lambda e=e: self.want(e) for e in decodes] * 2
        for engine in decodes:
            for read in engine.reads.values():
                if read.blocks is None:
                    possible += [lambda e=engine, r=read: self.allocate(e, r)] * 2
                if self.rng.random() < 0.2:
                    possible.append(lambda e=engine, r=read: self.drop(e, r))
            if engine.running:
                possible.append(lambda e=engine: self.finish(e))
        if self.network:
            possible += [self.deliver] * 8 + [self.lose, self.duplicate]
        if self.transfers:
            possible += [self.land_some] * 2 + [self.report] * 2
        if self.connecting:
            possible += [self.connected] * 4
        if self.rng.random() < 0.06:
            possible += [lambda e=e: self.crash(e) for e in self.engines]
        if self.rng.random() < 0.1:
            possible.append(self.withdraw)
        if self.rng.random() < 0.06:
            possible += [lambda e=e: self.cut_off(e) for e in decodes]
        return possible

    def step(self) -> None:
        """One choice, then every deadline that is due."""
        self.rng.choice(self.actions())()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()

    def settle(self) -> None:
        """No further choice: messages arrive, transfers end, deadlines pass. All must come to an end."""
        for _ in range(300):  # far beyond what the deadlines and retries of a few reads need
            while self.network:
                self.deliver()
            while self.connecting:
                self.connected()
            for transfer in list(self.transfers):
                self.end_transfer(transfer, fine=True)
            for engine in self.engines:
                for read in list(engine.reads.values()):
                    if read.key in engine.reads and read.blocks is None:
                        self.allocate(engine, read)
                while engine.running:
                    self.finish(engine)
            if self.network or self.connecting or self.transfers:
                continue
            if all(engine.node.next_deadline() is None for engine in self.engines):
                break
            self.advance()
        for engine in self.engines:
            check(not engine.reads, "rule 3", f"{engine.name} still waits for {list(engine.reads)}")
            check(
                sorted(engine.free) == list(range(POOL_BLOCKS)),
                "rule 4",
                f"{engine.name}: free {sorted(engine.free)}, ledger {engine.ledger_owned}",
            )
            node = engine.node
            held = node.offers.blocks() + node.reads.loading() + node.reads.quarantined()
            check(not held, "rule 4", f"{engine.name}: ledger holds {held}")

    # -------------------------------------------------------------------------------------- what happens

    def advance(self) -> None:
        """To some moment up to or past the next deadline of any engine."""
        due = [
            (deadline - e.offset) / e.rate
            for e in self.engines
            if (deadline := e.node.next_deadline()) is not None
        ]
        target = min(due, default=self.time + 1.0)
        self.time = max(self.time + 0.01, target + self.rng.choice((-0.1, 0.0, 0.0, 0.05, 1.0)))
        for engine in self.engines:
            deadline = engine.node.next_deadline()
            if deadline is not None and self.now(engine) >= deadline:
                self.feed(engine, ev.Tick())

    def prefill(self, engine: Engine) -> None:
        chain = self._some_chain()
        blocks = engine.take(chain.n_blocks, self.rng)
        for block, label in zip(blocks, labels(chain), strict=True):
            engine.memory[block] = label
        self.serial += 1
        key = HandoffKey(HandoffId(f"h{self.serial}"), 0)
        descriptor = OfferDescriptor(
            key=key,
            source=engine.identity,
            control_address=engine.address,
            spans=to_spans(blocks),
            n_tokens=chain.n_tokens,
            digest=chain.digest(),
        )
        self.offers.append((descriptor, chain))
        engine.ledger_owned |= set(blocks)
        self.feed(engine, ev.Offered(key, chain, blocks))

    def want(self, engine: Engine) -> None:
        """A decode leg: of the right prompt mostly, else of another one, an old or a forged reference."""
        descriptor, chain = self.rng.choice(self.offers[-6:])
        if self.rng.random() < 0.2:
            chain = self._some_chain()
        if self.rng.random() < 0.05:
            descriptor = OfferDescriptor(
                key=descriptor.key,
                source=descriptor.source,
                control_address=descriptor.control_address,
                spans=((POOL_BLOCKS - 1, chain.n_blocks),),
                n_tokens=chain.n_tokens,
                digest=chain.digest(),
            )
        self.serial += 1
        read = Read(HandoffKey(descriptor.key.handoff_id, self.serial), chain, descriptor)
        engine.reads[read.key] = read
        self.feed(engine, ev.ReadWanted(read.key, descriptor, chain))

    def allocate(self, engine: Engine, read: Read) -> None:
        wanted = labels(read.chain)
        if len(engine.free) < len(wanted):
            return
        read.blocks = engine.take(len(wanted), self.rng)
        read.cached = self.rng.randrange(len(wanted))
        for block, label in zip(read.blocks[: read.cached], wanted, strict=False):
            engine.memory[block] = label
        engine.engine_owned |= set(read.blocks[: read.cached])
        engine.ledger_owned |= set(read.blocks[read.cached :])
        self.feed(engine, ev.ReadAllocated(read.key, read.blocks, read.cached))

    def drop(self, engine: Engine, read: Read) -> None:
        self._end_read(engine, read, "dropped")
        self.feed(engine, ev.ReadDropped(read.key, done=self.rng.random() < 0.5))

    def withdraw(self) -> None:
        if self.offers:
            descriptor, _ = self.rng.choice(self.offers)
            for engine in self.engines:
                if engine.identity == descriptor.source:
                    self.feed(engine, ev.Withdrawn(descriptor.key))

    def finish(self, engine: Engine) -> None:
        blocks = engine.running.pop(self.rng.randrange(len(engine.running)))
        engine.engine_owned -= set(blocks)
        engine.give_back(blocks)

    def crash(self, engine: Engine) -> None:
        """kill -9 and a new life, at the same or at another address. What it was reading into is gone."""
        self.transfers = [t for t in self.transfers if t.engine is not engine]
        self.connecting = [(e, peer) for e, peer in self.connecting if e is not engine]
        if self.rng.random() < 0.3:
            engine.address = f"addr-{engine.name}-{engine.life}"
        engine.start()

    def cut_off(self, engine: Engine) -> None:
        """A control connection breaks, whether or not the process on the other side has ended."""
        self.feed(engine, ev.PeerGone(self.rng.choice(self.engines[:2]).address))

    def deliver(self) -> None:
        address, raw = self.network.pop(self.rng.randrange(len(self.network)))
        for engine in self.engines:
            if engine.address == address:
                self.feed(engine, ev.Received(decode(raw)))

    def lose(self) -> None:
        self.network.pop(self.rng.randrange(len(self.network)))

    def duplicate(self) -> None:
        self.network.append(self.rng.choice(self.network))

    def connected(self) -> None:
        engine, peer = self.connecting.pop(self.rng.randrange(len(self.connecting)))
        alive = any(other.identity == peer for other in self.engines)
        fine = alive and self.rng.random() < 0.95
        self.feed(engine, ev.PeerConnected(peer, None if fine else "no such memory"))

    def land_some(self) -> None:
        """Some of the bytes land, whatever became of the request."""
        self._land(self.rng.choice(self.transfers), all_of_it=False)

    def report(self) -> None:
        self.end_transfer(self.rng.choice(self.transfers), fine=self.rng.random() < 0.85)

    def end_transfer(self, transfer: Transfer, *, fine: bool) -> None:
        self.transfers.remove(transfer)
        if fine:
            self._land(transfer, all_of_it=True)
            self.feed(transfer.engine, ev.TransferLanded(transfer.read))
        else:
            self.feed(transfer.engine, ev.TransferFailed(transfer.read, "connection reset"))

    # ----------------------------------------------------------------------------------------- plumbing

    def now(self, engine: Engine) -> float:
        return engine.offset + engine.rate * self.time

    def feed(self, engine: Engine, event: ev.Event) -> None:
        now = self.now(engine)
        for effect in engine.node.handle(now, event):
            self._carry_out(engine, effect)

    def _carry_out(self, engine: Engine, effect: ev.Effect) -> None:
        match effect:
            case ev.Send():
                self.network.append((effect.address, encode(engine.node.envelope(effect))))
            case ev.ConnectPeer():
                self.connecting.append((engine, effect.peer))
            case ev.PostRead():
                self._post(engine, effect.read, effect.peer, effect.copies)
            case ev.FreeBlocks():
                self._freed(engine, effect.blocks)
            case ev.Loaded():
                self._loaded(engine, engine.reads[effect.read], effect.tokens)
            case ev.Missed():
                check(isinstance(effect.reason, Reason), "rule 7", f"{effect.reason!r} is no reason")
                check(effect.read in engine.reads, "rule 7", f"{effect.read} ended twice")
                self._end_read(engine, engine.reads[effect.read], effect.reason)
            case ev.Noted() | ev.DisconnectPeer():
                pass

    def _post(self, engine: Engine, key: HandoffKey, peer: Identity, copies: tuple[Copy, ...]) -> None:
        source = next(e for e in self.engines if e.name == peer.engine_id)
        pairs = [(remote + i, local + i) for remote, local, count in copies for i in range(count)]
        for remote, local in pairs:
            check(0 <= remote < POOL_BLOCKS, "rule 2", f"remote block {remote} is outside the pool")
            check(local in engine.ledger_owned, "rule 2", f"target {local} is not the ledger's")
        transfer = Transfer(engine, key, source, source.memory, pairs)
        if source.identity == peer:
            self.transfers.append(transfer)
        else:
            self.feed(engine, ev.TransferFailed(key, f"{peer} is gone"))

    def _land(self, transfer: Transfer, *, all_of_it: bool) -> None:
        engine = transfer.engine
        for index, (remote, local) in enumerate(transfer.pairs):
            if index in transfer.landed or (not all_of_it and self.rng.random() < 0.5):
                continue
            transfer.landed.add(index)
            check(
                local in engine.ledger_owned, "rule 2", f"bytes landed in {local} of {engine.name}, re-issued"
            )
            engine.memory[local] = transfer.source_memory[remote]

    def _freed(self, engine: Engine, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            check(block in engine.ledger_owned, "rule 2", f"{engine.name} frees {block}, not the ledger's")
        for read in engine.reads.values():
            early = set(read.blocks or ()) & set(blocks)
            check(not early, "rule 2", f"{engine.name} frees {early} before {read.key} is told, its owner")
        for transfer in self.transfers:
            if transfer.engine is engine:
                unsafe = {local for _, local in transfer.pairs} & set(blocks)
                check(not unsafe, "rule 2", f"{engine.name} frees {unsafe}, a transfer may still land there")
        engine.ledger_owned -= set(blocks)
        engine.give_back(blocks)

    def _loaded(self, engine: Engine, read: Read, tokens: int) -> None:
        check(read.blocks is not None, "rule 1", f"{read.key} loaded without blocks")
        assert read.blocks is not None
        covered = labels(read.chain)[: -(-tokens // BLOCK_SIZE)]
        held = [engine.memory[block] for block in read.blocks[: len(covered)]]
        check(held == covered, "rule 1", f"{read.key} got {held}, its own chain is {covered}")
        engine.ledger_owned -= set(read.blocks)
        engine.engine_owned |= set(read.blocks)
        engine.running.append(read.blocks)
        read.blocks = None
        self._end_read(engine, read, "loaded")

    def _end_read(self, engine: Engine, read: Read, outcome: str) -> None:
        del engine.reads[read.key]
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if read.blocks is not None:
            cached = read.blocks[: read.cached]
            engine.engine_owned -= set(cached)
            engine.give_back(cached)

    def _some_chain(self) -> TokenChain:
        tokens = self.rng.choice(TOKENS)
        return TokenChain.of(self.rng.choice(ROOTS), BLOCK_SIZE, tokens)
