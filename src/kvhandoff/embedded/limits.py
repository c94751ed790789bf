"""Which requests can run at all: checked when they are submitted, before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.embedded.api import EngineRequest, SamplingParams


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError, a 400 naming the field, for a request that can never run.

    The length is checked first: a huge prompt is refused without a look at its tokens.
    """
    prompt, params = request.prompt_token_ids, request.params
    check_params(params, vocab_size)
    wanted = len(prompt) + params.max_tokens
    if wanted > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} "
            f"tokens ({len(prompt)} in the prompt, {params.max_tokens} in the completion). Please reduce the "
            "length of the prompt or of the completion.",
            param="prompt",
            code="context_length_exceeded",
        )
    check_token_ids("prompt", prompt, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError, a 400 naming the field, unless there are tokens, all of the vocabulary."""
    if len(token_ids) == 0:
        raise invalid(field, token_ids, "at least one token")
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise invalid(field, token, f"token ids from 0 to {vocab_size - 1}")


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError, a 400 naming the field, for values that no request can be sampled with."""

    def check(field: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise invalid(field, getattr(params, field), allowed)

    check("max_tokens", params.max_tokens >= 1, "1 or more")
    check("min_tokens", 0 <= params.min_tokens <= params.max_tokens, f"0 to max_tokens ({params.max_tokens})")
    check("temperature", 0 <= params.temperature < math.inf, "0 (greedy) or more")
    check("top_p", 0 < params.top_p <= 1, "more than 0, up to 1")
    check("top_k", params.top_k >= -1, "1 or more, or 0 or -1 for all")
    known = all(0 <= token < vocab_size for token in params.stop_token_ids)
    check("stop_token_ids", known, f"token ids from 0 to {vocab_size - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        check(field, count is None or 0 <= count <= vocab_size, f"0 to the vocabulary's {vocab_size}")
