"""The handoff side as the scheduler half sees it: real legs and tickets, and a protocol that chance decides.

What a thread would do is a task here: a test runs them when it pleases, in their order, so that every
interleaving with vLLM's thread can be had, and had again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.engine.legs import KVLeg
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Commit, HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.tickets import Ticket, TicketGate, TicketKey
from kvhandoff.vllm.leg import VllmLeg
from kvhandoff.vllm.scheduler_half import SchedulerHalf
from tests.vllm_plugin.fake_vllm import BLOCK, FakePool, FakeScheduler, keys_of

ME = Identity(EngineId("here"), Epoch("e1"))
PEER = Identity(EngineId("there"), Epoch("e2"))
KEY = TicketKey(b"cluster key of the tests")


_keys = count()


def new_key() -> HandoffKey:
    """In their order, so that what chance makes of them can be had again."""
    return HandoffKey(HandoffId(f"{next(_keys):08}"), 0)


def offer_ref() -> OfferRef:
    return OfferRef(key=new_key(), source=PEER, control_address="tcp://there")


def descriptor(n_tokens: int) -> OfferDescriptor:
    """Of a prompt that the peer has computed."""
    ref = offer_ref()
    return OfferDescriptor(
        key=ref.key, source=PEER, control_address=ref.control_address, spans=(), n_tokens=n_tokens, digest=""
    )


def history_ref(n_tokens: int) -> HistoryRef:
    return HistoryRef(key=new_key(), source=PEER, control_address="tcp://there", n_tokens=n_tokens)


def signed(leg: Any, **fields: Any) -> str:
    """A ticket to this engine."""
    usual = {"audience": ME, "not_after": 1e9, "key": new_key()}
    return KEY.sign(Ticket(leg=leg, **{**usual, **fields}))


@dataclass
class Transfer:
    """Bytes on the way into a load's targets; they may land until the fence."""

    key: HandoffKey
    request_id: str
    blocks: tuple[int, ...]
    cached_blocks: int
    wanted: bool = True
    """Its request still waits for it."""
    in_flight: bool = False

    @property
    def targets(self) -> tuple[int, ...]:
        return self.blocks[self.cached_blocks :]


@dataclass
class Lent:
    """Blocks that others may read, and what they were lent with."""

    blocks: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    complete: bool = False


