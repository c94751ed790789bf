"""What each leg of a request is sent: the rewriting table, as data.

The prefill leg computes the prompt and makes exactly one token, which nobody reads. So it keeps what shapes
the prompt's token ids, drops what shapes or reports the answer, and keeps cheap scalars as they are. A bad
value of a kept field is thus refused before any work, one of a dropped field only by the decode engine, after
the prefill leg. The decode leg is the client's own request. Only the top level of a body is taken apart:
messages, schemas and numbers travel as the bytes that the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from kvhandoff.core.errors import RequestError
from kvhandoff.router.body import Fields
from kvhandoff.router.trace_context import trace_context
from kvhandoff.router.wire import header_lines


@dataclass(frozen=True, slots=True)
class Keep:
    """The client's value, if there is one."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing, whatever the client sent."""


@dataclass(frozen=True, slots=True)
class Set:
    """This value, whatever the client sent."""

    value: int | bool


@dataclass(frozen=True, slots=True)
class Cap:
    """The client's whole number, but no more than this. Another type is kept, for the engine to refuse."""

    limit: int


@dataclass(frozen=True, slots=True)
class Without:
    """The client's object without these names in it. Another type is kept, for the engine to refuse; an
    object that can't be read is refused here."""

    names: frozenset[str]


Action = Keep | Drop | Set | Cap | Without


class Row(NamedTuple):
    """One field: what the prefill leg gets, and what the decode leg gets."""

    prefill: Action
    decode: Action = Keep()


KEEP: Final = Keep()
DROP: Final = Drop()
NO_PARAMS: Final = Without(frozenset({"kv_transfer_params", "ec_transfer_params"}))

Rows = Mapping[str, Row]

ROWS: Final[Rows] = {
    # How much is generated. One token in all: the engine needs a last step to finish the prompt.
    "max_tokens": Row(Set(1)),
    # Both of these would win over max_tokens (field case 31).
    "max_completion_tokens": Row(DROP),
    "max_output_tokens": Row(DROP),
    # More than max_tokens would be refused (field case 32).
    "min_tokens": Row(Cap(1)),
    # One sequence is enough to compute the prompt.
    "n": Row(DROP),
    "best_of": Row(DROP),
    "use_beam_search": Row(DROP),
    # How generation ends. A stop string may end a request as an abort, and an abort makes no offer.
    "stop": Row(DROP),
    "stop_token_ids": Row(DROP),
    "include_stop_str_in_output": Row(DROP),
    # Harmless with one token.
    "ignore_eos": Row(KEEP),
    # What is reported of the answer: nobody reads the prefill leg's.
    "logprobs": Row(DROP),
    "top_logprobs": Row(DROP),
    "return_token_ids": Row(DROP),
    "return_tokens_as_token_ids": Row(DROP),
    # Refused without logprobs.
    "logprob_token_ids": Row(DROP),
    # What is reported of the prompt. Log-probabilities of the prompt make the path local, so that none of it
    # reaches a prefill leg; a plain echo is the prompt's text, which the decode engine has.
    "prompt_logprobs": Row(DROP),
    "echo": Row(DROP),
    "return_token_offsets": Row(DROP),
    "return_prompt_text": Row(DROP),
    # The prefill leg's answer is one JSON body: a stream has no place for the offer (field case 35).
    "stream": Row(Set(False)),
    # Refused without stream.
    "stream_options": Row(DROP),
    # Sampling. Without effect on the KV; kept, so that a value out of range is refused before any work.
    "temperature": Row(KEEP),
    "top_p": Row(KEEP),
    "top_k": Row(KEEP),
    "min_p": Row(KEEP),
    "seed": Row(KEEP),
    "presence_penalty": Row(KEEP),
    "frequency_penalty": Row(KEEP),
    "repetition_penalty": Row(KEEP),
    "logit_bias": Row(KEEP),
    # The chat template writes both into the prompt, or leaves the tools out for tool_choice "none".
    "tools": Row(KEEP),
    "tool_choice": Row(KEEP),
    "parallel_tool_calls": Row(KEEP),
    # Constraints on the answer: compiling a grammar for a token that is thrown away costs time.
    "response_format": Row(DROP),
    "structured_outputs": Row(DROP),
    "guided_json": Row(DROP),
    "guided_regex": Row(DROP),
    "guided_choice": Row(DROP),
    "guided_grammar": Row(DROP),
    # In the root of the token chain: both legs need the same.
    "cache_salt": Row(KEEP),
    # Names of the conversation, for the router.
    "conversation_id": Row(DROP, DROP),
    "prompt_cache_key": Row(DROP, DROP),
    # A handoff has the router's id.
    "request_id": Row(DROP, DROP),
    # Never a client's (field case 60); the router puts its own ticket there.
    "kv_transfer_params": Row(DROP, DROP),
    "ec_transfer_params": Row(DROP, DROP),
    # vLLM merges both with these: a leg without a ticket would have the client's.
    "vllm_xargs": Row(NO_PARAMS, NO_PARAMS),
}
"""Fields that have no row are kept on both legs: messages, prompt, model, chat_template_kwargs and so on."""

