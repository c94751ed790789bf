"""How a client is answered, whatever connector its engines have: requests from beginning to end, answers that
are whole, streams, and what broke off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, describe, unavailable
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER, Caller
from kvhandoff.router.answers import Answer, whole
from kvhandoff.router.records import Draft, Records
from kvhandoff.router.stream import Passage, shutting_down
from kvhandoff.web import CLIENT_LEFT, ClientGone

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """A response, and the status that its record is closed with."""

    response: wire.Response | wire.StreamResponse
    status: int


async def carry_through(
    work: Coroutine[Any, Any, Outcome], draft: Draft, records: Records, timer: PhaseTimer, clock: Clock
) -> wire.Response | wire.StreamResponse:
    """The response of a request's `work`; its record is closed when this returns or is cancelled."""
    status = CLIENT_LEFT
    try:
        response, status = await work
    except RequestError as error:
        status = error.status
        return wire.error_response(error, draft.headers())
    except asyncio.CancelledError as error:
        if not wire.is_cut_off(error):
            raise
        cut = shutting_down()
        status = cut.status
        draft.because(Reason.SHUTDOWN)
        if draft.first_byte_s is not None:
            raise  # in the middle of a stream: its connection is cut
        return wire.error_response(cut, draft.headers())
    except ClientGone:
        return wire.Response(status=status)  # nobody receives it
    finally:
        if status == CLIENT_LEFT and draft.complete:
            status = 200  # it closed its connection, as clients do, a moment before we did
        if status == CLIENT_LEFT:
            draft.because(Reason.CLIENT_ABORTED)
        records.close(draft, status, clock() - timer.started)
    return response


def pass_on(draft: Draft, answer: Answer) -> Outcome:
    """An engine's whole answer, for the client."""
    headers = draft.headers() | {"Content-Type": answer.content_type}
    return Outcome(wire.Response(status=answer.status, body=answer.body, headers=headers), answer.status)


async def read_whole(upstream: wire.LegAnswer, draft: Draft, name: object, engine: object) -> Answer:
    """A 200 that is not streamed, of the leg called `name`. The engine has done its work: when the rest is
    lost, no attempt follows, and RequestError is raised."""
    try:
        return await whole(upstream)
    except ConnectionError as error:
        draft.because(Reason.DECODE_FAILED)
        log.warning("%s: %s: its answer broke off: %s", name, engine, describe(error))
        why = f"{engine} ended before its answer was complete"
        raise RequestError(why, status=502, code=Reason.DECODE_FAILED, kind="engine_error") from error


def passage_of(
    request: wire.Request,
    draft: Draft,
    engine: object,
    timer: PhaseTimer,
    clock: Clock,
    idle_s: float,
    on_byte: Callable[[], None],
    on_content: Callable[[], None] | None = None,
) -> Passage:
    """The way of a stream to the client; `idle_s`: see `Passage`. `on_byte`: called when it has begun;
    `on_content`: with its first content."""

    def first_byte() -> None:
        draft.first_byte_s = clock() - timer.started
        on_byte()

    def first_content() -> None:
        if on_content is not None:
            on_content()
        timer.mark(Phase.DECODE_NETWORK)
        draft.first_content_s = timer.total

    def done() -> None:
        draft.complete = True

    named = str(engine) if request[CALLER].operator else "the decode engine"
    return Passage(request, draft.endpoint, named, draft.headers(), idle_s, first_byte, first_content, done)


async def end_passage(passage: Passage, draft: Draft, name: object, engine: object) -> Outcome:
    """What a carried stream, of the leg called `name`, comes to."""
    if passage.error is not None:
        log.warning("%s: %s: its stream broke off: %s", name, engine, passage.broken)
        draft.because(passage.reason)
    if not draft.joinable and passage.scan.response_id is not None:
        draft.response_id = passage.scan.response_id
    return Outcome(await passage.end(), passage.status)


def no_decode_engine(
    model: str, obstacles: Sequence[tuple[object, str]], reason: Reason, caller: Caller
) -> RequestError:
    """The 503 when nobody takes a request. Operators also see which engine is where, and what is wrong."""
    why = "".join(f"; {engine}: {obstacle}" for engine, obstacle in obstacles) if caller.operator else ""
    return unavailable(f"no decode engine for {model!r} takes requests now{why}", code=reason)
