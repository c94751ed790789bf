"""Runs one leg on one engine, and gives the client its answer."""

from __future__ import annotations

from collections.abc import Mapping

from kvhandoff.core.phases import Phase
from kvhandoff.handoff.tickets import MissPolicy
from kvhandoff.router import wire
from kvhandoff.router.answering import Outcome, end_passage, pass_on, passage_of, read_whole
from kvhandoff.router.answers import (
    Answer,
    LegFailed,
    for_client,
    network_failure,
    read_prefilled,
    read_response_id,
    whole,
    without_params,
)
from kvhandoff.router.breaker import LegOutcome
from kvhandoff.router.config import Timeouts
from kvhandoff.router.deadline import Deadlines
from kvhandoff.router.dialect import dialect_of
from kvhandoff.router.engine import Engine
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.moves import Bound, Moved
from kvhandoff.router.source import Source
from kvhandoff.router.stream import Passage


class Dispatcher:
    """Sends legs. Failures that another attempt may mend are raised as LegFailed."""

    def __init__(self, client: wire.Client, timeouts: Timeouts, on_miss: MissPolicy) -> None:
        self._client = client
        self._timeouts = timeouts
        self._on_miss = on_miss
        self._deadlines = Deadlines()

    async def prefill(self, x: Exchange, source: Source) -> Outcome | None:
        """Run a prefill leg that the decode leg waits for (pull). None: done, `source.prefilled` has the
        result. A 4xx is the client's answer."""
        body = self.prefill_body(x, source)
        tokens = x.to_prefill(source.engine)
        with source.engine.reserve(tokens, tokens):
            x.cut(Phase.ROUTE)
            refused = await self.prefill_leg(x, source, body)
        x.cut(Phase.PREFILL_NETWORK)
        if refused is None:
            return None
        source.owed = False
        return pass_on(x.draft, refused)

    def prefill_body(self, x: Exchange, source: Source, target: Engine | None = None) -> bytes:
        """What the prefill leg is sent; `target`: the decode engine that will grant its blocks (push)."""
        addresses = (target.state.control_address,) if target is not None and target.state is not None else ()
        ticket = source.engine.sign(
            "prefill",
            source.ref.key,
            cache_salt=x.summary.cache_salt,
            history=x.history,
            push=target is not None,
            peers=addresses,
        )
        dialect = dialect_of(source.engine.integration, x.summary.endpoint)
        return dialect.prefill(x.fields, x.draft.handoff_id, x.summary.cache_salt, ticket)

    async def prefill_leg(self, x: Exchange, source: Source, body: bytes) -> Answer | None:
        """Run it. None: done, `source.prefilled` has the result. An answer: the engine refuses it (4xx)."""
        source.owed = True
        engine = source.engine
        with x.draft.traced("prefill", source.ref, engine.url) as context:
            leg = self._post(x, engine, body, context)
            with engine.circuit.begin(_verdict):
                try:
                    with self._deadlines.within(self._timeouts.prefill_s) as wait, engine.silence.ends(wait):
                        async with leg:
                            x.decode_body(engine.integration)  # while the engine works: its like will answer
                            answer = await whole(await leg.answer())
                except OSError as error:
                    raise network_failure(engine, error) from error
                if answer.status != 200:
                    return for_client(engine, answer)
                source.prefilled = read_prefilled(engine, source.ref.key, answer)
                return None

    async def decode(self, x: Exchange, engine: Engine) -> Outcome:
        """Run the decode or local leg and give the client its answer.

        Raises RequestError when an answer that is not streamed breaks off, and Moved when an operator has
        taken the leg away.
        """
        body = self._decode_body(x, engine)
        x.draft.decode = x.leg_at(engine)
        name = "local" if x.source is None else "decode"
        with x.draft.traced(name, x.draft.decode, engine.url) as context:
            leg = self._post(x, engine, body, context)
            with (
                engine.reserve(x.tokens, x.to_compute) as x.reservation,
                engine.circuit.begin(_verdict) as outcome,
            ):
                x.cut(Phase.BIND if x.path == "pull" else Phase.ROUTE)
                try:
                    answered = await self._decode_leg(x, engine, leg, outcome)
                except OSError as error:
                    if x.move is not None and isinstance(error, TimeoutError):
                        raise Moved from error
                    raise network_failure(engine, error) from error
                finally:
                    x.bound = None
        if isinstance(answered, Passage):
            return await end_passage(answered, x.draft, x.key, engine)
        return answered

    async def _decode_leg(
        self, x: Exchange, engine: Engine, leg: wire.Leg, outcome: LegOutcome
    ) -> Passage | Outcome:
        """A leg that is under way; the passage of a stream, which is over by then, is to be ended."""
        limit = self._timeouts.first_byte_s if x.summary.stream else self._timeouts.answer_s
        pushed = x.source is not None and x.source.awaited
        with self._deadlines.within(limit + pushed * self._timeouts.prefill_s) as deadline:
            x.bound = Bound(engine, deadline, limit)

            def begun() -> None:
                outcome.succeeded()
                x.settle()
                deadline.lift()  # from here on, the passage has its own

            async with leg:
                idle_s = self._timeouts.idle_s
                passage = passage_of(x.request, x.draft, engine, x.timer, x.clock, idle_s, begun, x.answering)
                x.turn_names()  # while the engine works, as all that is needed afterwards
                answer = await leg.answer(passage)
                if passage.open:
                    await passage.carry()
                    return passage
                x.settle()
                return await _answer(x, engine, answer)

    def _decode_body(self, x: Exchange, engine: Engine) -> bytes:
        """What the decode or local leg is sent."""
        done = x.source.prefilled if x.source is not None else None
        ids = done.prompt_token_ids if done is not None else None
        return x.decode_body(engine.integration).sealed(self._decode_ticket(x, engine), ids)

    def _decode_ticket(self, x: Exchange, engine: Engine) -> str | None:
        summary, source = x.summary, x.source
        if summary.prompts > 1:
            # A ticket is for one prompt; an engine without one serves each prompt alone.
            x.draft.joinable = False
            return None
        salt, retain = summary.cache_salt, x.retain
        if source is None:
            # The engine that has the history finds it in its own prefix cache. Log-probabilities of the
            # prompt come out of computing it.
            fetch = x.holder is not engine and not summary.prompt_logprobs
            history = x.history if fetch else None
            return engine.sign("local", x.key, cache_salt=salt, history=history, retain=retain)
        done = source.prefilled
        return engine.sign(
            "decode",
            x.key,
            cache_salt=salt,
            offer=done.offer if done is not None else None,
            push_from=source.offer() if source.awaited else None,
            retain=retain,
            on_miss=self._on_miss,
        )

    def _post(self, x: Exchange, engine: Engine, body: bytes, context: Mapping[str, str]) -> wire.Leg:
        headers = x.headers + wire.header_lines(context) if context else x.headers
        return self._client.post(engine.url + x.request.path, data=body, headers=headers)


def _verdict(error: BaseException) -> bool | None:
    """See `Circuit.begin`. An engine that refuses a ticket is well, and another life, or has another key."""
    return False if isinstance(error, LegFailed) and error.kind != "ticket_refused" else None


async def _answer(x: Exchange, engine: Engine, upstream: wire.LegAnswer) -> Outcome:
    """One that is not streamed."""
    if upstream.status != 200:
        return pass_on(x.draft, for_client(engine, await whole(upstream)))
    answer = await read_whole(upstream, x.draft, x.key, engine)
    x.answering()
    x.cut(Phase.DECODE_NETWORK)
    if not x.draft.joinable:
        x.draft.response_id = read_response_id(answer) or x.draft.response_id
    return pass_on(x.draft, without_params(answer))
