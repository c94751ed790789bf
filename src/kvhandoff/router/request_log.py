"""One line of the log for each request that ends, as servers' access logs have it.

Written when the request is over, not when its record is complete: what only the engines know (tokens, bytes,
their reasons) is in the record, in their own logs, and in the trace.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhandoff.router.records import Draft

log = logging.getLogger(__name__)


def log_request(draft: Draft) -> None:
    """Write it, at level info. The message has what a reader looks for; fields have the same for programs."""
    if not log.isEnabledFor(logging.INFO):
        return
    prefill, decode = draft.prefill, draft.decode
    fields = draft.log_fields() | {
        "endpoint": draft.endpoint.path,
        "status": draft.status,
        "attempts": draft.attempts,
        "rebound": draft.rebound,
        "prefill_engine": prefill.engine.engine_id if prefill else None,
        "decode_engine": decode.engine.engine_id if decode else None,
        "first_byte_s": _rounded(draft.first_byte_s),
        "ttft_s": _rounded(draft.first_content_s),
        "total_s": _rounded(draft.total_s),
        "reasons": [reason.value for reason in draft.reasons],
    }
    shown = {
        "path": draft.path,
        "prefill": fields["prefill_engine"],
        "decode": fields["decode_engine"],
        "ttft_s": fields["ttft_s"],
        "total_s": fields["total_s"],
        "attempts": draft.attempts if draft.attempts > 1 else None,
        "reasons": ",".join(draft.reasons) or None,
        "tenant": draft.tenant or None,
    }
    words = " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
    known = {name: value for name, value in fields.items() if value is not None}
    log.info("%s: POST %s %s %s", draft.handoff_id, draft.endpoint.path, draft.status, words, extra=known)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
