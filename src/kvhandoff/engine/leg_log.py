"""One line of the log for each leg that ends."""

from __future__ import annotations

import logging

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.records import LegRecord

_log = logging.getLogger(__name__)


def log_leg(key: HandoffKey, record: LegRecord) -> None:
    """Write it, at level info."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "engine": record.engine_id,
        "leg": record.leg,
        "kv_source": record.kv_source,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "transferred_tokens": record.transferred_tokens,
        "completion_tokens": record.completion_tokens,
        "bytes": record.bytes,
        "phases_s": {phase: round(seconds, 6) for phase, seconds in record.phases.items()},
        "total_s": round(record.total_s, 6),
        "reasons": [reason.value for reason in record.reasons],
    }
    _log.info(
        "%s: %s leg %s, %s, prompt %d (cached %d, transferred %d), answer %d, %.3f s%s",
        *(key, record.leg, record.finish_reason or "ended", record.kv_source),
        *(record.prompt_tokens, record.cached_tokens, record.transferred_tokens),
        *(record.completion_tokens, record.total_s),
        f", {', '.join(record.reasons)}" if record.reasons else "",
        extra={name: value for name, value in fields.items() if value is not None},
    )
