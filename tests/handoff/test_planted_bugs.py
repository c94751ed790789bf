"""Mutation tests of the random schedules: each bug that is planted here is noticed as the rule it breaks."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import offers, peers
from kvhandoff.handoff.events import FreeBlocks, Loaded, Send, WatchPeer
from kvhandoff.handoff.grants import GrantLedger
from kvhandoff.handoff.messages import ClaimGranted
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.offers import Offer, OfferLedger
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.read_quarantine import ReadQuarantine
from kvhandoff.handoff.reads import ReadLedger
from kvhandoff.handoff.writes import WriteLedger, _Over
from tests.handoff.deaths import Deaths
from tests.handoff.ground import SETTINGS
from tests.handoff.rings import Rings
from tests.handoff.world import STEPS, RuleBroken, World

AT_MOST = 3000
"""Schedules within which a bug has to be noticed."""

replace = msgspec.structs.replace


# mypy: disable-error-code="no-untyped-def"
# ---------------------------------------------------------------------------------------- pull and return


def chain_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenChain, "common_tokens", lambda self, other: min(self.n_tokens, other.n_tokens))


def blocks_unchecked(patch: pytest.MonkeyPatch) -> None:
    granted = ReadLedger.granted

    def trusting(self, now, sender, answer):
        read = self._reads.get(answer.reader)
        spans = (read.spans if read else None) or answer.spans
        return granted(self, now, sender, replace(answer, spans=spans))

    patch.setattr(ReadLedger, "granted", trusting)


def claim_not_awaited(patch: pytest.MonkeyPatch) -> None:
    resolve = ReadLedger._resolve

    def hasty(self, now, read):
        if read.landed_at is not None and read.matched_tokens is None:
            read.matched_tokens, read.trust_until = read.chain.n_tokens, read.landed_at
        return resolve(self, now, read)

    patch.setattr(ReadLedger, "_resolve", hasty)


def loaded_beyond_its_blocks(patch: pytest.MonkeyPatch) -> None:
    resolve = ReadLedger._resolve

    def boundless(self, now, read):
        effects = resolve(self, now, read)
        return [Loaded(e.load, read.matched_tokens) if isinstance(e, Loaded) else e for e in effects]

    patch.setattr(ReadLedger, "_resolve", boundless)


def expired_lease_trusted(patch: pytest.MonkeyPatch) -> None:
    granted = ReadLedger.granted

    def forever(self, now, sender, answer):
        return granted(self, now, sender, replace(answer, lease_s=1e9))

    patch.setattr(ReadLedger, "granted", forever)


def lease_counted_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    granted = ReadLedger.granted

    def late(self, now, sender, answer):
        read = self._reads.get(answer.reader)
        if read is not None and answer.seq in read.asked_at:
            read.asked_at[answer.seq] = now
        return granted(self, now, sender, answer)

    patch.setattr(ReadLedger, "granted", late)


def clocks_compared(patch: pytest.MonkeyPatch) -> None:
    """The lease's end travels as a reading of the source's clock."""
    claimed, granted = OfferLedger.claimed, ReadLedger.granted

    def dated(self, now, sender, reply_to, claim):
        effects = claimed(self, now, sender, reply_to, claim)
        return [
            replace_body(e, lease_s=(now + e.body.lease_s) / (1 - SETTINGS.margin))
            if _is_grant_of_claim(e)
            else e
            for e in effects
        ]

    def read_off(self, now, sender, answer):
        read = self._reads.get(answer.reader)
        if read is not None and answer.seq in read.asked_at:
            read.asked_at[answer.seq] = 0.0
        return granted(self, now, sender, answer)

    def replace_body(send, **changes):
        return Send(send.address, send.target, replace(send.body, **changes))

    def _is_grant_of_claim(effect):
        return isinstance(effect, Send) and isinstance(effect.body, ClaimGranted)

    patch.setattr(OfferLedger, "claimed", dated)
    patch.setattr(ReadLedger, "granted", read_off)


def freed_without_fence(patch: pytest.MonkeyPatch) -> None:
    let_go = ReadLedger._let_go

    def at_once(self, now, read):
        read.read_deadline = None
        return let_go(self, now, read)

    patch.setattr(ReadLedger, "_let_go", at_once)


def claims_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    claimed = OfferLedger.claimed

    def unpinned(self, now, sender, reply_to, claim):
        effects = claimed(self, now, sender, reply_to, claim)
        if claim.offer in self._offers:
            self._offers[claim.offer].pins.clear()
        return effects

    patch.setattr(OfferLedger, "claimed", unpinned)


def any_life_will_do(patch: pytest.MonkeyPatch) -> None:
    def up(self: PeerBook, address: str, identity: object) -> Peer | None:
        peer = self._peers.get(address)
        return peer if peer and peer.state == "up" else None

    patch.setattr(PeerBook, "up", up)
    patch.setattr(OfferLedger, "claimed", _grants_anything)


def _grants_anything(self, now, sender, reply_to, claim):
    """A source that forgot to look whether it ever made the offer."""
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


def retained_offers_end_under_a_claim(patch: pytest.MonkeyPatch) -> None:
    close = OfferLedger._close

    def ruthless(self, key, offer, why):
        if why is Reason.OFFER_GIVEN_UP:
            offer.pins.clear()
        return close(self, key, offer, why)

    patch.setattr(OfferLedger, "_close", ruthless)


def offers_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OfferLedger, "tick", lambda self, now: [])


def quarantine_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadQuarantine, "fenced", lambda self, key: [])


def claims_without_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLedger, "tick", lambda self, now: [])


# -------------------------------------------------------------------------------------------------- push


def revoked_blocks_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GrantLedger, "_let_go", lambda self, now, push: [FreeBlocks(push.targets)] if push.targets else []
    )


def writes_for_any_chain(patch: pytest.MonkeyPatch) -> None:
    granted = WriteLedger.granted

    def credulous(self, now, sender, reply_to, grant):
        offer = self._offers.get(grant.offer)
        if offer is not None and offer.chain.n_blocks == grant.chain.n_blocks:
            grant = replace(grant, chain=offer.chain)
        return granted(self, now, sender, reply_to, grant)

    patch.setattr(WriteLedger, "granted", credulous)


def sources_freed_at_an_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OfferLedger, "_close", lambda self, key, offer, why: [self._free(key, why)])


def sources_not_held_by_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OfferLedger, "write_began", lambda self, key: None)
    patch.setattr(OfferLedger, "write_ended", lambda self, now, key: [])


def mail_for_a_former_life_obeyed(patch: pytest.MonkeyPatch) -> None:
    received = HandoffNode._received

    def any_life(self, now, envelope):
        return received(self, now, replace(envelope, target=self.me))

    patch.setattr(HandoffNode, "_received", any_life)


def late_grants_honoured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Over, "why", lambda self, number: None)


def commits_counted(patch: pytest.MonkeyPatch) -> None:
    committed = GrantLedger.committed

    def counting(self, now, sender, commit):
        push = self._pushes.get(commit.number)
        if push is not None and commit.rank in push.commits:
            commit = replace(commit, rank=len(push.commits))
        return committed(self, now, sender, commit)

    patch.setattr(GrantLedger, "committed", counting)


def committed_before_all_has_landed(patch: pytest.MonkeyPatch) -> None:
    write = WriteLedger._write

    def hasty(self, now, grant, offer):
        effects = write(self, now, grant, offer)
        if grant.targets and offer.completed_at is not None and not grant.commits and not grant.ending:
            effects += self._commit(now, grant, offer, offer.completed_at)
        return effects

    patch.setattr(WriteLedger, "_write", hasty)


def earlier_attempt_goes_on(patch: pytest.MonkeyPatch) -> None:
    end_all = WriteLedger._end_all

    def lenient(self, now, grants, reason):
        return [] if reason is Reason.REBOUND else end_all(self, now, grants, reason)

    patch.setattr(WriteLedger, "_end_all", lenient)


def fenced_while_writing(patch: pytest.MonkeyPatch) -> None:
    fence = WriteLedger._fence

    def hasty(self, now, grant):
        for _ in grant.in_flight:
            self._offers._offers[grant.offer].writing -= 1
        grant.in_flight.clear()
        return fence(self, now, grant)

    patch.setattr(WriteLedger, "_fence", hasty)


def died_when_its_first_process_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peers, "_watch", lambda life, hello: [WatchPeer(life, hello.processes[:1])])


def names_given_up_while_a_process_runs(patch: pytest.MonkeyPatch) -> None:
    """Not the protocol's bug, but a broken promise: another life answers before all of the former's processes
    have ended."""
    patch.setattr(Deaths, "nameless", lambda self, engine: False)


def pushes_without_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrantLedger, "_expire", lambda self, now, push: [])


def revokes_sent_once(patch: pytest.MonkeyPatch) -> None:
    tick = GrantLedger.tick

    def once(self, now):
        for entry in self._quarantine.values():
            entry.next_revoke = now + 1e6
        return tick(self, now)

    patch.setattr(GrantLedger, "tick", once)


# -------------------------------------------------------------- engines that wait for each other (`rings.py`)


def freed_at_the_decline(patch: pytest.MonkeyPatch) -> None:
    """The source takes its own word for the reader's, which may not have heard it."""
    claimed = OfferLedger.claimed

    def ruthless(self, now, sender, reply_to, claim):
        effects = claimed(self, now, sender, reply_to, claim)
        offer = self._offers.get(claim.offer)
        if offer is not None and offer.closing is Reason.SOURCE_SHORT:
            offer.pins.clear()
            effects += self.tick(now)
        return effects

    patch.setattr(OfferLedger, "claimed", ruthless)


