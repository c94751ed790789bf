"""What moves between the toy engines: transfers, and the promises that were sent about them.

A transfer's bytes land in any order and at any time until each of its ranks has reported. Those of a dead
process land until its death is certain, and those of one that outlives its engine as long as it runs.
Promises (grants, fences, commits) are read off the messages as they are sent, and held against what the
transfers do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.spans import Copy, to_blocks
from kvhandoff.handoff.events import Send, WriteKey
from kvhandoff.handoff.messages import Commit, Envelope, Fenced, Grant, Progress
from tests.handoff.toy import SHARDS, Engine, Load, RuleBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.handoff.toy import Memory

GrantId = tuple[Identity, int]


@dataclass(slots=True, eq=False)
class Transfer:
    """A read or a write under way."""

    poster: Engine
    life: Identity
    """The poster's; another life of the engine hears nothing of it."""
    key: HandoffKey | WriteKey
    peer: Identity
    source: Memory
    """The memory of the life that it takes from: that of a dead process stays as it was."""
    engine: Engine
    """Where the bytes land, if `memory` is still that engine's."""
    memory: Memory
    load: Load
    positions: dict[int, int]
    """Target block → its position in the prompt."""
    pairs: tuple[tuple[int, int], ...]
    """(source block, target block)."""
    parts: dict[int, set[tuple[int, int, int]]]
    """Rank that has not reported → (shard, source block, target block) that has not landed."""
    movers: tuple[str, ...]
    """By rank, the process that moves its part."""
    starts_at: float = 0.0
    """Nothing lands before."""
    broken: bool = False
    """It can't be posted: nothing lands, and an error is reported."""

    @property
    def is_write(self) -> bool:
        return isinstance(self.key, WriteKey)

    def land(self, rank: int, rng: random.Random | None) -> None:
        """Some of a rank's bytes land (`rng` None: the rest), whatever became of the request."""
        parts = self.parts[rank]
        if self.broken or not parts:
            return
        alive = self.engine.memory is self.memory
        for part in sorted(parts) if rng is not None else list(parts):
            if rng is not None and rng.random() < 0.5:
                continue
            parts.remove(part)
            shard, source, target = part
            label = self.source[shard][source]
            if alive:
                self._check(label, target)
            self.memory[shard][target] = label

    def _check(self, label: bytes, target: int) -> None:
        if self.engine.targets.get(target) is not self.load:
            raise RuleBroken(f"rule 2: bytes of {self.key} land in {target} of {self.engine.name}, re-issued")
        if self.is_write and label != self.load.prompt.labels[self.positions[target]]:
            raise RuleBroken(f"rule 1: {self.key} writes what {self.load.key} is not about")


@dataclass(slots=True)
class Promise:
    """A grant, and what has been said under it."""

    load: Load
    offer: HandoffKey
    memory: Memory
    positions: dict[int, int] = field(default_factory=dict)
    """Granted block → its position; empty until the grant names them."""
    over: set[Identity] = field(default_factory=set)
    """Writers that have said `Fenced` or `Commit`."""
    committed: set[int] = field(default_factory=set)
    """Ranks whose commit has arrived."""


