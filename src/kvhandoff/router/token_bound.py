"""How many tokens a request may use at most, by its body."""

from __future__ import annotations

import msgspec

from kvhandoff.router.body import Fields
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary

UNKNOWN_CONTEXT = 2**20
"""Tokens; of a model whose engine doesn't say."""

_LIMITS = {
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
}
"""The fields that limit an answer; the first one that is given counts."""


_number = msgspec.json.Decoder(int | None)


def token_bound(fields: Fields, summary: RequestSummary, context: int) -> int:
    """Prompt and answer tokens, at most. `context`: the model's, in tokens: no sequence has more, nor has an
    answer without a limit of its own. Each of a completion's several prompts has its answers."""
    prompt = min(summary.prompt_bound, summary.prompts * context)
    answer = context
    for name in _LIMITS[summary.endpoint]:
        if given := _count(fields, name):
            answer = given
            break
    answers = max(_count(fields, "n") or 1, _count(fields, "best_of") or 1)
    return prompt + summary.prompts * answers * min(answer, context)


def _count(fields: Fields, name: str) -> int | None:
    """A number above 0; None for anything else, which the engine refuses, or takes for none."""
    if name not in fields:
        return None
    try:
        value = _number.decode(fields[name])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if value and value > 0 else None
