"""Engines whose memory waits for each other go on, whatever the order of things: no standstill is longer
than a shortage that counts as long and a renewal, or a lease where messages get lost."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from kvhandoff.core.reasons import Reason
from tests.handoff.rings import Rings
from tests.handoff.toy import RuleBroken

SCHEDULES = max(20, int(os.environ.get("KVHANDOFF_SCHEDULES", "20000")) // 40)


def test_engines_that_are_alive_never_wait_for_long() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world = Rings(Random(seed))
        try:
            world.run()
        except RuleBroken as broken:
            pytest.fail(f"seed {seed}: {broken}")
        outcomes.update(world.outcomes)
    rare = {outcome: outcomes[outcome] for outcome in EXPECTED if outcomes[outcome] < SCHEDULES // 50}
    assert not rare, f"{SCHEDULES} schedules reached these too seldom: {rare}"
    assert outcomes[Reason.QUEUE_TIMEOUT] == 0


EXPECTED = {
    f"{Reason.SOURCE_SHORT} pull",
    f"{Reason.SOURCE_SHORT} push",
    f"{Reason.OFFER_GIVEN_UP} return",
    "loaded pull",
    "loaded push",
    "loaded return, then pull",
    "loaded return, then push",
}
