"""An order, of an operator or an engine: a small JSON body, whose faults are told in a user's words."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from kvhandoff.core.errors import RequestError, excerpt
from kvhandoff.core.fields import misfit
from kvhandoff.web import json_fault

_Order = TypeVar("_Order", bound=msgspec.Struct)


def read_order(raw: bytes, kind: type[_Order]) -> _Order:
    """The order in a body. Raises RequestError (400) that names the field, the value and what is allowed."""
    try:
        whole = msgspec.json.decode(raw)
        # msgspec takes the last of two fields with one name, and does not say that there are two.
        json.loads(raw.decode(), object_pairs_hook=_each_once)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"body: it must be a JSON object ({json_fault(raw, error)})"
        raise RequestError(why, param="body") from error
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        wrong = misfit(error, whole, kind)
        raise RequestError(wrong.message("body", excerpt), param=wrong.field or "body") from error


def _each_once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in fields:
        if name in seen:
            both = f"{excerpt(seen[name])} and {excerpt(value)}"
            raise RequestError(f"{excerpt(name)[1:-1]}: got {both}, allowed is one", param=name)
        seen[name] = value
    return seen