class FakeHandoff:
    """Implements `Side`, `KVHooks` and `LegHost`."""

    def __init__(self, half: SchedulerHalf, pool: FakePool, seed: int = 0, *, ranks: int = 1) -> None:
        self.core = half
        self.clock = ManualClock(1.0)
        self.me = ME
        self.control_address = "tcp://here"
        self.min_return_tokens = BLOCK
        self.pool = pool
        self.rng = random.Random(seed)
        self.scheduler: FakeScheduler | None = None
        self.tasks: deque[Callable[[], None]] = deque()
        self.calls: list[tuple[Any, ...]] = []
        """The hooks' calls and the reports, in their order."""
        self.records: list[LegRecord] = []
        self.refusals = 0
        self.has_ended = False
        self.transfers: dict[HandoffKey, Transfer] = {}
        self.lent: dict[HandoffKey, Lent] = {}
        self.early: set[HandoffKey] = set()
        """Loads that were wanted, and are not allocated yet."""
        self._snapshots: deque[list[list[int]]] = deque()
        """What lent blocks held at that moment, until the handoff side hears of it."""
        self._legs: dict[HandoffKey, VllmLeg] = {}
        self._by_request: dict[str, KVLeg] = {}
        self._gate = TicketGate(KEY, ME)

    @property
    def hooks(self) -> FakeHandoff:
        return self

    @property
    def host(self) -> FakeHandoff:
        return self

    def run(self, most: int | None = None) -> None:
        """Let the handoff side's thread run: so many tasks, or all."""
        while self.tasks and most != 0:
            self.tasks.popleft()()
            most = None if most is None else most - 1

    # ---------------------------------------------------------------------------------------- Side, KVHooks

    def admit(self, ticket: object) -> Ticket:
        return self._gate.admit(ticket, self.clock())

    def refused(self) -> None:
        self.refusals += 1

    def enter(self, leg: VllmLeg) -> bool:
        if self.has_ended:
            return False

        def enter() -> None:
            self._legs[leg.key] = leg
            leg.entered()

        self.tasks.append(enter)
        return True

    def finish(self, leg: VllmLeg, finish_reason: str, completion_tokens: int) -> None:
        self.tasks.append(lambda: leg.finish(finish_reason, completion_tokens))
        assert leg.request is not None
        self.unbind_soon(leg.request.request_id)

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        self.calls.append(("report", request_id, failed, tuple(bad_blocks)))
        if self.scheduler is not None:
            self.scheduler.reports.append((request_id, failed, tuple(bad_blocks)))

    def load_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        self._tell("load_allocated", request_id, lambda leg: leg.on_allocated(blocks, cached_blocks), *blocks)

    def load_skipped(self, request_id: str) -> None:
        self._tell("load_skipped", request_id, lambda leg: leg.on_skipped())

    def load_abandoned(self, request_id: str) -> None:
        self._tell("load_abandoned", request_id, lambda leg: leg.on_abandoned())

    def offer_grown(self, request_id: str, blocks: Sequence[int]) -> None:
        self._tell("offer_grown", request_id, lambda leg: leg.on_grown(blocks), *blocks)

    def offer_abandoned(self, request_id: str) -> None:
        self._tell("offer_abandoned", request_id, lambda leg: leg.on_offer_abandoned())

    def offered(self, request_id: str, blocks: Sequence[int], first_token: int) -> None:
        self._tell("offered", request_id, lambda leg: leg.on_offered(blocks, first_token), *blocks)

    def retained(self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        self._tell("retained", request_id, lambda leg: leg.on_retained(hashes, blocks), *blocks)

    def memory_short(self, blocks: int) -> None:
        self.calls.append(("memory_short", blocks))
        self.tasks.append(self.give_up)

    def _tell(self, name: str, request_id: str, news: Callable[[KVLeg], None], *blocks: int) -> None:
        if name in ("offer_grown", "offered", "retained"):
            self._snapshots.append([list(self.pool.blocks[block].slots) for block in blocks])
        self.calls.append((name, request_id, *blocks))
        self.tasks.append(lambda: news(self._by_request[request_id]))

    # ------------------------------------------------------------------------------------------- LegHost

    def bind(self, request_id: str, leg: KVLeg) -> None:
        self._by_request[request_id] = leg

    def unbind_soon(self, request_id: str) -> None:
        self.tasks.append(lambda: self._by_request.pop(request_id).on_ended())

    def ended(self, leg: KVLeg, record: LegRecord) -> None:
        self.records.append(record)

    def feed(self, event: ev.Event) -> None:
        match event:
            case ev.ReadWanted(load) | ev.PushWanted(load):
                self.early.add(load)
            case ev.LoadAllocated(load, blocks, cached_blocks):
                transfer = Transfer(load, self._request_id(load), blocks, cached_blocks)
                if load in self.early:
                    self.early.remove(load)
                    transfer.in_flight = self.rng.random() < 0.8
                    self.transfers[load] = transfer
                else:  # missed or dropped before
                    self.core.release_blocks(transfer.targets)
            case ev.LoadDropped(load):
                self.early.discard(load)
                if load in self.transfers:
                    self.transfers[load].wanted = False
                    if not self.transfers[load].in_flight:
                        self.fence(load)
            case ev.OfferGrown(offer, blocks):
                self._lend(offer, blocks)
            case ev.Retained(offer, chain, blocks) | ev.Offered(offer, chain, blocks):
                self._lend(offer, blocks, chain.n_tokens)
            case ev.OfferAbandoned(offer):
                if offer in self.lent:
                    self.end_offer(offer)
            case _:
                pass

    # --------------------------------------------------------------------------------------- what may happen

    def arrive(self, load: HandoffKey, tokens: int | None = None) -> None:
        """A load's KV is in, or the beginning of it, and verified. What else its targets hold is anything."""
        transfer = self.transfers.pop(load)
        assert transfer.wanted
        leg = self._legs[load]
        assert leg.request is not None
        salt = leg.ticket.cache_salt if leg.ticket else ""
        reach = min(len(leg.request.prompt_token_ids), len(transfer.blocks) * BLOCK)
        tokens = reach if tokens is None else tokens
        keys = keys_of(leg.request.prompt_token_ids[:tokens], salt)
        for i, block in enumerate(transfer.blocks[transfer.cached_blocks :], transfer.cached_blocks):
            for j in range(BLOCK):
                at = i * BLOCK + j
                self.pool.blocks[block].slots[j] = keys[at] if at < tokens else -1
        commit = None
        if leg.load is not None and leg.load.push:
            commit = Commit(
                number=1,
                rank=0,
                ranks=1,
                blocks=len(transfer.targets),
                digest="",
                first_token=None,
                cached_tokens=0,
                chunks=1,
                early_blocks=0,
                tail_s=0.0,
            )
        leg.on_loaded(tokens, commit)

    def miss(self, load: HandoffKey) -> None:
        """Nothing will come; with a transfer in flight the targets come back later."""
        self.early.discard(load)
        transfer = self.transfers.get(load)
        if transfer is not None:
            transfer.wanted = False
        self._legs[load].on_missed(Reason.CLAIM_TIMEOUT, "by chance")
        if transfer is not None and not transfer.in_flight:
            self.fence(load)

    def land(self, load: HandoffKey) -> None:
        """Late bytes of a load that nobody waits for any more."""
        for block in self.transfers[load].targets:
            self.pool.blocks[block].slots[:] = [-1] * BLOCK

    def fence(self, load: HandoffKey) -> None:
        """Nothing lands in its targets any more."""
        self.core.release_blocks(self.transfers.pop(load).targets)

    def end_offer(self, offer: HandoffKey) -> None:
        """Nobody reads it any more. Until now everybody could have."""
        lent = self.lent.pop(offer)
        held = [self.pool.blocks[block].slots for block in lent.blocks]
        for i, (before, now) in enumerate(zip(lent.slots, held, strict=True)):
            assert now[: len(before)] == before, f"{offer}: block {i} was re-issued while it was lent"
        self.core.release_blocks(lent.blocks)

    def give_up(self) -> None:
        """All offers that are made end."""
        for offer in self.offers:
            self.end_offer(offer)

    @property
    def offers(self) -> list[HandoffKey]:
        """Those that are made, and don't grow any more."""
        return sorted(offer for offer, lent in self.lent.items() if lent.complete)

    def yields(self, load: HandoffKey) -> None:
        """Another engine is to answer."""
        self._legs[load].yields()

    def withdraw(self, load: HandoffKey) -> None:
        """Nobody waits for the answer."""
        self._legs[load].withdrawn()

    def _lend(self, offer: HandoffKey, blocks: Sequence[int], n_tokens: int | None = None) -> None:
        lent = self.lent.setdefault(offer, Lent())
        lent.blocks += blocks
        lent.slots += self._snapshots.popleft()
        if n_tokens is not None:
            lent.complete = True
            assert len(lent.blocks) == -(-n_tokens // BLOCK)
            if n_tokens % BLOCK:  # behind the prompt its request may have written on
                del lent.slots[-1][n_tokens % BLOCK :]

    def _request_id(self, load: HandoffKey) -> str:
        request = self._legs[load].request
        assert request is not None
        return request.request_id

    @property
    def held(self) -> Counter[int]:
        """References that the handoff side holds."""
        held: Counter[int] = Counter()
        for transfer in self.transfers.values():
            held.update(transfer.targets)
        for lent in self.lent.values():
            held.update(lent.blocks)
        return held
