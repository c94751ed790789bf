"""One request through stock vLLM engines, from its arrival to its end.

    nixl        prefill leg ──▶ its reference ──▶ decode leg ──▶ answer
    nixl-push   decode leg ──▶ answer
                prefill leg, at the same time and under the same X-Request-Id
    local       decode leg without a reference ──▶ answer

**Nothing is verified.** An engine takes what a reference names for the KV of the prompt that comes with it,
and no router can know better. What a router can do, this one does: a reference is used once, by the request
that it was made for or by the next turn that repeats it; an attempt that fails is not repaired with what is
left of it, but begun anew under another X-Request-Id; and whatever needs more than one reader is computed on
the decode engine.

After a failure that the client has seen nothing of: another prefill engine, or none; another decode engine if
there is one; how many attempts there are: `retry.py`. The legs' connections are closed first, which ends
them. A decode engine that is pushed to would wait for a failed prefill leg for ever, so its leg is closed as
well. An engine whose legs fail several times in a row rests for a while (`breaker.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, describe
from kvhandoff.core.ids import EngineId, Epoch, Identity, new_handoff_id
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.answering import Outcome, carry_through, no_decode_engine, pass_on
from kvhandoff.router.body import Fields
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.names import check_names
from kvhandoff.router.policy import (
    PATH_HEADER,
    FleetView,
    Path,
    PathChoice,
    Policies,
    RequestSummary,
    requested_path,
)
from kvhandoff.router.reading import read_request
from kvhandoff.router.records import Draft, Records
from kvhandoff.router.retry import next_attempt
from kvhandoff.router.upstream_bodies import PULL_PREFILL, PUSH_PREFILL, push_decode
from kvhandoff.router.upstream_config import UpstreamConfig
from kvhandoff.router.upstream_engine import UpstreamEngine, UpstreamFleet
from kvhandoff.router.upstream_legs import Job, Refused, UpstreamFailed, UpstreamLegs
from kvhandoff.router.upstream_references import References, Turn

log = logging.getLogger(__name__)

_POLICIES = Policies()


class UpstreamRelay:
    """Carries requests. Used on the event loop's thread only."""

    def __init__(
        self,
        config: UpstreamConfig,
        fleet: UpstreamFleet,
        client: wire.Client,
        records: Records,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._records = records
        self._clock = clock
        self._references = References(config.max_conversations, config.reference_s, clock)
        self._legs = UpstreamLegs(client, config.timeouts, self._references, clock)

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
        draft.walls, draft.connector, draft.joinable = timer.seconds, self._config.connector, False
        work = self._work(request, draft, timer)
        return carry_through(work, draft, self._records, timer, self._clock)

    async def _work(self, request: wire.Request, draft: Draft, timer: PhaseTimer) -> Outcome:
        job = await self._admit(request, draft, timer)
        log.debug("%s: path %s, %s", draft.handoff_id, draft.path, draft.model, extra=draft.log_fields())
        try:
            return await self._attempts(job)
        except Refused as refused:
            return pass_on(draft, refused.answer)

    async def _admit(self, request: wire.Request, draft: Draft, timer: PhaseTimer) -> Job:
        config = self._config
        draft.tenant = request[CALLER].name
        choice = requested_path(request.headers.single(PATH_HEADER), config.path)
        if choice not in config.paths:
            allowed = ", ".join(config.paths)
            why = f"{PATH_HEADER}: got {choice!r}, allowed with {config.connector} engines is {allowed}"
            raise RequestError(why, param=PATH_HEADER)
        draft.requested_path = choice
        fields, summary = await read_request(request, draft, self._fleet, config)
        check_names(fields)
        draft.path, reason = self._choose_path(choice, fields, summary)
        if reason is not None:
            draft.because(reason)
        remembered = draft.path == "pull" and config.keep_references
        turn = Turn(fields, request.headers, summary) if remembered else None
        return Job(request=request, fields=fields, summary=summary, draft=draft, timer=timer, turn=turn)

    def _choose_path(
        self, choice: PathChoice, fields: Fields, summary: RequestSummary
    ) -> tuple[Path, Reason | None]:
        """A reference has one reader, once."""
        if summary.prompts > 1:
            return "local", Reason.SEVERAL_PROMPTS
        if _answers(fields) > 1:
            return "local", Reason.SEVERAL_ANSWERS
        if summary.prompt_logprobs:
            return "local", Reason.PROMPT_LOGPROBS
        if choice == "local":
            return "local", Reason.FORCED
        return self._config.mode, None if choice == "auto" else Reason.FORCED

    async def _attempts(self, job: Job) -> Outcome:
        draft, timeouts = job.draft, self._config.timeouts
        while True:
            draft.attempts += 1
            try:
                return await self._attempt(job)
            except UpstreamFailed as failure:
                detail = f" ({describe(failure.__cause__)})" if failure.__cause__ else ""
                log.warning(
                    "%s: attempt %d: %s%s",
                    *(draft.handoff_id, draft.attempts, failure, detail),
                    extra=draft.log_fields(),
                )
                draft.because(failure.reason)
                job.avoid.add(failure.engine.url)
                _write_off(job)
                retry = next_attempt(
                    failed=draft.attempts,
                    allowed=self._config.max_attempts,
                    too_old=self._clock() - job.timer.started > timeouts.retry_s,
                    of_prefill=failure.engine.role == "prefill",
                )
                if retry is None:
                    raise failure.as_error(to_operator=job.request[CALLER].operator) from failure
                if retry == "local":
                    draft.path = "local"

    async def _attempt(self, job: Job) -> Outcome:
        source = self._source(job)
        if source is None:
            target = await self._target(job)
            job.timer.mark(Phase.ROUTE)
            return await self._legs.decode(job, target, None)
        if job.draft.path == "push":
            return await self._push(job, source, await self._target(job))
        return await self._pull(job, source)

    async def _pull(self, job: Job, source: UpstreamEngine) -> Outcome:
        kept = self._references.take(job.turn) if job.turn is not None else None
        if kept is not None:
            job.draft.history = Identity(EngineId(kept.holder), Epoch(""))
        await self._target(job)  # no prompt is computed for a fleet that can't decode
        job.timer.mark(Phase.ROUTE)
        reference = await self._legs.prefill(job, source, PULL_PREFILL if kept is None else kept.params)
        job.timer.mark(Phase.PREFILL_NETWORK)
        target = await self._target(job, None if kept is None else kept.holder)
        job.timer.mark(Phase.BIND)
        return await self._legs.decode(job, target, reference)

    async def _push(self, job: Job, source: UpstreamEngine, target: UpstreamEngine) -> Outcome:
        job.timer.mark(Phase.ROUTE)
        beside = asyncio.create_task(self._prefill_beside(job, source))
        try:
            try:
                outcome = await self._legs.decode(job, target, push_decode(source.address), beside)
            except UpstreamFailed as failure:
                if failure.late and not beside.done():
                    # It has waited for the other leg, which began when it did.
                    raise UpstreamFailed(source, "no answer in time", late=True) from failure
                raise
            # It is done but for the last bytes of its answer, or the decode engine had all of the prompt.
            done, _ = await asyncio.wait((beside,), timeout=self._config.timeouts.linger_s)
            if done and isinstance(unneeded := beside.exception(), UpstreamFailed):
                job.draft.because(unneeded.reason)  # though nobody waited for it
            return outcome
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def _prefill_beside(self, job: Job, source: UpstreamEngine) -> msgspec.Raw:
        started = self._clock()
        reference = await self._legs.prefill(job, source, PUSH_PREFILL)
        job.draft.prefill_wall_s = self._clock() - started
        return reference

    def _source(self, job: Job) -> UpstreamEngine | None:
        """The prefill engine, if the path needs one. When none is left, the path is local."""
        if job.draft.path == "local":
            return None
        avoid = job.avoid | self._fleet.resting()
        choice = _POLICIES.choose_prefill(self._view(job), job.draft.model, avoid)
        if isinstance(choice, Reason):
            job.draft.because(choice)
            job.draft.path = "local"
            return None
        return self._fleet.by_url[choice.url]

    async def _target(self, job: Job, holder: str | None = None) -> UpstreamEngine:
        """The decode engine, `holder` if that is as good. Raises RequestError (503) when there is none."""
        avoid = job.avoid | self._fleet.resting()
        choice = _POLICIES.choose_decode(self._view(job), job.draft.model, avoid, holder)
        if isinstance(choice, Reason):
            await self._fleet.poll(self._fleet.decode)  # one that has just been started may be up
            choice = _POLICIES.choose_decode(self._view(job), job.draft.model, avoid, holder)
        if isinstance(choice, Reason):
            job.draft.because(choice)
            obstacles = [(engine, engine.problem) for engine in self._fleet.decode if engine.problem]
            raise no_decode_engine(job.draft.model, obstacles, choice, job.request[CALLER])
        return self._fleet.by_url[choice.url]

    def _view(self, job: Job) -> FleetView:
        model, fleet = job.draft.model, self._fleet
        return FleetView(
            [engine.view(model) for engine in fleet.prefill], [engine.view(model) for engine in fleet.decode]
        )


def _write_off(job: Job) -> None:
    """What the failed attempt took was for nothing."""
    job.draft.prefill = job.draft.decode = job.draft.prefill_wall_s = None
    job.timer.mark(Phase.RETRY)
    job.timer.for_nothing()


def _answers(fields: Fields) -> int:
    """How many are asked for; a value that is no number is the engine's to refuse."""
    asked = 1
    for name in ("n", "best_of"):
        try:
            asked = max(asked, msgspec.json.decode(fields.get(name, b"1"), type=int))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return asked
