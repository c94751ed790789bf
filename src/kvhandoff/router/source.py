"""A prefill leg and the offer that it leaves: from its sending until nobody needs either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvhandoff.handoff.messages import OfferRef
from kvhandoff.router.answers import Prefilled
from kvhandoff.router.engine import Engine
from kvhandoff.router.records import LegRef

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Runs something in the background."""


class Source:
    """The prefill engine's side of one attempt. Decode legs may change while it stays (re-binding)."""

    def __init__(self, engine: Engine, ref: LegRef, spawn: Spawn, linger_s: float) -> None:
        self.engine = engine
        self.ref = ref
        self.prefilled: Prefilled | None = None
        """The leg's result, when it is in."""
        self.owed = False
        """The engine may hold an offer that no decode engine has answered for: it has to be withdrawn."""
        self.failed = False
        self.used = False
        """A decode engine has all that it needs of it."""
        self._spawn = spawn
        self._linger_s = linger_s
        self._leg: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether a decode leg may still get the prompt's KV from here."""
        return not self.failed and (self.prefilled is not None or self._running)

    def offer(self) -> OfferRef:
        """The offer that it makes, or will have made. Raises LookupError before the engine's first report."""
        if self.engine.state is None:
            raise LookupError(f"{self.engine} has not reported its state yet")
        address = self.engine.state.control_address
        return OfferRef(key=self.ref.key, source=self.ref.engine, control_address=address)

    def run(self, leg: Coroutine[Any, Any, None], tokens: int) -> None:
        """Send the leg, which computes so many tokens, beside the decode leg (push)."""
        # Before the task's first step, so that simultaneous requests spread.
        reservation = self.engine.reserve(tokens, tokens)
        self._leg = self._spawn(leg)
        self._leg.add_done_callback(lambda _: reservation.end())

    def use(self) -> None:
        """A decode engine gives its answer out: it has read or received the KV, or does without.

        A pushed prompt's leg is about to be answered then; one that isn't soon computes in vain: it is ended.
        """
        self.used = True
        if self._leg is None or self._leg.done():
            self.owed = False
        else:
            self._spawn(self._linger(self._leg))

    async def end(self) -> None:
        """Close the leg's connection, which ends the leg, and withdraw its offer."""
        if self._leg is not None and not self._leg.done():
            if not self.failed:  # else it is withdrawing already
                self._leg.cancel()
            await asyncio.wait({self._leg})
        await self.withdraw()

    async def withdraw(self) -> None:
        """Withdraw the offer, once, if there may be one: grants under it are fenced at once."""
        if self.owed:
            await self.engine.withdraw(self.ref)
            self.owed = False

    async def _linger(self, leg: asyncio.Task[None]) -> None:
        await asyncio.wait({leg}, timeout=self._linger_s)
        if leg.done():
            self.owed = False
        else:
            await self.end()

    @property
    def awaited(self) -> bool:
        """Whether it goes on beside the decode leg, which waits for it."""
        return self.prefilled is None and self.usable

    @property
    def _running(self) -> bool:
        return self._leg is not None and not self._leg.done()