class Wire:
    """All transfers, and all grants by destination's life and number."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.grants: dict[GrantId, Promise] = {}
        self.heads: dict[tuple[Identity, HandoffKey], Load] = {}
        """(source's life, offer) → the latest attempt's load that the source says it is writing for."""

    # ------------------------------------------------------------------------------------- transfers

    def post_read(
        self, reader: Engine, source: Engine, load: Load, peer: Identity, copies: tuple[Copy, ...]
    ) -> None:
        pairs = tuple((remote + i, local + i) for remote, local, count in copies for i in range(count))
        for remote, local in pairs:
            if not 0 <= remote < source.pool:
                raise RuleBroken(f"rule 2: remote block {remote} is outside the pool")
            if reader.targets.get(local) is not load:
                raise RuleBroken(f"rule 2: target {local} of {load.key} is not the ledger's")
        parts = {0: {(shard, *pair) for pair in pairs for shard in range(SHARDS)}}
        self.transfers.append(
            Transfer(
                reader,
                reader.identity,
                load.key,
                peer,
                source.memory,
                reader,
                reader.memory,
                load,
                {},
                pairs,
                parts,
                (reader.mover(0),),
                broken=source.identity != peer,
            )
        )

    def post_write(
        self, writer: Engine, target: Engine, key: WriteKey, peer: Identity, copies: tuple[Copy, ...]
    ) -> None:
        me, promise = writer.identity, self.grants.get((key.grantee, key.number))
        if promise is None or key.grantee != peer:
            raise RuleBroken(f"rule 2: {me} writes {key}, which was never granted")
        if me in promise.over:
            raise RuleBroken(f"rule 2: {me} writes {key} after its word that it would not")
        self._check_latest(me, promise)
        pairs = tuple((local + i, remote + i) for local, remote, count in copies for i in range(count))
        labels = promise.load.prompt.labels
        for local, remote in pairs:
            if remote not in promise.positions:
                raise RuleBroken(f"rule 2: {me} writes into {remote}, which {key} does not grant")
            if not writer.kept[local]:
                raise RuleBroken(f"rule 2: {me} writes from {local}, not the ledger's")
            if not writer.holds((local,), (labels[promise.positions[remote]],)):
                raise RuleBroken(f"rule 1: {me} writes {key}, but {local} is not what was granted for")
        shards = range(SHARDS)
        parts = {
            rank: {(shard, *pair) for pair in pairs for shard in shards if writer.ranks == 1 or shard == rank}
            for rank in range(writer.ranks)
        }
        self.transfers.append(
            Transfer(
                writer,
                me,
                key,
                peer,
                writer.memory,
                target,
                promise.memory,
                promise.load,
                promise.positions,
                pairs,
                parts,
                tuple(writer.mover(rank) for rank in parts),
                broken=target.identity != peer,
            )
        )

    def check_freed(self, engine: Engine, blocks: tuple[int, ...]) -> None:
        """No transfer may still take from these blocks, or land in them."""
        for transfer in self.transfers:
            if transfer.memory is engine.memory:
                early = {target for _, target in transfer.pairs}.intersection(blocks)
                if early:
                    raise RuleBroken(
                        f"rule 2: {engine.name} frees {early}, {transfer.key} may still land there"
                    )
            if transfer.is_write and transfer.source is engine.memory:
                early = {b for b, _ in transfer.pairs if b in blocks and engine.kept[b] == 1}
                if early:
                    raise RuleBroken(
                        f"rule 2: {engine.name} frees {early}, {transfer.key} still takes from there"
                    )

    def died(self, life: Identity, ended: set[str]) -> None:
        """It is certain that those processes of this life that have ended have: nothing of what they wrote is
        under way any more."""
        for transfer in self.transfers:
            if transfer.life == life:
                for rank in [rank for rank in transfer.parts if transfer.movers[rank] in ended]:
                    del transfer.parts[rank]
        self.transfers = [transfer for transfer in self.transfers if transfer.parts]

    # -------------------------------------------------------------------------------------- promises

    def sent(self, engine: Engine, send: Send) -> None:
        """What a message promises holds as it is sent."""
        body, me = send.body, engine.identity
        match body:
            case Grant():
                self._granted(engine, body)
            case Progress():
                promise = self._promise(send, body.number)
                self._check_latest(me, promise)
                self.heads[me, promise.offer] = promise.load
            case Fenced():
                promise = self._promise(send, body.number)
                for transfer in self._under(send, body.number):
                    raise RuleBroken(f"rule 2: {me} says that {transfer.key} is fenced, it is in flight")
                promise.over.add(me)
                if self.heads.get((me, promise.offer)) is promise.load:
                    del self.heads[me, promise.offer]
            case Commit():
                promise = self._promise(send, body.number)
                for transfer in self._under(send, body.number):
                    if body.rank in transfer.parts:
                        raise RuleBroken(f"rule 1: {me} commits, {transfer.key} has not landed")
                shards = range(SHARDS) if body.ranks == 1 else (body.rank,)
                labels = promise.load.prompt.labels
                for target, position in promise.positions.items():
                    if (
                        any(promise.memory[shard][target] != labels[position] for shard in shards)
                        and me not in promise.over
                    ):
                        raise RuleBroken(f"rule 1: {me} commits {promise.load.key}, {target} is not written")
                if body.rank == body.ranks - 1:
                    promise.over.add(me)

    def received(self, engine: Engine, envelope: Envelope) -> None:
        """A message has arrived, and is about to be handled."""
        body = envelope.body
        if isinstance(body, Commit) and envelope.target == engine.identity:
            self.grants[engine.identity, body.number].committed.add(body.rank)

    def check_committed(self, engine: Engine, commit: Commit) -> None:
        """A pushed load is complete when each rank has said so."""
        missing = set(range(commit.ranks)) - self.grants[engine.identity, commit.number].committed
        if missing:
            raise RuleBroken(f"rule 1: loaded by {commit}, but no commit has come of ranks {missing}")

    def _granted(self, engine: Engine, grant: Grant) -> None:
        load = engine.loads.get(grant.reader)
        if load is None:
            raise RuleBroken(f"rule 2: {engine.name} grants for {grant.reader}, which has ended")
        promise = self.grants.get((engine.identity, grant.number))
        if promise is None:
            promise = self.grants[engine.identity, grant.number] = Promise(load, grant.offer, engine.memory)
        if promise.load is not load:
            raise RuleBroken(f"rule 2: grant {grant.number} of {engine.identity} is for two loads")
        if grant.spans is None:
            return
        blocks = to_blocks(grant.spans)
        for block in blocks:
            if engine.targets.get(block) is not load:
                raise RuleBroken(f"rule 2: {engine.name} grants {block} for {load.key}, not the ledger's")
        promise.positions = {block: grant.first_block + i for i, block in enumerate(blocks)}

    def _check_latest(self, source: Identity, promise: Promise) -> None:
        latest = self.heads.get((source, promise.offer), promise.load)
        if latest.waits and promise.load.key.attempt < latest.key.attempt:
            raise RuleBroken(
                f"rule 5: {source} goes on with {promise.load.key}, it has promised {latest.key}"
            )

    def _promise(self, send: Send, number: int) -> Promise:
        assert send.target is not None
        promise = self.grants.get((send.target, number))
        if promise is None:
            raise RuleBroken(f"rule 2: an answer to grant {number} of {send.target}, which gave none")
        return promise

    def _under(self, send: Send, number: int) -> Iterator[Transfer]:
        """Transfers in flight under a grant."""
        for transfer in self.transfers:
            key = transfer.key
            if isinstance(key, WriteKey) and (key.grantee, key.number) == (send.target, number):
                yield transfer