def readers_taken_for_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offer, "queued_for", property(lambda self: bool(self.pins) and not self.writing))


def blocks_not_told_of(patch: pytest.MonkeyPatch) -> None:
    """A reader's claims go on saying that it is queued."""
    claim = ReadLedger._claim

    def outdated(self, now, read):
        send = claim(self, now, read)
        return Send(send.address, send.target, replace(send.body, queued=True))

    patch.setattr(ReadLedger, "_claim", outdated)


def gives_up_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offers._Shortage, "lasts", lambda self, now: math.inf)


def never_gives_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offer, "queued_for", False)


def declined_readers_say_nothing(patch: pytest.MonkeyPatch) -> None:
    """So that blocks come back with the lease only."""
    declined = ReadLedger.declined

    def silent(self, now, sender, answer):
        return [e for e in declined(self, now, sender, answer) if not isinstance(e, Send)]

    patch.setattr(ReadLedger, "declined", silent)


@pytest.mark.parametrize(
    ("bug", "rule_broken"),
    [
        (freed_at_the_decline, "rule 1"),
        (readers_taken_for_queued, "rule 3"),
        (blocks_not_told_of, "rule 3"),
        (gives_up_at_once, "rule 3"),
        (never_gives_up, "rule 3"),
        (declined_readers_say_nothing, "rule 3"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_in_giving_up_is_caught(bug, rule_broken, monkeypatch) -> None:
    bug(monkeypatch)
    for seed in range(AT_MOST):
        try:
            Rings(Random(seed)).run()
        except RuleBroken as broken:
            if str(broken).startswith(rule_broken):
                return
    pytest.fail(f"{AT_MOST} schedules did not notice {bug.__name__}")


# -------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    ("bug", "rule_broken"),
    [
        (chain_unchecked, "rule 1"),
        (blocks_unchecked, "rule 1"),
        (claim_not_awaited, "rule 1"),
        (loaded_beyond_its_blocks, "rule 1"),
        (expired_lease_trusted, "rule 1"),
        (lease_counted_from_the_answer, "rule 1"),
        (clocks_compared, "rule 1"),
        (claims_do_not_pin, "rule 1"),
        (any_life_will_do, "rule 1"),
        (retained_offers_end_under_a_claim, "rule 1"),
        (writes_for_any_chain, "rule 1"),
        (mail_for_a_former_life_obeyed, "rule 2"),
        (commits_counted, "rule 1"),
        (committed_before_all_has_landed, "rule 1"),
        (freed_without_fence, "rule 2"),
        (revoked_blocks_freed_at_once, "rule 2"),
        (sources_freed_at_an_abort, "rule 2"),
        (sources_not_held_by_writes, "rule 2"),
        (late_grants_honoured, "rule 2"),
        (fenced_while_writing, "rule 2"),
        (died_when_its_first_process_has_ended, "rule 2"),
        (names_given_up_while_a_process_runs, "rule 2"),
        (claims_without_deadline, "rule 3"),
        (pushes_without_deadline, "rule 3"),
        (offers_never_end, "rule 4"),
        (quarantine_never_ends, "rule 4"),
        (revokes_sent_once, "rule 4"),
        (earlier_attempt_goes_on, "rule 5"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_is_caught(bug, rule_broken, monkeypatch) -> None:
    bug(monkeypatch)
    for seed in range(AT_MOST):
        try:
            World(Random(seed)).run(STEPS)
        except RuleBroken as broken:
            if str(broken).startswith(rule_broken):
                return
        except (KeyError, IndexError, ValueError, AssertionError):
            continue  # a bug may break more than a rule
    pytest.fail(f"{AT_MOST} schedules did not notice {bug.__name__}")