RESPONSES_ROWS: Final[Rows] = {
    **ROWS,
    # The only name of the limit there.
    "max_tokens": Row(KEEP),
    "max_output_tokens": Row(Set(1)),
    # Nobody could fetch a stored response, which is why a body that needs one is refused.
    "store": Row(Set(False), Set(False)),
    # What is reported of the answer, and constraints on it.
    "include": Row(DROP),
    "text": Row(DROP),
}
"""Those of `/v1/responses`."""


class Rewriting:
    """A table at work."""

    def __init__(self, rows: Rows) -> None:
        self._prefill = _Side({name: row.prefill for name, row in rows.items()})
        self._decode = _Side({name: row.decode for name, row in rows.items()})

    def prefill(self, client: Fields) -> Fields:
        """The prefill leg's body, without kv_transfer_params."""
        return self._prefill.rewrite(client)

    def decode(self, client: Fields) -> Fields:
        """The decode (or local) leg's body, without kv_transfer_params."""
        return self._decode.rewrite(client)


class _Side:
    """The actions for one leg, sorted by what they take: most fields of the table are in no body."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._dropped = frozenset(name for name, action in actions.items() if isinstance(action, Drop))
        self._changed = {name: a for name, a in actions.items() if isinstance(a, Cap | Without)}
        self._set = {
            name: msgspec.Raw(msgspec.json.encode(action.value))
            for name, action in actions.items()
            if isinstance(action, Set)
        }

    def rewrite(self, client: Fields) -> Fields:
        """Raises RequestError for an object that can't be read."""
        fields = {name: value for name, value in client.items() if name not in self._dropped}
        for name, action in self._changed.items():
            if name not in fields:
                continue
            match action:
                case Cap(limit):
                    fields[name] = _capped(fields[name], limit)
                case Without(names):
                    fields[name] = _without(name, fields[name], names)
        fields.update(self._set)
        return fields


def leg_body(fields: Fields, kv_transfer_params: msgspec.Struct | None) -> bytes:
    """The JSON to send."""
    if kv_transfer_params is None:
        return msgspec.json.encode(fields)
    return msgspec.json.encode({**fields, "kv_transfer_params": kv_transfer_params})


def leg_headers(client: Mapping[str, str], handoff_id: str) -> dict[str, str]:
    """The headers to send: JSON, unpacked answers, and the handoff id as the request's. Of the client's,
    engines get its trace, and nothing that could steer a transfer (field case 60)."""
    return trace_context(client) | {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "X-Request-Id": handoff_id,
    }


def leg_lines(client: Mapping[str, str], handoff_id: str) -> bytes:
    """The same, as lines."""
    trace = trace_context(client)
    lines = _LINES % handoff_id.encode("ascii")
    return header_lines(trace) + lines if trace else lines


_LINES = header_lines(leg_headers({}, "%b"))


def _without(field: str, raw: msgspec.Raw, names: frozenset[str]) -> msgspec.Raw:
    if memoryview(raw)[0] != ord("{"):
        return raw
    try:
        value = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a reader that takes any bytes might read on
        raise RequestError(f"{field}: it must be a JSON object ({error})", param=field) from error
    if names.isdisjoint(value):
        return raw
    return msgspec.Raw(msgspec.json.encode({k: v for k, v in value.items() if k not in names}))


def _capped(raw: msgspec.Raw, limit: int) -> msgspec.Raw:
    try:
        value = msgspec.json.decode(raw, type=int)
    except msgspec.ValidationError:
        return raw
    return raw if value <= limit else msgspec.Raw(msgspec.json.encode(limit))
