"""Sends the legs of a request to stock vLLM engines, and gives the client the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, describe
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.answering import Outcome, end_passage, pass_on, passage_of, read_whole
from kvhandoff.router.answers import Answer, engine_error, read_response_id, whole
from kvhandoff.router.body import Fields
from kvhandoff.router.breaker import LegOutcome
from kvhandoff.router.config import Timeouts
from kvhandoff.router.deadline import Deadline, Deadlines
from kvhandoff.router.engine import refuses_connection
from kvhandoff.router.legs import leg_lines
from kvhandoff.router.policy import RequestSummary
from kvhandoff.router.records import Draft, LegRef
from kvhandoff.router.side import read_error
from kvhandoff.router.upstream_bodies import decode_body, prefill_body, read_reference, without_reference
from kvhandoff.router.upstream_engine import UpstreamEngine
from kvhandoff.router.upstream_references import References, Turn


class UpstreamFailed(Exception):
    """A leg came to nothing, the client has seen nothing of it, and another attempt may do better."""

    def __init__(
        self, engine: UpstreamEngine, why: str, *, late: bool = False, reason: Reason | None = None
    ) -> None:
        """`reason`: the cause, where it is a narrower one than that the leg has failed."""
        super().__init__(f"{engine}: {why}")
        self.engine = engine
        self.late = late
        failed = Reason.PREFILL_FAILED if engine.role == "prefill" else Reason.DECODE_FAILED
        self.reason = failed if reason is None else reason

    def as_error(self, *, to_operator: bool) -> RequestError:
        """What the client is told when no attempt is left; where which engine is, operators alone."""
        what = str(self) if to_operator else None
        return engine_error(self.engine.role, "late" if self.late else "broken", what, code=self.reason)


class Refused(Exception):
    """An engine's 4xx: the client's to see."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


@dataclass(slots=True, kw_only=True)
class Job:
    """One client request, across its attempts."""

    request: wire.Request
    fields: Fields
    summary: RequestSummary
    draft: Draft
    timer: PhaseTimer
    turn: Turn | None
    """None: of no conversation that is to be kept."""
    avoid: set[str] = field(default_factory=set)
    """URLs of engines that failed it."""

    @property
    def request_id(self) -> str:
        """X-Request-Id of this attempt's legs. Engines that push find each other's request by it, so that no
        two attempts may share one."""
        retries = self.draft.attempts - 1
        return f"{self.draft.handoff_id}-{retries}" if retries else self.draft.handoff_id

    def leg_at(self, engine: UpstreamEngine) -> LegRef:
        """This attempt's leg. Its engine's life has no name that a router could know."""
        life = Identity(EngineId(engine.address.engine_id or engine.url), Epoch(""))
        return LegRef(HandoffKey(self.draft.handoff_id, self.draft.attempts - 1), life)


