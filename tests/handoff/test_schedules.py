"""Random schedules over a bad network: the rules of docs/protocol.md hold in each.

`KVHANDOFF_SCHEDULES=1000000 pytest tests/handoff/test_schedules.py` runs any number by hand; a failure names
its seed, and `World(Random(seed)).run(STEPS)` replays it. `test_planted_bugs.py` shows that a broken rule is
noticed.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvhandoff.core.reasons import Reason
from tests.handoff.world import STEPS, RuleBroken, World

SCHEDULES = int(os.environ.get("KVHANDOFF_SCHEDULES", "20000"))


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
    rare = {outcome: outcomes[outcome] for outcome in EXPECTED if outcomes[outcome] < SCHEDULES // 2000}
    assert not rare, f"{SCHEDULES} schedules reached these too seldom: {rare}"


_PATHS = {
    "pull": {
        Reason.ALREADY_CACHED,
        Reason.BAD_REFERENCE,
        Reason.CHAIN_MISMATCH,
        Reason.CLAIM_TIMEOUT,
        Reason.EPOCH_CHANGED,
        Reason.HANDSHAKE_REFUSED,
        Reason.LEASE_LAPSED,
        Reason.OFFER_CONSUMED,
        Reason.OFFER_EXPIRED,
        Reason.OFFER_WITHDRAWN,
        Reason.PEER_LOST,
        Reason.PEER_UNREACHABLE,
        Reason.READ_TIMEOUT,
        Reason.SOURCE_SHORT,
        Reason.TRANSFER_FAILED,
    },
    "return": {
        Reason.ALREADY_CACHED,
        Reason.CHAIN_MISMATCH,
        Reason.CLAIM_TIMEOUT,
        Reason.EPOCH_CHANGED,
        Reason.HANDSHAKE_REFUSED,
        Reason.LEASE_LAPSED,
        Reason.OFFER_EXPIRED,
        Reason.OFFER_GIVEN_UP,
        Reason.OFFER_WITHDRAWN,
        Reason.PEER_LOST,
        Reason.PEER_UNREACHABLE,
        Reason.RETURN_TOO_SHORT,
        Reason.TRANSFER_FAILED,
    },
    "push": {
        Reason.CHAIN_MISMATCH,
        Reason.CLIENT_ABORTED,
        Reason.EPOCH_CHANGED,
        Reason.HANDSHAKE_REFUSED,
        Reason.OFFER_ABANDONED,
        Reason.OFFER_CONSUMED,
        Reason.OFFER_EXPIRED,
        Reason.OFFER_UNKNOWN,
        Reason.OFFER_WITHDRAWN,
        Reason.PEER_LOST,
        Reason.PEER_UNREACHABLE,
        Reason.PUSH_TIMEOUT,
        Reason.REBOUND,
        Reason.SOURCE_SHORT,
        Reason.TRANSFER_FAILED,
    },
}
EXPECTED = {f"{reason} {path}" for path, reasons in _PATHS.items() for reason in reasons} | {
    "loaded pull",
    "loaded push",
    "loaded push, two ranks",
    "loaded push, part of it cached",
    "loaded push, after a re-binding",
    "loaded pull, after a re-binding",
    "loaded return, then pull",
    "loaded return, then push",
    "loaded return, then local",
    "loaded return, a part",
    "loaded return, as far as it has blocks",
    "loaded pull, as far as it has blocks",
    "dropped",
    "crash while pushed to",
    "crash while pushing",
    "a writer outlives its engine",
    "end of several processes",
    "quarantined grant",
    "quarantined read",
    "noted fence_overdue",
    "noted lease_lapsed",
    "noted offer_expired",
    "noted offer_given_up",
    "noted quarantine_grows",
    "noted source_short",
    "queue_timeout",
}
"""What each kind of load ends with, and what else happens: on average once in 2,000 schedules at least."""


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
    max_examples=100, stateful_step_count=STEPS, suppress_health_check=list(HealthCheck)
)
