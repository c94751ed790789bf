"""The client's W3C Trace Context, as far as the router takes it: https://www.w3.org/TR/trace-context/

A malformed one counts as none: engines would refuse a whole request for a
header that their server can't read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_TRACESTATE = 512
"""Characters; what the recommendation asks everybody to pass on."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Version, trace, parent and flags; a later version may have more parts, but isn't there yet."""


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """`traceparent`, and `tracestate` where there is one of up to `MAX_TRACESTATE` characters; empty: the
    request is part of no trace."""
    parent = headers.get("traceparent", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    state = headers.get("tracestate", "")
    fits = 0 < len(state) <= MAX_TRACESTATE and state.isascii() and state.isprintable()
    return {"traceparent": parent, **({"tracestate": state} if fits else {})}