class UpstreamLegs:
    """Sends legs. Used on the event loop's thread only."""

    def __init__(self, client: wire.Client, timeouts: Timeouts, references: References, clock: Clock) -> None:
        self._client = client
        self._timeouts = timeouts
        self._references = references
        self._deadlines = Deadlines()
        self._clock = clock

    async def prefill(self, job: Job, source: UpstreamEngine, params: msgspec.Raw) -> msgspec.Raw:
        """The reference that a prefill leg has answered. Raises UpstreamFailed, also for an answer without
        one, and Refused for a 4xx."""
        with source.circuit.begin(partial(_verdict, source)):
            answer = await self._prefill(job, source, params)
            reference = read_reference(answer.body)
            if reference is None:
                # Whatever it runs: nobody can read from it, and, pushed, nobody will be written to.
                raise UpstreamFailed(
                    source, "its answer has no kv_transfer_params", reason=Reason.NO_REFERENCE
                )
            return reference

    async def _prefill(self, job: Job, source: UpstreamEngine, params: msgspec.Raw) -> Answer:
        job.draft.prefill = job.leg_at(source)
        body = prefill_body(job.fields, params)
        try:
            with (
                source.reserve(),
                job.draft.traced("prefill", job.draft.prefill, source.url) as context,
                self._deadlines.within(self._timeouts.prefill_s) as wait,
                source.silence.ends(wait),
            ):
                async with self._post(job, source, body, context) as sent:
                    return _accepted(source, await whole(await sent.answer()))
        except OSError as error:
            raise _failure(source, error) from error

    async def decode(
        self,
        job: Job,
        target: UpstreamEngine,
        params: msgspec.Raw | None,
        beside: asyncio.Task[msgspec.Raw] | None = None,
    ) -> Outcome:
        """Run the decode leg and give the client its answer.

        `beside`: the prefill leg that writes its KV. When that fails before the answer has begun, this leg,
        which would wait for ever, is ended, and the other's failure raised.

        Raises UpstreamFailed and Refused, and RequestError when an answer that is not streamed breaks off.
        """
        with target.circuit.begin(partial(_verdict, target)) as leg:
            return await self._decode(job, target, params, beside, leg)

    async def _decode(
        self,
        job: Job,
        target: UpstreamEngine,
        params: msgspec.Raw | None,
        beside: asyncio.Task[msgspec.Raw] | None,
        leg: LegOutcome,
    ) -> Outcome:
        job.draft.decode = job.leg_at(target)
        body = decode_body(job.fields, params)
        asked = self._clock()
        limit = self._timeouts.first_byte_s if job.summary.stream else self._timeouts.answer_s
        try:
            name = "local" if job.draft.path == "local" else "decode"
            with (
                target.reserve(),
                job.draft.traced(name, job.draft.decode, target.url) as context,
                self._deadlines.within(limit) as deadline,
            ):
                watch = _Watch(beside, deadline)

                def begun() -> None:
                    watch.stop()
                    leg.succeeded()
                    deadline.lift()  # from here on, the passage has its own

                async with self._post(job, target, body, context) as sent:
                    idle_s = self._timeouts.idle_s
                    passage = passage_of(
                        job.request, job.draft, target, job.timer, self._clock, idle_s, begun
                    )
                    answer = await sent.answer(passage)
                    if not passage.open:
                        watch.stop()
                        return await self._answer(job, target, answer, asked)
                    await passage.carry()
        except OSError as error:
            if beside is not None and (other := _error_of(beside)) is not None:
                raise other from error
            raise _failure(target, error) from error
        return await end_passage(passage, job.draft, job.request_id, target)

    async def _answer(
        self, job: Job, target: UpstreamEngine, answer: wire.LegAnswer, asked: float
    ) -> Outcome:
        """One that is not streamed."""
        if answer.status != 200:
            _accepted(target, await whole(answer))  # raises
        read = await read_whole(answer, job.draft, job.request_id, target)
        job.timer.mark(Phase.DECODE_NETWORK)
        job.draft.response_id = read_response_id(read) or job.draft.response_id
        reference = read_reference(read.body)
        if reference is not None:
            if job.turn is not None:
                self._references.keep(job.turn, target.url, reference, read.body, asked)
            read = Answer(read.status, read.content_type, without_reference(read.body))
        return pass_on(job.draft, read)

    def _post(self, job: Job, engine: UpstreamEngine, body: bytes, context: Mapping[str, str]) -> wire.Leg:
        lines = leg_lines(job.request.headers if job.draft.trace is None else {}, job.request_id)
        url = engine.url + job.request.path
        return self._client.post(url, data=body, headers=lines + wire.header_lines(context))


def _verdict(engine: UpstreamEngine, error: BaseException) -> bool | None:
    """See `Circuit.begin`. A leg that is late says nothing: it may have waited for the other leg, and an
    engine that hangs answers no question for its health either."""
    match error:
        case UpstreamFailed() if error.engine is engine and not error.late:
            return False
        case Refused():
            return True  # it has worked
        case _:
            return None


class _Watch:
    """Ends a wait when another leg fails."""

    def __init__(self, beside: asyncio.Task[msgspec.Raw] | None, deadline: Deadline) -> None:
        self._beside = beside
        self._deadline = deadline
        if beside is not None:
            beside.add_done_callback(self._cut)

    def stop(self) -> None:
        """The answer has begun: what becomes of the other leg doesn't matter any more."""
        if self._beside is not None:
            self._beside.remove_done_callback(self._cut)

    def _cut(self, beside: asyncio.Task[msgspec.Raw]) -> None:
        if _error_of(beside) is not None:
            self._deadline.move(0)


def _error_of(beside: asyncio.Task[msgspec.Raw]) -> BaseException | None:
    return beside.exception() if beside.done() and not beside.cancelled() else None


def _accepted(engine: UpstreamEngine, answer: Answer) -> Answer:
    """A 200. Raises Refused for a 4xx, UpstreamFailed for anything else."""
    if answer.status == 200:
        return answer
    if 400 <= answer.status < 500:
        raise Refused(answer)
    raise UpstreamFailed(engine, f"status {answer.status} {read_error(answer.body).message}".rstrip())


def _failure(engine: UpstreamEngine, error: Exception) -> UpstreamFailed:
    """An exception on the way to an answer, as a failed leg."""
    if refuses_connection(error):
        engine.down(describe(error))
        return UpstreamFailed(engine, describe(error))
    if isinstance(error, TimeoutError):
        why = "no answer in time" if engine.healthy else f"no answer, and then: {engine.problem}"
        return UpstreamFailed(engine, why, late=True)
    return UpstreamFailed(engine, "it ended before its answer was complete")
