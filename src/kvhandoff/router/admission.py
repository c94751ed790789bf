"""What a request is, before anything is sent: its model, its path, and the conversation it belongs to."""

from __future__ import annotations

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, unavailable
from kvhandoff.core.ids import Identity
from kvhandoff.core.phases import PhaseTimer
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.conversations import Conversations, Place
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Engine
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.index import Turn
from kvhandoff.router.legs import leg_lines
from kvhandoff.router.names import check_names, key_of_names, names_of
from kvhandoff.router.policy import (
    PATH_HEADER,
    RETURN_HEADER,
    History,
    choose_return,
    requested_path,
    requested_return,
    tokens_of,
)
from kvhandoff.router.prefixes import Prefixes
from kvhandoff.router.reading import read_request
from kvhandoff.router.records import Draft


class Admission:
    """Reads requests, and remembers the conversations of those that were answered."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        conversations: Conversations,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._conversations = conversations
        self._names_key = key_of_names(config.cluster_key)
        self._prefixes = Prefixes(config.max_conversations)
        self._clock = clock

    async def admit(self, request: wire.Request, draft: Draft, timer: PhaseTimer) -> Exchange:
        """Read the request and choose its path. Raises RequestError."""
        config = self._config
        draft.tenant = request[CALLER].name
        draft.requested_path = requested_path(request.headers.single(PATH_HEADER), config.path)
        draft.requested_return = requested_return(request.headers.single(RETURN_HEADER), config.return_mode)
        fields, summary = await read_request(request, draft, self._fleet, config)
        if summary.endpoint is Endpoint.RESPONSES:
            self._check_responses(summary.model)
        x = Exchange(
            request=request,
            fields=fields,
            summary=summary,
            headers=leg_lines(request.headers if draft.trace is None else {}, draft.handoff_id),
            clock=self._clock,
            timer=timer,
            draft=draft,
        )
        await self._recall(x)
        self._choose_path(x)
        return x

    def remember(self, x: Exchange) -> None:
        """The decode engine has answered, and keeps the turn for the next one."""
        leg = x.draft.decode
        if x.names is None or x.retain is None or leg is None or not x.answered:
            return
        source = x.draft.prefill.engine if x.draft.prefill is not None else None
        self._prefixes.remember(leg.key, source, x.tokens)
        self._conversations.remember(x.turn_names(), Turn(leg.key, leg.engine))

    async def _recall(self, x: Exchange) -> None:
        """The conversation's history, if a decode engine keeps it."""
        requested = x.draft.requested_return
        if requested == "off" or x.summary.prompts > 1:
            check_names(x.fields)
            return
        names = names_of(x.fields, x.request.headers, x.summary, tenant=x.draft.tenant, key=self._names_key)
        if not names:
            return
        x.names = names
        x.retain = None if self._config.retain == "off" else self._config.retain
        history, missed = await self._conversations.find(names, self._locate)
        x.draft.remembered = history is not None
        if missed is not None:
            x.draft.because(missed)
        if history is None:
            return
        x.cached = self._prefixes.find(history.key, self._fleet.prefill)
        reason = choose_return(requested, history.n_tokens)
        if reason is not None:
            x.draft.because(reason)
            return
        x.history, x.holder = history, self._fleet.life(history.source)
        x.draft.history = history.source

    def _locate(self, life: Identity) -> Place | None:
        engine = self._fleet.life(life)
        if engine is None or engine.state is None:
            return None
        return Place(engine.state.control_address, engine.state.max_model_len)

    def _choose_path(self, x: Exchange) -> None:
        draft, view, history = x.draft, self._fleet.view(), None
        if x.history is not None and x.holder is not None:
            x.kept = self._kept(x.history, x.holder)
            history = History(x.holder.url, x.kept, draft.requested_return == "on")
        decision = self._config.policies.choose_path(draft.requested_path, x.summary, view, history, x.cached)
        draft.path, draft.weighed, reason = decision.path, decision.weighed, decision.reason
        weighed = decision.weighed
        x.tokens = tokens_of(x.summary, view) if weighed is None else weighed.prompt_tokens
        x.chosen = decision.source
        if reason is not None:
            draft.because(reason)
        if not decision.returns:
            x.history = None
            draft.because(Reason.RETURN_TOO_SHORT)
        if reason is Reason.NO_PREFILL_ENGINE and draft.requested_path in ("pull", "push"):
            tolerate_miss(self._config, f"no prefill engine for {x.summary.model!r} is healthy", reason)

    def _kept(self, history: HistoryRef, holder: Engine) -> int:
        """Tokens of a history, about: until its engine's account is in, those of the turn's prompt."""
        accounted = holder.state is not None and history.n_tokens < holder.state.max_model_len
        known = None if accounted else self._prefixes.tokens(history.key)
        return history.n_tokens if known is None else min(known, history.n_tokens)

    def _check_responses(self, model: str) -> None:
        if not self._fleet.serves_responses(model):
            here, there = Endpoint.RESPONSES.path, Endpoint.CHAT.path
            why = f"{here}: the engines of {model!r} don't serve it; {there} they do"
            raise RequestError(why, status=501, code="unsupported_endpoint")


def tolerate_miss(config: RouterConfig, why: str, reason: Reason) -> None:
    """Go on without a transfer, unless the operator wants an error then (`on_miss`). Raises RequestError."""
    if config.on_miss == "error":
        raise unavailable(f"{why}, and on_miss is error", code=reason)
