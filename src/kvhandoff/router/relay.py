"""One request from its arrival to its end: the path, the legs, and further attempts where one fails.

    pull    prefill leg ──▶ offer ──▶ bind a decode engine ──▶ decode leg ──▶ answer
    local   bind a decode engine ──▶ local leg ──▶ answer

What follows a failure:

    prefill leg not sent, reset, 5xx, late    another prefill engine; none left: local, or an error by on_miss
    prefill leg 4xx                           the client's mistake: passed on
    decode leg not sent, or ticket refused    another decode engine, with the same offer
    decode leg reset, 5xx, late, no byte yet  the offer is withdrawn, all begins again
    decode leg ended after its first byte     an error to the client, no further attempt (field case 15c)
    ticket refused (403 bad_ticket)           the engine may have restarted: its state is read first
    client gone                               the leg's connection is closed, the offer is withdrawn

One attempt at a time (rule 5): a failed leg's connection is closed, which ends the leg, and its offer is
withdrawn before the next attempt begins. Attempts are bounded in number and in time.
"""

from __future__ import annotations

import logging

import aiohttp
from aiohttp import web

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, unavailable
from kvhandoff.core.ids import new_handoff_id
from kvhandoff.core.phases import PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.router.answers import LegFailed
from kvhandoff.router.body import Fields, parse_body, read_model, summarize, unknown_model
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.dispatch import Dispatcher, Outcome
from kvhandoff.router.engine import Engine, describe
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.legs import leg_headers
from kvhandoff.router.policy import PATH_HEADER, choose_decode, choose_path, choose_prefill, requested_path
from kvhandoff.router.records import Draft, LegRef, Records
from kvhandoff.web import CLIENT_LEFT, ClientGone, error_response, read_body

log = logging.getLogger(__name__)


