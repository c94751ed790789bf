"""The data plane of one rank of an engine that is divided into ranks.

Each rank has a process, a region and a data plane of its own, and moves blocks from and to those ranks of
another engine that hold the same KV heads. A transfer of the engine is over when each rank's is, and a rank's
when its transfers with all ranks over there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import msgspec

from kvhandoff.core.ids import EngineId, Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import (
    Handle,
    HeadRange,
    Operation,
    Region,
    StagedPlane,
    TransferState,
    TransportError,
)
from kvhandoff.transport.rank_plan import Exchange, heads_of, rank_plan

MAX_RANKS = 64
"""Of an engine: they are all on one host."""
MAX_RANK_BYTES = 1 << 20
"""Of one rank's metadata: a thousand pieces of a block and a few network devices take a tenth."""

_RankBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_RANK_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


class _Ranks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ranks"):
    """An engine's metadata."""

    ranks: Annotated[tuple[_RankBytes, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class _Heads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first: _Index
    count: _Count
    total: _Count


class _Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rank"):
    """One rank's metadata."""

    rank: _Index
    ranks: _Count
    heads: _Heads | None
    plane: bytes
    """Its data plane's metadata."""

    @property
    def held(self) -> HeadRange | None:
        held = self.heads
        return None if held is None else HeadRange(held.first, held.count, held.total)


_encoder = msgspec.msgpack.Encoder()
_ranks_decoder = msgspec.msgpack.Decoder(_Ranks)
_rank_decoder = msgspec.msgpack.Decoder(_Rank)


def encode_ranks(metadata: Sequence[bytes]) -> bytes:
    """An engine's metadata: those of its ranks, in their order. Raises ValueError for what `decode_ranks`
    would refuse."""
    encoded = _encoder.encode(_Ranks(tuple(metadata)))
    decode_ranks(encoded)
    return encoded


def decode_ranks(metadata: bytes) -> tuple[bytes, ...]:
    """The metadata of an engine's ranks, in their order. Raises ValueError if malformed."""
    try:
        return _ranks_decoder.decode(metadata).ranks
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed metadata of ranks ({error})") from error


@dataclass(frozen=True, slots=True)
class _Peer:
    """A connected engine."""

    ranks: dict[int, Identity]
    """Its ranks that are connected, under the names that the data plane knows them by."""
    plans: dict[Operation, list[Exchange]]


@dataclass(eq=False, slots=True)
class _Spread:
    """A transfer: its parts, each with another rank of the peer."""

    parts: list[Handle]
    error: str | None = None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


class RankedPlane:
    """Implements `api.DataPlane` for one rank. One thread owns it."""

    def __init__(self, make_plane: Callable[[], StagedPlane], rank: int, ranks: int) -> None:
        """`make_plane` is called once; raises what it raises. `rank` is one of 0 to `ranks` - 1."""
        if not 0 <= rank < ranks <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {ranks}, allowed are 1 to {MAX_RANKS} ranks, counted from 0")
        self._plane = make_plane()
        self.kind = self._plane.kind
        self._rank = rank
        self._ranks = ranks
        self._held: list[HeadRange | None] = []
        """By each rank of this engine; known after `register`."""
        self._peers: dict[Identity, _Peer] = {}

    def register(self, region: Region) -> None:
        """Raises TransportError also for a region with other heads than are this rank's."""
        try:
            self._held = _expected(region.heads, self._ranks)
        except ValueError as error:
            raise TransportError(f"rank {self._rank}: {error}") from error
        if region.heads != self._held[self._rank]:
            raise TransportError(
                f"rank {self._rank} of {self._ranks} holds {region.heads}, expected {self._held[self._rank]}"
            )
        self._plane.register(region)

    def metadata(self) -> bytes:
        """Of this rank; `encode_ranks` makes the engine's of all its ranks'."""
        plane, held = self._plane.metadata(), self._held[self._rank]
        heads = None if held is None else _Heads(held.first, held.count, held.total)
        return _encoder.encode(_Rank(self._rank, self._ranks, heads, plane))

    def connect(self, peer: Identity, metadata: bytes) -> None:
        """With those of the peer's ranks that this rank exchanges with; with all of them, or with none.

        Raises TransportError also if the two engines' heads don't fit.
        """
        try:
            facts = _facts(metadata)
            remote = [rank.held for rank in facts]
            plans = {
                operation: rank_plan(self._held, self._rank, remote, operation)
                for operation in get_args(Operation)
            }
        except ValueError as error:
            raise TransportError(f"connect {peer}: {error}") from error
        exchanges = {exchange for plan in plans.values() for exchange in plan}
        ranks = {exchange.rank: _rank_of(peer, exchange.rank) for exchange in exchanges}
        self._peers[peer] = _Peer(ranks, plans)
        try:
            for exchange in sorted(exchanges, key=lambda exchange: exchange.rank):
                plane = facts[exchange.rank].plane
                self._plane.connect(ranks[exchange.rank], plane, exchange.mine, exchange.theirs)
        except TransportError:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: Identity) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            for rank in known.ranks.values():
                self._plane.disconnect(rank)

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Spread:
        """One transfer with each rank of the peer that this operation's plan names; none: DONE at once.

        All or none are started: what raises does so before any byte moves.
        """
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{operation} {peer}: not connected")
        spread = _Spread([])
        try:
            for exchange in known.plans[operation]:
                spread.parts.append(self._plane.prepare(operation, known.ranks[exchange.rank], copies))
        except TransportError:
            for part in spread.parts:
                self._plane.discard(part)
            raise
        for part in spread.parts:
            self._plane.start(part)
        return spread

    def poll(self, handle: _Spread) -> TransferState:
        """PENDING until every part is over: a part that has failed doesn't stop the others' bytes."""
        states = [self._plane.poll(part) for part in handle.parts]
        if TransferState.PENDING in states:
            return TransferState.PENDING
        if TransferState.FAILED in states:
            handle.error = "; ".join(part.error for part in handle.parts if part.error) or None
            return TransferState.FAILED
        return TransferState.DONE

    @property
    def service_interval(self) -> float | None:
        return self._plane.service_interval

    def service(self) -> None:
        self._plane.service()

    def close(self) -> None:
        self._plane.close()


def _expected(heads: HeadRange | None, ranks: int) -> list[HeadRange | None]:
    """What each of an engine's ranks holds, if one holds some of so many. Raises ValueError."""
    if heads is None:
        return [None] * ranks
    return [heads_of(rank, ranks, heads.total) for rank in range(ranks)]


def _facts(metadata: bytes) -> list[_Rank]:
    """All ranks of a peer, in their order, as they tell of themselves.

    Raises ValueError if malformed, or if the ranks aren't all those of one engine.
    """
    facts = []
    for index, raw in enumerate(decode_ranks(metadata)):
        try:
            facts.append(_rank_decoder.decode(raw))
        except msgspec.DecodeError as error:
            raise ValueError(f"malformed metadata of rank {index} ({error})") from error
    expected = _expected(facts[0].held, len(facts))
    for index, fact in enumerate(facts):
        if (fact.rank, fact.ranks, fact.held) != (index, len(facts), expected[index]):
            raise ValueError(
                f"rank {index} of {len(facts)} is said to be rank {fact.rank} of {fact.ranks} and holds "
                f"{fact.held}, expected {expected[index]}"
            )
    return facts


def _rank_of(peer: Identity, rank: int) -> Identity:
    """The name of a rank of a peer."""
    return Identity(EngineId(f"{peer.engine_id}#{rank}"), peer.epoch)
