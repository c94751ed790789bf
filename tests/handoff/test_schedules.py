"""Random schedules over a bad network: the rules of docs/protocol.md hold, and planted bugs are caught.

`KVHANDOFF_SCHEDULES=1000000 pytest tests/handoff/test_schedules.py` runs any number by hand;
a failure names its seed, and `World(Random(seed)).run(STEPS)` replays it.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.offers import OfferLedger
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.reads import ReadLedger
from tests.handoff.world import RuleBroken, World

SCHEDULES = int(os.environ.get("KVHANDOFF_SCHEDULES", "20000"))
STEPS = 60


def test_every_rule_holds_in_every_schedule() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world = World(Random(seed))
        try:
            world.run(STEPS)
        except RuleBroken as broken:
            pytest.fail(f"seed {seed}: {broken}")
        outcomes.update(world.outcomes)
    # The schedules reach what they are meant to reach.
    reached = {outcome for outcome, count in outcomes.items() if count >= SCHEDULES // 1000}
    assert {"loaded", "dropped", *EXPECTED} <= reached


EXPECTED = {
    Reason.OFFER_CONSUMED,
    Reason.OFFER_EXPIRED,
    Reason.OFFER_WITHDRAWN,
    Reason.CHAIN_MISMATCH,
    Reason.EPOCH_CHANGED,
    Reason.LEASE_LAPSED,
    Reason.CLAIM_TIMEOUT,
    Reason.READ_TIMEOUT,
    Reason.TRANSFER_FAILED,
    Reason.HANDSHAKE_REFUSED,
    Reason.PEER_UNREACHABLE,
    Reason.PEER_LOST,
    Reason.BAD_REFERENCE,
}


class Schedules(RuleBasedStateMachine):
    """The same world with hypothesis choosing, so that a failure shrinks to a short one."""

    world: World | None = None

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng: Random) -> None:
        self.world = World(rng)

    @rule()
    def something_happens(self) -> None:
        assert self.world is not None
        self.world.step()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.settle()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=300, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)


# ------------------------------------------------------------------------------------- planted bugs


def chain_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenChain, "common_tokens", lambda self, other: min(self.n_tokens, other.n_tokens))


def blocks_unchecked(patch: pytest.MonkeyPatch) -> None:
    granted = ReadLedger.granted

    def trusting(self, now, sender, answer):  # type: ignore[no-untyped-def]
        read = self._reads.get(answer.reader)
        spans = read.descriptor.spans if read else answer.spans
        return granted(self, now, sender, type(answer)(**{**_fields(answer), "spans": spans}))

    patch.setattr(ReadLedger, "granted", trusting)


def claim_not_awaited(patch: pytest.MonkeyPatch) -> None:
    resolve = ReadLedger._resolve

    def hasty(self, read):  # type: ignore[no-untyped-def]
        if read.landed_at is not None and read.matched_tokens is None:
            read.matched_tokens, read.trust_until = read.chain.n_tokens, read.landed_at
        return resolve(self, read)

    patch.setattr(ReadLedger, "_resolve", hasty)


def expired_lease_trusted(patch: pytest.MonkeyPatch) -> None:
    granted = ReadLedger.granted

    def forever(self, now, sender, answer):  # type: ignore[no-untyped-def]
        return granted(self, now, sender, type(answer)(**{**_fields(answer), "lease_s": 1e9}))

    patch.setattr(ReadLedger, "granted", forever)


def freed_without_fence(patch: pytest.MonkeyPatch) -> None:
    let_go = ReadLedger._let_go

    def at_once(self, read):  # type: ignore[no-untyped-def]
        read.read_deadline = None
        return let_go(self, read)

    patch.setattr(ReadLedger, "_let_go", at_once)


def claims_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    claimed = OfferLedger.claimed

    def unpinned(self, now, sender, reply_to, claim):  # type: ignore[no-untyped-def]
        effects = claimed(self, now, sender, reply_to, claim)
        if claim.offer in self._offers:
            self._offers[claim.offer].claims.clear()
        return effects

    patch.setattr(OfferLedger, "claimed", unpinned)


def any_life_will_do(patch: pytest.MonkeyPatch) -> None:
    def up(self: PeerBook, address: str, identity: object) -> Peer | None:
        peer = self._peers.get(address)
        return peer if peer and peer.state == "up" else None

    patch.setattr(PeerBook, "up", up)
    patch.setattr(OfferLedger, "claimed", _grants_anything)


def offers_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OfferLedger, "tick", lambda self, now: [])


def quarantine_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLedger, "_fenced", lambda self, key: [])


def claims_without_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLedger, "tick", lambda self, now: [])


def _grants_anything(self, now, sender, reply_to, claim):  # type: ignore[no-untyped-def]
    """A source that forgot to look whether it ever made the offer."""
    from kvhandoff.handoff.events import Send
    from kvhandoff.handoff.messages import ClaimGranted

    offer = self._offers.get(claim.offer)
    spans = ((0, claim.chain.n_blocks),) if offer is None else ((offer.blocks[0], len(offer.blocks)),)
    answer = ClaimGranted(
        offer=claim.offer,
        reader=claim.reader,
        seq=claim.seq,
        matched_tokens=claim.chain.n_tokens,
        spans=spans,
        lease_s=2.0,
    )
    return [Send(reply_to, sender, answer)]


def _fields(struct):  # type: ignore[no-untyped-def]
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


@pytest.mark.parametrize(
    ("bug", "rule_broken"),
    [
        (chain_unchecked, "rule 1"),
        (blocks_unchecked, "rule 1"),
        (claim_not_awaited, "rule 1"),
        (expired_lease_trusted, "rule 1"),
        (claims_do_not_pin, "rule 1"),
        (any_life_will_do, "rule 1"),
        (freed_without_fence, "rule 2"),
        (claims_without_deadline, "rule 3"),
        (offers_never_end, "rule 4"),
        (quarantine_never_ends, "rule 4"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_is_caught(bug, rule_broken, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    bug(monkeypatch)
    for seed in range(5000):
        try:
            World(Random(seed)).run(STEPS)
        except RuleBroken as broken:
            if str(broken).startswith(rule_broken):
                return
        except (IndexError, ValueError):
            continue  # a bug may break more than a rule
    pytest.fail(f"5000 schedules did not notice {bug.__name__}")
