"""Runs one leg on one engine, and gives the client its answer."""

from __future__ import annotations

import asyncio
import io
import logging
from typing import NamedTuple

import aiohttp
from aiohttp import web

from kvhandoff.core.errors import RequestError
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.tickets import MissPolicy
from kvhandoff.router.answers import (
    Answer,
    TicketParams,
    for_client,
    network_failure,
    read_prefilled,
    read_response_id,
    whole,
)
from kvhandoff.router.config import Timeouts
from kvhandoff.router.engine import Engine, describe
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.legs import decode_fields, leg_body, prefill_fields
from kvhandoff.router.stream import Passage

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


class Outcome(NamedTuple):
    """A response, and the status that its record is closed with."""

    response: web.StreamResponse
    status: int


class Dispatcher:
    """Sends legs. Failures that another attempt may mend are raised as LegFailed."""

    def __init__(self, session: aiohttp.ClientSession, timeouts: Timeouts, on_miss: MissPolicy) -> None:
        self._session = session
        self._timeouts = timeouts
        self._on_miss = on_miss

    async def prefill(self, x: Exchange, engine: Engine) -> Outcome | None:
        """Run the prefill leg; None: done, `x.prefilled` has the result. A 4xx is the client's answer."""
        ticket = engine.sign("prefill", x.key, cache_salt=x.summary.cache_salt)
        body = leg_body(prefill_fields(x.fields), TicketParams(ticket))
        x.draft.prefill = x.leg_at(engine)
        x.outstanding = engine, x.draft.prefill
        with engine.reserve():
            x.cut(Phase.ROUTE)
            try:
                async with (
                    asyncio.timeout(self._timeouts.prefill_s),
                    self._post(x, engine, body) as upstream,
                ):
                    answer = await whole(upstream)
            except (aiohttp.ClientError, OSError) as error:
                raise network_failure(engine, error) from error
        x.cut(Phase.PREFILL_NETWORK)
        if answer.status != 200:
            refused = for_client(engine, answer)
            x.outstanding = None
            return _pass_on(x, refused)
        x.prefilled = read_prefilled(engine, x.key, answer)
        return None

    async def decode(self, x: Exchange, engine: Engine) -> Outcome:
        """Run the decode or local leg and give the client its answer.

        Raises RequestError when an answer that is not streamed breaks off.
        """
        params = self._decode_params(x, engine)
        body = leg_body(decode_fields(x.fields), params)
        x.draft.decode = x.leg_at(engine)
        limit = self._timeouts.first_byte_s if x.summary.stream else self._timeouts.answer_s
        with engine.reserve():
            x.cut(Phase.BIND if x.path == "pull" else Phase.ROUTE)
            try:
                async with asyncio.timeout(limit) as deadline, self._post(x, engine, body) as upstream:
                    if upstream.status != 200:
                        return _pass_on(x, for_client(engine, await whole(upstream)))
                    if upstream.content_type != EVENT_STREAM:
                        return await _answer(x, engine, upstream)
                    first = await upstream.content.readany()
                    if not first:
                        raise aiohttp.ClientPayloadError("its stream has ended before the first byte")
                    deadline.reschedule(None)  # from here on, the passage has its own
                    passage = _passage(x, engine, upstream)
                    await passage.carry(first, upstream.content, self._timeouts.idle_s)
            except (aiohttp.ClientError, OSError) as error:
                raise network_failure(engine, error) from error
        return await self._end(x, engine, passage)

    def _decode_params(self, x: Exchange, engine: Engine) -> TicketParams | None:
        salt = x.summary.cache_salt
        if x.summary.prompts > 1:
            # A ticket is for one prompt; an engine without one serves each prompt alone.
            x.draft.joinable = False
            return None
        if x.prefilled is None:
            return TicketParams(engine.sign("local", x.key, cache_salt=salt))
        ticket = engine.sign("decode", x.key, cache_salt=salt, offer=x.prefilled.offer, on_miss=self._on_miss)
        return TicketParams(ticket, x.prefilled.prompt_token_ids)

    async def _end(self, x: Exchange, engine: Engine, passage: Passage) -> Outcome:
        if passage.broken is not None:
            log.warning("%s: %s: its stream broke off: %s", x.key, engine, passage.broken)
            x.draft.because(Reason.DECODE_FAILED)
        if not x.draft.joinable and passage.scan.response_id is not None:
            x.draft.response_id = passage.scan.response_id
        response = await passage.end(self._timeouts.idle_s)
        return Outcome(response, passage.status)

    def _post(self, x: Exchange, engine: Engine, body: bytes) -> aiohttp.client._RequestContextManager:
        # A large body goes in pieces: as one block it would hold up the loop.
        data = body if len(body) < 2**20 else io.BytesIO(body)
        url = engine.url + x.request.path
        return self._session.post(url, data=data, headers=x.headers, allow_redirects=False)


async def _answer(x: Exchange, engine: Engine, upstream: aiohttp.ClientResponse) -> Outcome:
    """A 200 that is not streamed. The engine has done its work: when the rest is lost, no attempt follows."""
    try:
        answer = await whole(upstream)
    except (aiohttp.ClientError, ConnectionError) as error:
        x.draft.because(Reason.DECODE_FAILED)
        log.warning("%s: %s: its answer broke off: %s", x.key, engine, describe(error))
        why = f"{engine} ended before its answer was complete"
        raise RequestError(why, status=502, code=Reason.DECODE_FAILED, kind="engine_error") from error
    x.outstanding = None
    x.cut(Phase.DECODE_NETWORK)
    if not x.draft.joinable:
        x.draft.response_id = read_response_id(answer) or x.draft.response_id
    return _pass_on(x, answer)


def _passage(x: Exchange, engine: Engine, upstream: aiohttp.ClientResponse) -> Passage:
    """The way of a stream that has begun to the client; the decode engine has the offer in hand."""
    x.outstanding = None

    def first_byte() -> None:
        x.draft.first_byte_s = x.elapsed()

    def first_content() -> None:
        x.cut(Phase.DECODE_NETWORK)
        x.draft.first_content_s = x.timer.total

    kept = ("Content-Type", "Cache-Control")
    headers = {name: upstream.headers[name] for name in kept if name in upstream.headers}
    return Passage(x.request, str(engine), x.draft.headers() | headers, first_byte, first_content)


def _pass_on(x: Exchange, answer: Answer) -> Outcome:
    headers = x.draft.headers() | {"Content-Type": answer.content_type}
    return Outcome(web.Response(status=answer.status, body=answer.body, headers=headers), answer.status)
