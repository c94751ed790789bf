"""A toy engine for the random schedules: blocks with labels instead of KV, and who holds each of them.

Memory holds, per block and shard, a label of what was written there last: the block's token-chain hash, or
poison. A block is held by the engine's own requests, by the ledgers, or by both, and is poisoned and free
when nobody holds it any more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.handoff.events import Effect, Event
from kvhandoff.handoff.messages import PROTOCOL_VERSION, Hello, OfferRef
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.settings import HandoffSettings

BLOCK_SIZE = 4
SHARDS = 2
"""Parts of each block; two writing ranks write one each."""
POISON = b"poison"
LAYOUT = KVLayout(
    order="block", dtype="label", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, block_bytes=1
)
ROOTS = tuple(chain_root("model", LAYOUT.fingerprint(), salt) for salt in ("a", "b"))

Path = Literal["pull", "push", "local"]
"""How a prompt's KV leaves the engine that computes it, if at all."""
Memory = tuple[list[bytes], ...]
"""One list of labels a shard."""


class RuleBroken(AssertionError):
    """One of the rules of docs/protocol.md did not hold."""


def check(holds: bool, rule: str, detail: str) -> None:
    """Raise RuleBroken unless `holds`. For hot paths: an f-string is built whether or not it is needed."""
    if not holds:
        raise RuleBroken(f"{rule}: {detail}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids under one salt, and what its blocks have to hold."""

    salt: int
    tokens: tuple[int, ...]
    chain: TokenChain
    labels: tuple[bytes, ...]
    """One a block, the partial one included."""


@lru_cache(maxsize=20_000)
def prompt(salt: int, tokens: tuple[int, ...]) -> Prompt:
    chain = TokenChain.of(ROOTS[salt], BLOCK_SIZE, tokens)
    return Prompt(salt, tokens, chain, (*chain.blocks, *([chain.tail] if chain.tail else [])))


@dataclass(slots=True, eq=False)
class Load:
    """A request that waits for KV from another engine, until that has ended one way or the other."""

    key: HandoffKey
    prompt: Prompt
    offer: OfferRef
    path: Literal["pull", "push", "return"]
    min_tokens: int = 1
    job: Job | None = None
    """The prompt whose beginning it is to bring; None: it is a decode leg's."""
    blocks: tuple[int, ...] | None = None
    """The prompt's blocks, or its first ones; those from `cached` on are the ledger's."""
    cached: int = 0
    waits: bool = True
    """Until it is loaded, missed or dropped."""

    @property
    def targets(self) -> tuple[int, ...]:
        return () if self.blocks is None else self.blocks[self.cached :]


@dataclass(slots=True, eq=False)
class Job:
    """A prompt that an engine computes chunk by chunk."""

    key: HandoffKey
    prompt: Prompt
    path: Path
    load: Load | None = None
    blocks: tuple[int, ...] | None = None
    """The prompt's; after a load perhaps only its first ones."""
    ready: int = 0
    """Leading blocks that hold their content."""
    grown: int = 0
    """Of a push: leading blocks that the ledger was told of."""


@dataclass(slots=True)
class Running:
    """A request that decodes."""

    key: HandoffKey
    prompt: Prompt
    blocks: tuple[int, ...]


@dataclass(eq=False)
class Engine:
    """One engine: a node, memory, who holds which block, and the processes that it runs in."""

    name: str
    address: str
    rate: float
    offset: float
    ranks: int
    pool: int
    """How many blocks it has."""
    settings: HandoffSettings
    several: bool = False
    """Whether each writing rank is a process of its own, beside the node's."""
    life: int = 0
    node: HandoffNode = field(init=False)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new life: nothing of the former one is left."""
        self.life += 1
        self.identity = Identity(EngineId(self.name), Epoch(f"{self.life}"))
        self.memory = tuple([POISON] * self.pool for _ in range(SHARDS))
        self.free = list(range(self.pool))
        self.held = [0] * self.pool
        """Per block, how many of the engine's own requests hold it."""
        self.kept = [0] * self.pool
        """Per block, how many references the ledgers own."""
        self.targets: dict[int, Load] = {}
        """Blocks that the ledger had handed to it to load into."""
        self.cache: dict[bytes, int] = {}
        """The prefix cache: content → a block that holds it."""
        self.loads: dict[HandoffKey, Load] = {}
        self.jobs: dict[HandoffKey, Job] = {}
        self.running: list[Running] = []
        self.watched: dict[Identity, tuple[str, ...]] = {}
        """Lives whose end the operating system tells it of, and their processes."""
        self.processes: tuple[str, ...] = (f"{self.identity}",)
        if self.several:
            self.processes += tuple(f"{self.identity}/{rank}" for rank in range(self.ranks))
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint="model",
            layout=LAYOUT,
            num_blocks=self.pool,
            data_plane="toy",
            data_plane_metadata=b"",
            processes=self.processes,
        )
        self.node = HandoffNode(self.identity, self.address, hello, self.settings, ranks=self.ranks, log=16)

        self._due: float | None = None
        self._due_known = True

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Something happens to the node."""
        self._due_known = False
        return self.node.handle(now, event)

    def next_deadline(self) -> float | None:
        """The node's, on this engine's clock; asked for again only after something has happened to it."""
        if not self._due_known:
            self._due, self._due_known = self.node.next_deadline(), True
        return self._due

    def mover(self, rank: int) -> str:
        """The process that moves a rank's bytes."""
        return self.processes[1 + rank] if self.several else self.processes[0]

    # ------------------------------------------------------------------------------------------ blocks

    def take(self, count: int, rng: random.Random) -> tuple[int, ...]:
        """Free blocks in any order, so that neighbours in a prompt are none in memory."""
        rng.shuffle(self.free)
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        for block in taken:
            self.held[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One of the engine's requests holds them too."""
        for block in blocks:
            self.held[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One of the engine's requests holds them no more."""
        for block in blocks:
            self.held[block] -= 1
            self._recycle(block)

    def keep(self, blocks: Iterable[int]) -> None:
        """The ledgers own one more reference."""
        for block in blocks:
            self.kept[block] += 1

    def let_go(self, blocks: Iterable[int]) -> None:
        """The ledgers own one less."""
        for block in blocks:
            self.kept[block] -= 1
            self.targets.pop(block, None)
            self._recycle(block)

    def _recycle(self, block: int) -> None:
        if self.held[block] or self.kept[block]:
            return
        for shard in self.memory:
            if self.cache.get(shard[block]) == block:
                del self.cache[shard[block]]
            shard[block] = POISON
        self.free.append(block)

    def write(self, block: int, label: bytes) -> None:
        """The engine itself computes a block."""
        for shard in self.memory:
            shard[block] = label

    def holds(self, blocks: Iterable[int], labels: Iterable[bytes]) -> bool:
        """Whether these blocks hold this content, every shard of it."""
        return all(
            shard[block] == label
            for block, label in zip(blocks, labels, strict=False)
            for shard in self.memory
        )

    def publish(self, prompt: Prompt, blocks: Iterable[int]) -> None:
        """Full blocks go into the prefix cache."""
        for label, block in zip(prompt.chain.blocks, blocks, strict=False):
            self.cache.setdefault(label, block)

    def cached_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """Blocks that hold the prompt's first blocks already."""
        found = []
        for label in prompt.chain.blocks:
            block = self.cache.get(label)
            if block is None:
                break
            found.append(block)
        return tuple(found)
