"""Binding `rebind`: the router moves a pushed request to another decode engine by itself, when the policy
finds one clearly better before its answer begins. It gives an operator's order (`rebind.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from kvhandoff.core.errors import RequestError
from kvhandoff.core.ids import HandoffId
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.policy import Policies
from kvhandoff.router.policy.rebinding import MAX_REBINDS
from kvhandoff.router.rebind import RebindOrder, rebind

log = logging.getLogger(__name__)


class Rebinder:
    """Looks after the running requests. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, policies: Policies, running: Mapping[HandoffId, Exchange]) -> None:
        self._fleet = fleet
        self._policies = policies
        self._running = running

    async def run(self, interval_s: float) -> None:
        """Look at them all, as often as engines report. Never returns."""
        while True:
            await asyncio.sleep(interval_s)
            await self.look()

    async def look(self) -> None:
        """Move each that is better off elsewhere, one after the other: each move changes what is best for the
        next one."""
        for x in list(self._running.values()):
            order = self._order(x)
            if order is None:
                continue
            log.info("%s: another decode engine is clearly better: %s", x.key, order.decode)
            try:
                await rebind(x.draft, x, self._fleet, self._policies, order)
            except RequestError as refusal:
                # It has begun to answer, or has ended, in the meantime: it stays.
                log.info("%s: it stays: %s", x.key, refusal.message)

    def _order(self, x: Exchange) -> RebindOrder | None:
        if x.path != "push" or x.bound is None or x.move is not None or x.draft.rebound >= MAX_REBINDS:
            return None
        avoid = x.avoid | self._fleet.resting()
        choice = self._policies.choose_rebind(
            self._fleet.view(), x.summary.model, x.bound.engine.url, x.tokens, avoid
        )
        if choice is None:
            return None
        state = self._fleet.engine(choice).state
        return RebindOrder(decode=state.engine_id) if state is not None else None
