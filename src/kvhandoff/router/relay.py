"""One request from its arrival to its end: the path, the legs, and further attempts where one fails.

    pull    prefill leg ──▶ offer ──▶ bind a decode engine ──▶ decode leg ──▶ answer
    push    bind a decode engine ──▶ decode leg ──▶ answer
                                └──▶ prefill leg, at the same time
    local   bind a decode engine ──▶ local leg ──▶ answer

What follows a failure:

    prefill leg not sent, reset, 5xx, late,   another prefill engine; none or no time left: local, or an error
      or its engine unhealthy                 by on_miss
    the same, pushed                          withdrawn; the decode engine, which waits, goes on alone
    prefill leg 4xx                           the client's mistake: passed on
    the same, pushed                          withdrawn; the decode engine answers the same
    decode leg not sent, or ticket refused    another decode engine, with the same offer
    decode leg reset, 5xx, late, no byte yet  the offer is withdrawn, all begins again
    the same, pushed                          withdrawn; another decode engine, with the same prefill leg
    decode leg moved by an operator           the same, pushed or pulled
    decode leg ended after its first byte     an error to the client, no further attempt (field case 15c)
    ticket refused (403 bad_ticket)           the engine may have restarted: its state is read first
    client gone                               the legs' connections are closed, the offer is withdrawn

Another decode engine for the same prefill leg is pushed to while that leg goes on, and pulls when its offer
is made.

One attempt at a time (rule 5): a failed leg's connection is closed, which ends the leg, and it is withdrawn
before the next attempt begins. How many there are: `retry.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Literal

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import describe
from kvhandoff.core.ids import HandoffId, new_handoff_id
from kvhandoff.core.phases import PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.admission import Admission, tolerate_miss
from kvhandoff.router.answering import Outcome, carry_through, no_decode_engine
from kvhandoff.router.answers import LegFailed
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.dispatch import Dispatcher
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Engine
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.moves import Moved
from kvhandoff.router.policy import EngineView, FleetView
from kvhandoff.router.records import Draft, LegRef, Records
from kvhandoff.router.retry import next_attempt
from kvhandoff.router.source import Source

log = logging.getLogger(__name__)


class Relay:
    """Carries requests. Used on the event loop's thread only."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        admission: Admission,
        client: wire.Client,
        records: Records,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._admission = admission
        self._dispatcher = Dispatcher(client, config.timeouts, config.on_miss)
        self._records = records
        self._clock = clock
        self._policies = config.policies
        self.running: dict[HandoffId, Exchange] = {}
        """Requests that have been admitted and not ended."""

    def answer(
        self, request: wire.Request, endpoint: Endpoint
    ) -> Coroutine[Any, Any, wire.Response | wire.StreamResponse]:
        """The response to a client's request, whose record is open from now on; closed when the response is
        returned, or awaiting it is cancelled."""
        timer = PhaseTimer(self._clock)
        draft = self._records.open(
            new_handoff_id(),
            endpoint=endpoint,
            requested_path=self._config.path,
            headers=request.headers,
        )
        draft.walls = timer.seconds
        work = self._work(request, draft, timer)
        return carry_through(work, draft, self._records, timer, self._clock)

    async def _work(self, request: wire.Request, draft: Draft, timer: PhaseTimer) -> Outcome:
        x = await self._admission.admit(request, draft, timer)
        if log.isEnabledFor(logging.DEBUG):
            fields = draft.log_fields()
            log.debug("%s: path %s, %s", draft.handoff_id, draft.path, draft.model, extra=fields)
        self.running[draft.handoff_id] = x
        try:
            return await self._attempts(x)
        finally:
            del self.running[draft.handoff_id]
            x.settle()
            if x.source is not None and not x.source.used:
                self._fleet.spawn(x.source.end())
            self._admission.remember(x)

    async def _attempts(self, x: Exchange) -> Outcome:
        while True:
            x.draft.attempts += 1
            try:
                return await self._attempt(x)
            except LegFailed as failure:
                await self._recover(x, failure)
            except Moved:
                if x.source is None or not x.source.usable:
                    await self._start_over(x, dispatched=True)
                else:
                    await self._leave_target(x, dispatched=True, for_another=True)

    async def _attempt(self, x: Exchange) -> Outcome:
        late = x.path == "pull" and x.source is None
        target = None
        if not late or not self._fleet.decodes(x.summary.model):
            target = await self._bind(x)  # no prompt is computed for a fleet that can't decode
            x.chosen = None
        if x.path != "local" and x.source is None:
            refused = await self._begin_prefill(x, target if x.path == "push" else None)
            if refused is not None:
                return refused
        if late or target is None:
            target = await self._bind(x)
        if x.path == "push" and x.source is not None and x.source.prefilled is not None:
            x.draft.path = "pull"  # the offer was made for another decode engine; this one reads it
        if x.abandoned is not None and x.abandoned is not target:
            x.draft.bound_again()
        x.abandoned = None
        if x.move is not None and x.path is not None and target.identity is not None:
            x.move.carried_out(x.key, x.path, target.identity)
            x.move = None
        x.target = target
        return await self._dispatcher.decode(x, target)

    async def _begin_prefill(self, x: Exchange, target: Engine | None) -> Outcome | None:
        """Send the prefill leg; without a `target` to push to, wait for it. Its 4xx is the answer to a
        pull."""
        choice = self._choose_prefill(x, target)
        if isinstance(choice, Reason):
            reason = Reason.PREFILL_FAILED if Reason.PREFILL_FAILED in x.draft.reasons else choice
            self._go_local(x, reason, f"no prefill engine for {x.summary.model!r} is left")
            return None
        engine = self._fleet.engine(choice)
        x.draft.prefill = x.leg_at(engine)
        source = Source(engine, x.draft.prefill, self._fleet.spawn, self._config.timeouts.linger_s)
        x.source = source
        if target is not None:
            body = self._dispatcher.prefill_body(x, source, target)
            source.run(self._prefill_beside(x, source, body), x.to_prefill(engine))
            return None
        refused = await self._dispatcher.prefill(x, source)
        if refused is None and source.prefilled is not None and source.prefilled.offer is None:
            source.owed = False
            x.draft.because(Reason.OFFER_UNKNOWN)
            tolerate_miss(self._config, "the prefill engine offered nothing", Reason.OFFER_UNKNOWN)
        return refused

    def _choose_prefill(
        self, x: Exchange, target: Engine | None
    ) -> EngineView | Literal[Reason.NO_PREFILL_ENGINE]:
        """One that hands over to `target` (None: to anyone) and doesn't rest, unless the client would get an
        error for want of it."""
        choose, model = self._policies.choose_prefill, x.summary.model
        chosen, x.chosen = x.chosen, None
        if chosen is not None and not self._fleet.engine(chosen).circuit.rests and chosen.url not in x.avoid:
            return chosen
        avoid = x.avoid | self._fleet.resting()
        view = self._fleet.partners(target)
        choice = choose(view, model, avoid, tokens=x.tokens, cached=x.cached)
        if isinstance(choice, Reason) and self._config.on_miss == "error":
            return choose(view, model, x.avoid, tokens=x.tokens, cached=x.cached)
        return choice

    async def _prefill_beside(self, x: Exchange, source: Source, body: bytes) -> None:
        """The prefill leg of a push. When it fails, the decode engine is told by the withdrawal."""
        failure: LegFailed | None = None
        try:
            started = self._clock()
            refused = await self._dispatcher.prefill_leg(x, source, body)
            if refused is None:
                x.draft.prefill_wall_s = self._clock() - started
                x.alone(source)
                return
        except LegFailed as failed:
            failure = failed
        source.failed = True
        x.alone(source)
        if source.used or x.source is not source:
            return
        x.draft.prefill = None
        if failure is not None:
            await self._blame(x, failure, source.ref)
        await source.withdraw()

    async def _bind(self, x: Exchange) -> Engine:
        """The decode engine to use now. Raises RequestError (503) when there is none."""
        if x.move is not None and x.move.target.obstacle is None:
            return x.move.target
        model, holder = x.summary.model, x.holder.url if x.holder is not None else None
        avoid = x.avoid | self._fleet.resting()
        if x.abandoned is not None:
            avoid.add(x.abandoned.url)
        choose = self._policies.choose_decode
        target = choose(self._view(x), model, avoid, holder, tokens=x.tokens)
        if isinstance(target, Reason):
            # Without one that the KV can be handed to, any can compute the prompt.
            target = choose(self._fleet.view(), model, avoid, holder, tokens=x.tokens)
        if isinstance(target, Reason):
            # One that has just been started again may be up before its next report is due.
            await self._fleet.poll(self._fleet.decode)
            target = choose(self._fleet.view(), model, avoid, holder, tokens=x.tokens)
        if isinstance(target, Reason):
            x.draft.because(target)
            obstacles = [(engine, engine.obstacle) for engine in self._fleet.decode if engine.obstacle]
            raise no_decode_engine(model, obstacles, target, x.request[CALLER])
        return self._fleet.engine(target)

    def _view(self, x: Exchange) -> FleetView:
        """The engines to choose a decode engine from."""
        if x.path == "local":
            return self._fleet.view()
        return self._fleet.decoders(x.source.engine if x.source is not None else None)

    async def _recover(self, x: Exchange, failure: LegFailed) -> None:
        """Undo what failed and set up the next attempt. Raises RequestError when there is to be none."""
        leg = x.draft.prefill if failure.role == "prefill" else x.draft.decode
        reason = await self._blame(x, failure, leg)
        x.failures += 1
        if failure.role == "prefill":
            if not failure.dispatched and x.source is not None:
                x.source.owed = False  # it was never asked for an offer
            await self._start_over(x, dispatched=True)
        elif x.source is not None and not x.source.usable:
            await self._start_over(x, dispatched=failure.dispatched)
        elif failure.dispatched and x.path != "push":  # it may have taken the offer, which has one reader
            await self._start_over(x, dispatched=True)
        else:
            await self._leave_target(x, dispatched=failure.dispatched, for_another=x.path == "push")

        retry = next_attempt(
            failed=x.failures,
            allowed=self._config.max_attempts,
            too_old=x.elapsed() > self._config.timeouts.retry_s,
            of_prefill=failure.role == "prefill",
        )
        if retry is None:
            raise failure.as_error(to_operator=x.request[CALLER].operator)
        if retry == "local":
            self._go_local(x, reason, str(failure))

    async def _start_over(self, x: Exchange, *, dispatched: bool) -> None:
        """The attempt came to nothing as a whole. What may run of it is ended before another begins (rule 5);
        of the decode leg, if there was one and it was `dispatched`."""
        ends = [self._end_decode(x)] if dispatched else []
        if x.source is not None:
            ends.append(x.source.end())
        await asyncio.gather(*ends)
        x.begin_again()
        x.target = None

    async def _leave_target(self, x: Exchange, *, dispatched: bool, for_another: bool) -> None:
        """The decode leg came to nothing, and is ended if it was `dispatched`; the prefill leg is good for
        the next one, which is at another engine if there is one and it is to be `for_another`."""
        if dispatched:
            await self._end_decode(x)
        x.abandoned = x.target if for_another else None
        x.failed(dispatched=dispatched)
        x.target = None

    async def _end_decode(self, x: Exchange) -> None:
        if x.target is not None and x.draft.decode is not None:
            await x.target.withdraw(x.draft.decode)

    async def _blame(self, x: Exchange, failure: LegFailed, leg: LegRef | None) -> Reason:
        """Write a failed leg down, and see whether its engine can be used again."""
        detail = f" ({describe(failure.__cause__)})" if failure.__cause__ else ""
        log.warning("%s: attempt %d: %s%s", x.key, x.draft.attempts, failure, detail)
        engine = failure.engine
        if failure.kind == "refused":
            engine.down(failure.why)
        if failure.kind == "ticket_refused":
            await engine.poll()
        if failure.kind == "ticket_refused" and leg is not None and engine.identity != leg.engine:
            reason = Reason.EPOCH_CHANGED
        else:
            reason = Reason.PREFILL_FAILED if failure.role == "prefill" else Reason.DECODE_FAILED
            x.avoid.add(engine.url)
        x.draft.because(reason)
        return reason

    def _go_local(self, x: Exchange, reason: Reason, why: str) -> None:
        """No prefill engine can help: the decode engine computes the prompt."""
        x.draft.because(reason)
        tolerate_miss(self._config, why, reason)
        x.draft.path = "local"
        x.draft.prefill = None
