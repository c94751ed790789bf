"""An operator's order: a small JSON body, whose faults are told in a user's words."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvhandoff.core.errors import RequestError, excerpt
from kvhandoff.core.fields import misfit
from kvhandoff.web import json_fault

_Order = TypeVar("_Order", bound=msgspec.Struct)


def read_order(raw: bytes, kind: type[_Order]) -> _Order:
    """The order in a body. Raises RequestError (400) that names the field, the value and what is allowed."""
    try:
        whole = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"body: it must be a JSON object ({json_fault(raw, error)})"
        raise RequestError(why, param="body") from error
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        wrong = misfit(error, whole, kind)
        raise RequestError(wrong.message("body", excerpt), param=wrong.field or "body") from error