class Relay:
    """Carries requests. Used on the event loop's thread only."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        records: Records,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._dispatcher = Dispatcher(session, config.timeouts, config.on_miss)
        self._records = records
        self._clock = clock

    async def answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        """The response to a client's request; its record is closed when this returns or is cancelled."""
        timer = PhaseTimer(self._clock)
        draft = self._records.open(new_handoff_id(), chat=chat, requested_path=self._config.path)
        draft.walls = timer.seconds
        status = CLIENT_LEFT
        try:
            exchange = await self._admit(request, draft, timer)
            response, status = await self._attempts(exchange)
        except RequestError as error:
            status = error.status
            return error_response(error, draft.headers())
        except ClientGone:
            return web.Response(status=status)  # nobody receives it
        finally:
            if status == CLIENT_LEFT:
                draft.because(Reason.CLIENT_ABORTED)
            self._records.close(draft, status, self._clock() - timer.started)
        return response

    async def _admit(self, request: web.Request, draft: Draft, timer: PhaseTimer) -> Exchange:
        """Read the request and choose its path. Raises RequestError."""
        draft.requested_path = requested_path(request.headers.get(PATH_HEADER), self._config.path)
        raw = await read_body(request, self._config.max_body_bytes, self._config.timeouts.body_s)
        fields = parse_body(raw)
        summary = summarize(fields, chat=draft.chat)
        self._check_model(fields)
        draft.model = summary.model
        draft.path, reason = choose_path(draft.requested_path, summary, self._fleet.view())
        if reason is not None:
            draft.because(reason)
        if reason is Reason.NO_PREFILL_ENGINE and draft.requested_path == "pull":
            self._tolerate_miss(f"no prefill engine for {summary.model!r} is healthy", reason)
        return Exchange(
            request=request,
            fields=fields,
            summary=summary,
            headers=leg_headers(request.headers, draft.handoff_id),
            clock=self._clock,
            timer=timer,
            draft=draft,
        )

    def _check_model(self, fields: Fields) -> None:
        served = self._fleet.models()
        if not served:
            raise unavailable("no decode engine has reported yet", code=Reason.NO_DECODE_ENGINE)
        model = read_model(fields, ", ".join(sorted(served)))
        if model not in served:
            raise unknown_model(model, served)

    def _tolerate_miss(self, why: str, reason: Reason) -> None:
        """Go on without a transfer, unless the operator wants an error then (`on_miss`)."""
        if self._config.on_miss == "error":
            raise unavailable(f"{why}, and on_miss is error", code=reason)

    async def _attempts(self, x: Exchange) -> Outcome:
        try:
            while True:
                x.draft.attempts += 1
                try:
                    return await self._attempt(x)
                except LegFailed as failure:
                    await self._recover(x, failure)
        finally:
            if x.outstanding is not None:
                self._fleet.spawn(self._withdraw(*x.outstanding))

    async def _attempt(self, x: Exchange) -> Outcome:
        await self._bind(x)  # no prompt is computed for a fleet that can't decode
        if x.path == "pull" and x.prefilled is None:
            source = choose_prefill(self._fleet.view(), x.summary.model, x.avoid)
            if isinstance(source, Reason):
                reason = Reason.PREFILL_FAILED if Reason.PREFILL_FAILED in x.draft.reasons else source
                self._go_local(x, reason, f"no prefill engine for {x.summary.model!r} is left")
            else:
                refused = await self._dispatcher.prefill(x, self._fleet.engine(source))
                if refused is not None:
                    return refused
                if x.prefilled is not None and x.prefilled.offer is None:
                    x.outstanding = None
                    x.draft.because(Reason.OFFER_UNKNOWN)
                    self._tolerate_miss("the prefill engine offered nothing", Reason.OFFER_UNKNOWN)
        return await self._dispatcher.decode(x, await self._bind(x))

    async def _bind(self, x: Exchange) -> Engine:
        """The decode engine to use now. Raises RequestError (503) when there is none."""
        target = choose_decode(self._fleet.view(), x.summary.model, x.avoid)
        if isinstance(target, Reason):
            # One that has just been started again may be up before its next report is due.
            await self._fleet.poll(self._fleet.decode)
            target = choose_decode(self._fleet.view(), x.summary.model, x.avoid)
        if isinstance(target, Reason):
            x.draft.because(target)
            problems = "".join(
                f"; {engine}: {engine.problem}" for engine in self._fleet.decode if engine.problem
            )
            raise unavailable(f"no decode engine for {x.summary.model!r} is healthy{problems}", code=target)
        return self._fleet.engine(target)

    async def _recover(self, x: Exchange, failure: LegFailed) -> None:
        """Undo what failed and set up the next attempt. Raises RequestError when there is to be none."""
        detail = f" ({describe(failure.__cause__)})" if failure.__cause__ else ""
        log.warning("%s: attempt %d: %s%s", x.key, x.draft.attempts, failure, detail)
        engine = failure.engine
        if failure.kind == "refused":
            engine.down(failure.why)
        if failure.kind == "ticket_refused":
            await engine.poll()
        used = x.draft.prefill if failure.role == "prefill" else x.draft.decode
        if failure.kind == "ticket_refused" and used is not None and engine.identity != used.engine:
            reason = Reason.EPOCH_CHANGED
        else:
            reason = Reason.PREFILL_FAILED if failure.role == "prefill" else Reason.DECODE_FAILED
            x.avoid.add(engine.url)
        x.draft.because(reason)

        if failure.role == "prefill" and not failure.dispatched:
            x.outstanding = None  # it was never asked for an offer
        begin_again = failure.role == "prefill" or failure.dispatched
        if begin_again and x.outstanding is not None:
            await self._withdraw(*x.outstanding)
            x.outstanding = None
        x.failed(begin_again=begin_again)

        left = self._config.max_attempts - x.draft.attempts
        if left < 1 or x.elapsed() > self._config.timeouts.retry_s:
            raise failure.as_error()
        if left == 1 and failure.role == "prefill":
            # The last attempt is the one that needs the fewest engines.
            self._go_local(x, reason, str(failure))

    def _go_local(self, x: Exchange, reason: Reason, why: str) -> None:
        """No prefill engine can help: the decode engine computes the prompt."""
        x.draft.because(reason)
        self._tolerate_miss(why, reason)
        x.draft.path = "local"
        x.draft.prefill = None

    async def _withdraw(self, engine: Engine, leg: LegRef) -> None:
        """Best effort: a lease ends the offer in any case, and a restarted engine has forgotten it."""
        if engine.identity == leg.engine:
            signed = engine.sign("withdraw", leg.key)
            await engine.tell("withdraw", signed, self._config.timeouts.withdraw_s)
