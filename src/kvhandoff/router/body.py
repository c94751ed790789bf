"""A client's body: only its top level is taken apart, and only what a policy needs is read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary
from kvhandoff.web import json_fault

Fields = dict[str, msgspec.Raw]
"""The top level of a body: each field's JSON, unread."""

_body = msgspec.json.Decoder(Fields)
_text = msgspec.json.Decoder(str)


def parse_body(raw: bytes) -> Fields:
    """The top level of a client's body. Raises RequestError (400) when it is no JSON object."""
    try:
        return _body.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"body: it must be a JSON object ({json_fault(raw, error)})"
        raise RequestError(why, param="body") from error


def read_model(fields: Fields, allowed: str) -> str:
    """The name in `model`. Raises RequestError (400) when it is missing, or no text."""
    if "model" not in fields:
        raise RequestError(f"model: it is missing, allowed is {allowed}", param="model")
    try:
        return _text.decode(fields["model"])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = shown_json(fields["model"])
        raise RequestError(f"model: got {shown}, allowed is a string: {allowed}", param="model") from error


def unknown_model(model: str, served: Iterable[str]) -> RequestError:
    """The 404 for a name that no decode engine serves."""
    why = invalid("model", model, ", ".join(sorted(served)) or "no name yet").message
    return RequestError(why, status=404, param="model", code="model_not_found")


def shown_json(value: msgspec.Raw) -> str:
    """A field's bad value, as a message shows it: its JSON, and of a long one the beginning."""
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError:
        return "bytes that are not valid UTF-8"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


_SHOWN = 80
"""Characters of a bad value's JSON in a message."""


def summarize(fields: Fields, endpoint: Endpoint) -> RequestSummary:
    """What the policies need to know. A field of a wrong type counts as absent: the engine refuses it."""
    if endpoint is Endpoint.COMPLETIONS:
        prompts, bound, exact = _measure_prompt(fields)
    else:
        prompts, exact, bound = 1, False, _size(fields, endpoint.input_field) + _size(fields, "instructions")
    return RequestSummary(
        model=read_text(fields, "model"),
        endpoint=endpoint,
        stream=_is_true(fields, "stream"),
        prompts=prompts,
        prompt_bound=bound,
        prompt_exact=exact,
        prompt_logprobs=_given(fields, "prompt_logprobs") or _echo_needs_logprobs(fields, endpoint),
        cache_salt=read_text(fields, "cache_salt"),
    )


_READ_UP_TO = 4096
"""Bytes of JSON; a prompt of more is long whatever its escapes stand for, and is not read."""


def _measure_prompt(fields: Fields) -> tuple[int, int, bool]:
    """(prompts, bound on their tokens, whether it is their number) of a completion's `prompt`: text, token
    ids, or a list of either."""
    size = _size(fields, "prompt")
    if not size or memoryview(fields["prompt"])[0] != ord("["):
        return 1, len(read_text(fields, "prompt").encode()) if size <= _READ_UP_TO else size, False
    raw = bytes(fields["prompt"])
    first = raw[1:].lstrip()[:1]
    if first in (b'"', b"["):
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw])), size, False
    return 1, raw.count(b",") + (first != b"]"), True


def _echo_needs_logprobs(fields: Fields, endpoint: Endpoint) -> bool:
    """A completion's echo has those that were asked for; for a chat's, vLLM computes them in any case."""
    return _is_true(fields, "echo") and (endpoint is Endpoint.CHAT or _given(fields, "logprobs"))


def check_stateless(fields: Fields) -> None:
    """A response must be answerable by any engine, and at once. Raises RequestError (400)."""
    for name, (allowed, why) in _STATEFUL.items():
        value = bytes(fields.get(name, b"null")).decode(errors="replace")
        if value not in allowed:
            shown = " or ".join(allowed)
            raise RequestError(f"{name}: got {value[:_SHOWN]}, allowed is {shown}: {why}", param=name)


_STATEFUL = {
    "previous_response_id": (("null",), "no response is stored; send the conversation in input"),
    "conversation": (("null",), "no conversation is stored; send it in input"),
    "background": (("null", "false"), "no response is stored to be fetched later"),
}


def _size(fields: Fields, name: str) -> int:
    return memoryview(fields[name]).nbytes if name in fields else 0


def _is_true(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) == b"true"


def _given(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) not in (b"null", b"false")


def read_text(fields: Fields, name: str) -> str:
    """The text in a field; empty when it is missing, or no text."""
    if name not in fields:
        return ""
    try:
        return _text.decode(fields[name])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
