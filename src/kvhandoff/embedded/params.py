"""From a request's body and the length of its prompt to the engine's sampling parameters."""

from __future__ import annotations

from typing import TypeVar

from kvhandoff.core.errors import RequestError
from kvhandoff.embedded.api import SamplingParams
from kvhandoff.embedded.openai import AnyBody
from kvhandoff.embedded.text import SamplingDefaults

_SEED_BITS = 64


def sampling_params(
    body: AnyBody, *, prompt_tokens: int, max_model_len: int, defaults: SamplingDefaults
) -> SamplingParams:
    """What the engine is asked for, for a prompt of this length. Raises RequestError if it can't fit."""
    field, limit = body.token_limit
    check_length(prompt_tokens, max_model_len, body.input_field)
    room = max_model_len - prompt_tokens
    if limit is not None and limit > room:
        raise RequestError(
            f"{field}: got {limit}, which is too large. This model's maximum context length is "
            f"{max_model_len} tokens and your request has {prompt_tokens} input tokens "
            f"({limit} > {max_model_len} - {prompt_tokens})",
            param=field,
            code="context_length_exceeded",
        )
    if limit is None:
        caps = (room, body.default_tokens, defaults.max_new_tokens)
        limit = min(cap for cap in caps if cap is not None)
    temperature = _given(body.temperature, defaults.temperature)
    return SamplingParams(
        max_tokens=max(limit, 1),
        min_tokens=min(body.min_tokens or 0, max(limit, 1)),
        # As in vLLM: below 0.01 the softmax would overflow.
        temperature=temperature if temperature == 0 else max(temperature, 0.01),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(_given(body.top_k, defaults.top_k), 0),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.top_logprobs_wanted,
        prompt_logprobs=body.prompt_logprobs_wanted,
    )


def check_length(prompt_tokens: int, max_model_len: int, field: str, *, at_least: bool = False) -> None:
    """Raises RequestError unless the prompt leaves room for one token."""
    if prompt_tokens >= max_model_len:
        raise RequestError(
            f"{field}: This model's maximum context length is {max_model_len} tokens. However, your request "
            f"has {'at least ' if at_least else ''}{prompt_tokens} input tokens, and one more is needed for "
            f"the answer. Please reduce the length of the input.",
            param=field,
            code="context_length_exceeded",
        )


def sibling_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: seed + index as in vLLM, kept within the range of seeds."""
    if seed is None:
        return None
    half = 1 << (_SEED_BITS - 1)
    return (seed + index + half) % (1 << _SEED_BITS) - half


Number = TypeVar("Number", int, float)


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value
