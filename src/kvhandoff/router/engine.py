"""One engine as the router knows it: its last state report, its health, and the legs reserved on it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal

import aiohttp
import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import describe
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.records import EngineState, LegRecord
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.tickets import MissPolicy, Ticket, TicketKey
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.alarm import Alarm
from kvhandoff.router.breaker import Circuit
from kvhandoff.router.config import Timeouts
from kvhandoff.router.policy import TYPICAL_TOKENS, UNMEASURED, EngineView, learn
from kvhandoff.router.records import LegRef
from kvhandoff.router.reservations import Reservation, Reservations
from kvhandoff.router.side import EngineError, NoReport, SidePages
from kvhandoff.router.watchdog import Watchdog
from kvhandoff.router.wire import NotConnected

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
Integration = Literal["embedded", "vllm"]

MISSED_POLLS = 3
"""State reports missed in a row that make an engine unhealthy. A refused connection, or a refused report,
does so at once."""

LEGS_AT_ONCE = 32
"""Accounts of legs that are taken in before the loop serves others again: about a millisecond's."""

RETRY_POLLS = 4
"""State reports between two introductions of an engine that refuses them."""


class Engine:
    """Follows one engine through its lives. Used on the event loop's thread only."""

    def __init__(
        self,
        address: EngineAddress,
        role: Role,
        pages: SidePages,
        key: TicketKey,
        timeouts: Timeouts,
        clock: Clock,
        on_legs: Callable[[Sequence[LegRecord]], None],
        vet: Callable[[Engine, EngineState], str | None],
        to_introduce: Callable[[Engine], None],
    ) -> None:
        self.address = address
        self.url = address.url
        self.role = role
        self.state: EngineState | None = None
        """The last report; kept while the engine is unhealthy."""
        self.identity: Identity | None = None
        """The life that reported last."""
        self.problem: str | None = "no state report yet"
        """Why it gets no legs; None when it is healthy."""
        self.circuit = Circuit(f"{role} engine at {address.url}", clock)
        """Whether legs here fail."""
        self.reservations = Reservations()
        """Of this router's legs."""
        self.costs = UNMEASURED
        """What it takes for its parts of a request. Kept across its lives, most likely on one machine."""
        self.wanted_drain = False
        """Its source of membership wants it to be drained."""
        self.ordered_drain = False
        """An operator does."""
        self.leaving = False
        """It is no member any more."""
        self.silence = Alarm()
        """Rings when it stops reporting its state."""
        self._pages = pages
        self._key = key
        self._timeouts = timeouts
        self._clock = clock
        self._on_legs = on_legs
        self._vet = vet
        """Why an engine with this state can't be used here, or None."""
        self._to_introduce = to_introduce
        """Called when it comes up, and now and then while it refuses."""
        self._reported_at = 0.0
        self._missed = 0
        self._refused: str | None = None
        """Why its present life obeys no ticket."""
        self._refused_polls = 0
        self._watchdog = Watchdog(timeouts.progress_s)
        self._view: EngineView | None = None
        self._viewed: tuple[object, ...] = ()
        """What the last view was made from: several policies look in a row."""
        self._poll_lock = asyncio.Lock()
        self._polls_begun = 0
        self._last_poll = 0

    @property
    def healthy(self) -> bool:
        return self.problem is None

    @property
    def draining(self) -> bool:
        """Whether the legs that it has are to be its last."""
        return self.leaving or self.wanted_drain or self.ordered_drain

    @property
    def drained(self) -> bool:
        """Whether it is draining, and nobody needs it any more: no leg, no request, no offer that another
        engine may still read. Turns kept for later don't count."""
        if not self.draining or self.reserved:
            return False
        state = self.state
        if state is None or not self.healthy:
            return True
        blocks = state.blocks
        lent = blocks.offered - blocks.retained + blocks.granted
        return not (state.running or state.waiting or state.loading or lent)

    @property
    def obstacle(self) -> str | None:
        """Why it gets no new legs; None: it gets some."""
        return self.problem or ("it is draining" if self.draining else None)

    @property
    def integration(self) -> Integration:
        """What kind of engine it is, by its last report."""
        return self.state.integration if self.state is not None else "embedded"

    def __str__(self) -> str:
        return f"{self.role} engine {self.state.engine_id if self.state else '?'} at {self.url}"

    def view(self) -> EngineView:
        """What the policies see."""
        seen = (self.state, self.problem, self.draining, self.reservations.changes, self.costs)
        if self._view is None or seen != self._viewed:
            self._view, self._viewed = self._look(), seen
        return self._view

    def _look(self) -> EngineView:
        state, ours = self.state, self.reservations
        return EngineView(
            url=self.url,
            model=state.model if state else "",
            healthy=self.problem is None and not self.draining,
            block_size=state.block_size if state else 0,
            load=ours.load,
            chosen=ours.chosen,
            waiting=state.waiting if state else 0,
            room=state.blocks.free + state.blocks.cached if state else 0,
            queue=ours.load if self.role == "prefill" else ours.computing,
            running=ours.running,
            costs=self.costs,
        )

    @property
    def reserved(self) -> int:
        """Legs of this router's here."""
        return self.reservations.legs

    def reserve(self, tokens: int = TYPICAL_TOKENS, compute: int = 0) -> Reservation:
        """Count one leg here while the context lasts, from the decision on: `tokens` of load, `compute` of
        them to be computed here."""
        return self.reservations.take(tokens, compute)

    def sign(
        self,
        leg: Literal["prefill", "decode", "local", "withdraw", "yield", "peers"],
        key: HandoffKey,
        *,
        cache_salt: str = "",
        offer: OfferDescriptor | None = None,
        push_from: OfferRef | None = None,
        push: bool = False,
        history: HistoryRef | None = None,
        retain: Retention | None = None,
        on_miss: MissPolicy = "recompute",
        peers: tuple[str, ...] = (),
    ) -> str:
        """A ticket for this engine's present life. Raises LookupError before the first report.

        It runs out by the engine's own clock, of which the last report and the time since give a lower bound.
        """
        if self.state is None or self.identity is None:
            raise LookupError(f"{self.url} has not reported its state yet")
        engine_now = self.state.now + (self._clock() - self._reported_at)
        ticket = Ticket(
            leg=leg,
            audience=self.identity,
            not_after=engine_now + self._timeouts.ticket_s,
            key=key,
            cache_salt=cache_salt,
            offer=offer,
            push_from=push_from,
            push=push,
            history=history,
            retain=retain,
            on_miss=on_miss,
            peers=peers,
        )
        return self._key.sign(ticket)

    async def tell(
        self, action: Literal["withdraw", "yield", "peers"], signed: str, timeout_s: float
    ) -> EngineError | None:
        """POST a ticket to `/internal/{action}`; why it was not taken within `timeout_s`, or None."""
        try:
            async with asyncio.timeout(timeout_s):
                status, error = await self._pages.post(action, signed)
            if status < 300:
                return None
            why = f"status {status} {error.message}".rstrip()
        except TimeoutError:
            error = EngineError(why := f"no answer in {timeout_s} s")
        except (aiohttp.ClientError, OSError) as failure:
            error = EngineError(why := describe(failure))
        log.info("%s did not take %s: %s", self, action, why)
        return error

    async def withdraw(self, leg: LegRef) -> None:
        """Have it end a leg, and the offer that the leg has made or would make.

        Best effort: leases and deadlines end both in any case, and another life has forgotten them.
        """
        if self.identity == leg.engine:
            await self.tell("withdraw", self.sign("withdraw", leg.key), self._timeouts.withdraw_s)

    async def yields(self, leg: LegRef) -> bool:
        """Have it end a decode leg for another engine's sake; False: it has begun to answer, or has the KV.
        One that doesn't answer is no obstacle: the leg's connection is closed, and it is withdrawn."""
        if self.identity != leg.engine:
            return True
        refusal = await self.tell("yield", self.sign("yield", leg.key), self._timeouts.withdraw_s)
        return refusal is None or refusal.code != "leg_begun"

    async def introduce(self, peers: tuple[str, ...]) -> None:
        """Have it connect to the control addresses `peers`; even with none of them its key is checked.

        An engine that refuses the ticket would refuse every leg, so it is unhealthy until a later
        introduction succeeds or another life begins. Raises LookupError before the first report.
        """
        life = self.identity
        signed = self.sign("peers", HandoffKey(new_handoff_id(), 0), peers=peers)
        refusal = await self.tell("peers", signed, self._timeouts.poll_s)
        refused = refusal is not None and refusal.code == "bad_ticket"
        if refused:
            await self.poll()  # it may have begun another life since, which has its own introduction
        if self.identity != life:
            return
        if refusal is None:
            self._refused = None  # the next report makes it healthy
        elif refused:
            self._refused = f"it refuses the router's tickets: {refusal.message}"
            self._refused_polls = 0
            if self.healthy:
                self._set_problem(self._refused)

    def down(self, why: str) -> None:
        """Nothing listens there, or it says itself that it can't work: no more legs until a good report."""
        self._missed = MISSED_POLLS
        self._watchdog.forget()
        self._set_problem(why)
        self.silence.ring()

    async def poll(self) -> None:
        """Return after a state report that was asked for after this call, or after its failure.

        Callers that come while a report is under way share the next one.
        """
        begun = self._polls_begun
        async with self._poll_lock:
            if self._last_poll > begun:
                return
            self._polls_begun += 1
            number = self._polls_begun
            await self._poll_once()
            self._last_poll = number

    async def _poll_once(self) -> None:
        try:
            async with asyncio.timeout(self._timeouts.poll_s):
                state, arrived = await self._fetch(self.state.cursor if self.state else 0)
                if self.state is not None and state.epoch != self.state.epoch:
                    # The cursor counted another life's records: ask again from the start.
                    state, arrived = await self._fetch(0)
        except NoReport as error:
            self.down(describe(error))
        except TimeoutError:
            self._miss(f"no state report in {self._timeouts.poll_s} s")
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            if refuses_connection(error):
                self.down(describe(error))
            else:
                self._miss(f"no usable state report: {describe(error)}")
        else:
            self._take(state, arrived)
            await self._account(deque(state.records))

    async def _account(self, legs: deque[LegRecord]) -> None:
        """Take the accounts in, a few at a time: a report may have thousands, and requests wait meanwhile.
        All of them, also when whoever has asked for the report leaves: no other one has them."""
        try:
            while legs:
                self._take_legs(legs, LEGS_AT_ONCE)
                await asyncio.sleep(0)
        finally:
            self._take_legs(legs, len(legs))

    def _take_legs(self, legs: deque[LegRecord], number: int) -> None:
        some = [legs.popleft() for _ in range(min(number, len(legs)))]
        if some:
            self.costs = reduce(learn, some, self.costs)
            self._on_legs(some)

    async def _fetch(self, cursor: int) -> tuple[EngineState, float]:
        return await self._pages.state(cursor), self._clock()

    def _take(self, state: EngineState, arrived: float) -> None:
        new_life = self.state is None or self.state.epoch != state.epoch
        if new_life:
            log.info("%s: new life %s of %s", self.url, state.epoch, state.engine_id)
            self._refused = None
        came_up = new_life or not self.healthy
        self.state = state
        self.identity = Identity(EngineId(state.engine_id), Epoch(state.epoch))
        self._reported_at = arrived
        self._missed = 0
        if state.role not in (self.role, "both"):
            self._set_problem(
                f"given to the router as a {self.role} engine, but it has the role {state.role}"
            )
        else:
            stuck = self._watchdog.look(state, arrived)
            self._set_problem(self._vet(self, state) or self._refused or stuck)
            if stuck is not None:
                self.silence.ring()
        self.reservations.reported(state)
        if self._refused is not None:
            self._refused_polls += 1
        if (came_up and self.healthy) or self._refused_polls == RETRY_POLLS:
            self._refused_polls = 0
            self._to_introduce(self)

    def _miss(self, why: str) -> None:
        self._missed += 1
        self._watchdog.forget()
        if self._missed >= MISSED_POLLS or self.state is None:
            self._set_problem(why)
            self.silence.ring()

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            log.log(logging.WARNING if problem else logging.INFO, "%s: %s", self, problem or "healthy")
        self.problem = problem


def refuses_connection(error: BaseException) -> bool:
    """Whether nothing listens there; a host that doesn't answer in time may only be busy."""
    if isinstance(error, NotConnected):
        return error.refused
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )
