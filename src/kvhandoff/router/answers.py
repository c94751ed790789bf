"""What may come of a leg: a result, an answer for the client, or a failure that another attempt may mend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from kvhandoff.core.errors import RequestError, describe
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.router import wire
from kvhandoff.router.engine import Engine, Role, refuses_connection
from kvhandoff.router.side import read_error

log = logging.getLogger(__name__)

FailureKind = Literal["refused", "not_sent", "ticket_refused", "broken", "late"]
"""`refused`: nothing listens there; `not_sent`: no connection for another cause, such as a burst that a live
engine has not accepted yet; `ticket_refused`: bad_ticket, as a 403 or in a vLLM engine's answer; `broken`:
reset, 5xx, or an unusable answer; `late`: a deadline, or an engine that has fallen silent. After the first
three the engine has not begun anything for a ticket (field case 15)."""


class LegFailed(Exception):
    """A leg came to nothing, the client has seen nothing of it, and another attempt may do better."""

    def __init__(self, engine: Engine, kind: FailureKind, why: str) -> None:
        super().__init__(f"{engine}: {why}")
        self.engine = engine
        self.kind = kind
        self.why = why

    @property
    def role(self) -> Role:
        """Whose leg it was; the one leg of a local path is a decode engine's."""
        return self.engine.role

    @property
    def dispatched(self) -> bool:
        """Whether the engine may have begun."""
        return self.kind in ("broken", "late")

    def as_error(self, *, to_operator: bool) -> RequestError:
        """What the client is told when no attempt is left; where which engine is, operators alone."""
        what = str(self) if to_operator else None
        return engine_error(self.role, self.kind, what, code=f"{self.role}_failed")


def engine_error(role: Role, kind: FailureKind, what: str | None, *, code: str) -> RequestError:
    """A failed leg as an error. `what`: the particulars, where the client may have them."""
    status = {"late": 504, "broken": 502}.get(kind, 503)
    message = f"the {role} engine {_FOR_CLIENTS[kind]}" if what is None else what
    return RequestError(message, status=status, code=code, kind="engine_error")


_FOR_CLIENTS: dict[FailureKind, str] = {
    "refused": "can't be reached",
    "not_sent": "can't be reached",
    "ticket_refused": "doesn't take the router's tickets",
    "broken": "gave no usable answer",
    "late": "did not answer in time",
}


class Answer(NamedTuple):
    """A whole answer of an engine, for the client as it is."""

    status: int
    content_type: str
    body: bytes


class Prefilled(NamedTuple):
    """What a prefill leg has left behind."""

    offer: OfferDescriptor | None
    prompt_token_ids: msgspec.Raw
    """Unread; the decode leg gets them as they are."""


class TicketParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kv_transfer_params` of a leg."""

    ticket: str
    prompt_token_ids: msgspec.Raw | None = None
    """Decode leg: the prefill engine's; the decode engine doesn't tokenize again."""


class _PrefillParams(msgspec.Struct):
    offer: OfferDescriptor | None
    prompt_token_ids: msgspec.Raw


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: _PrefillParams


class _Refusal(msgspec.Struct):
    error: str


class _RefusedAnswer(msgspec.Struct):
    kv_transfer_params: _Refusal


class _AnyAnswer(msgspec.Struct):
    id: str | None = None


_any_answer = msgspec.json.Decoder(_AnyAnswer)
_prefill_answer = msgspec.json.Decoder(_PrefillAnswer)
_refused_answer = msgspec.json.Decoder(_RefusedAnswer)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

_PARAMS = "kv_transfer_params"

_MISSES = frozenset(reason.value for reason in Reason)
"""Error codes of an engine that was told to answer with an error when the KV can't be used."""


class _Response(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    async def read(self) -> bytes: ...


async def whole(response: _Response) -> Answer:
    """The answer, its body read."""
    content_type = response.headers.get("Content-Type", "application/json")
    return Answer(response.status, content_type, await response.read())


def read_prefilled(engine: Engine, key: HandoffKey, answer: Answer) -> Prefilled:
    """What a prefill engine's 200 says. Raises LegFailed when it is not a prefill leg's answer to `key`."""
    try:
        params = _prefill_answer.decode(answer.body).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        refusal = _read_refusal(answer)
        if refusal == "bad_ticket":
            why = "it did not obey the ticket, and served the leg like anybody's"
            raise LegFailed(engine, "ticket_refused", why) from error
        if refusal is not None:
            raise LegFailed(engine, "broken", f"it made no offer: {refusal}") from error
        why = f"its answer has no usable kv_transfer_params ({error}); does it run a handoff agent?"
        raise LegFailed(engine, "broken", why) from error
    if params.offer is not None and params.offer.key != key:
        raise LegFailed(engine, "broken", f"it answered {key} with an offer of {params.offer.key}")
    return Prefilled(params.offer, params.prompt_token_ids)


def _read_refusal(answer: Answer) -> str | None:
    """Why a vLLM engine made no offer: its connector can't refuse a request, so it says so in the answer."""
    try:
        return _refused_answer.decode(answer.body).kv_transfer_params.error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_response_id(answer: Answer) -> str | None:
    """The `id` in the body, if it has one."""
    try:
        return _any_answer.decode(answer.body).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def without_params(answer: Answer) -> Answer:
    """The same answer without what its engine tells the router in `kv_transfer_params`, where vLLM's say
    why they have not obeyed a ticket."""
    if _PARAMS.encode() not in answer.body:
        return answer
    try:
        fields = _object.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer
    if bytes(fields.get(_PARAMS, b"null")) == b"null":
        return answer
    fields[_PARAMS] = msgspec.Raw(b"null")
    return answer._replace(body=msgspec.json.encode(fields))


def for_client(engine: Engine, answer: Answer) -> Answer:
    """An answer that is not 200, if the client is to have it: a 4xx, or a miss that the operator wants seen.

    A miss's own message names engines and their addresses: it goes to the log, and clients hear the reason.
    Raises LegFailed for anything else.
    """
    error = read_error(answer.body)
    if answer.status == 403 and error.code == "bad_ticket":
        raise LegFailed(engine, "ticket_refused", error.message)
    if 400 <= answer.status < 500:
        return answer
    if answer.status >= 500 and error.code in _MISSES:
        log.warning("%s: %s", engine, error.message)
        message = f"the prompt's KV can't be used ({error.code}), and on_miss is error"
        miss = RequestError(message, code=str(error.code), kind="kv_miss")
        return Answer(answer.status, "application/json", msgspec.json.encode(miss.body()))
    raise LegFailed(engine, "broken", f"status {answer.status} {error.message}".rstrip())


def network_failure(engine: Engine, error: Exception) -> LegFailed:
    """An exception on the way to an answer, as a failed leg."""
    if refuses_connection(error):
        return LegFailed(engine, "refused", describe(error))
    if isinstance(error, wire.NotConnected):
        return LegFailed(engine, "not_sent", describe(error))
    if isinstance(error, TimeoutError):
        why = "no answer in time" if engine.healthy else f"no answer, and then: {engine.problem}"
        return LegFailed(engine, "late", why)
    return LegFailed(engine, "broken", "it ended before its answer was complete")
