"""What a prompt's token ids don't say, and its KV depends on: it goes into the salt of the token chain."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from kvhandoff.vllm.shapes import Request


def has_token_ids(request: Request) -> bool:
    """Whether the prompt is token ids, and all of them are known now: no embeddings given by the client, no
    input that goes on arriving, and an answer that is text."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and request.pooling_params is None
        and not request.resumable
        and all(0 <= token < 2**32 for token in request.prompt_token_ids)
    )


def chain_salt(request: Request) -> str:
    """The cache salt together with the LoRA adapter and the images, sounds, … among the tokens.

    Two requests have equal salts only if all of these are equal: the parts are length-prefixed, so that no
    client's `cache_salt` can pass for another's parts.
    """
    inputs = _inputs(request)
    return f"{len(inputs)}:{inputs}{request.cache_salt or ''}"


def _inputs(request: Request) -> str:
    """Short name of what else is an input; empty for a plain text prompt."""
    parts: list[Any] = []
    lora = request.lora_request
    if lora is not None:
        parts += ["lora", lora.lora_name, lora.lora_path]
    for feature in request.mm_features:
        where = feature.mm_position
        parts += ["input", feature.identifier, where.offset, where.length]
    if not parts:
        return ""
    h = blake2b(digest_size=16, person=b"kvh-inputs")
    for part in parts:
        raw = str(part).encode()
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()
