"""The models: tiny random ones of shapes that vLLM's CPU kernels take, and by hand a real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvhandoff.embedded.models import resolve_model
from tests.tinymodels import cached_tiny_model


def gqa() -> Path:
    """Grouped-query attention: 4 query heads, 2 KV heads of 32."""
    return cached_tiny_model("llama", head_dim=32)


def mla() -> Path:
    """Multi-head latent attention with DeepSeek's sizes of a head, and its kind of rotary embedding: with the
    plain one vLLM's CPU build turns keys and queries of several heads by wrong angles, which depend on the
    batch. Dense layers only: its experts don't load from random weights."""
    return cached_tiny_model(
        "deepseek_v3",
        first_k_dense_replace=3,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


@dataclass(frozen=True)
class Model:
    """How it is served."""

    directory: Callable[[], Path]
    arguments: tuple[str, ...] = ()
    """Of `vllm serve`."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    """Of one engine of the pair only."""
    prefix_cache: bool = True
    """Whether vLLM finds again what it has computed."""


TWO_RANKS = ("--tensor-parallel-size", "2")

MODELS = {
    "gqa": Model(gqa, ("--max-model-len", "2560")),  # room for answers of several seconds
    # The one CPU backend for it that computes in float32; it takes whole prompts, and has no prefix cache.
    "mla": Model(mla, ("--attention-backend", "CPU_MLA"), prefix_cache=False),
    # Two ranks take four workers of 1.6 GB a pair, and half a minute for their first step.
    "gqa, two ranks each": Model(gqa, TWO_RANKS),
    "gqa, two ranks to one": Model(gqa, prefill=TWO_RANKS),
    "gqa, one rank to two": Model(gqa, decode=TWO_RANKS),
    "mla, two ranks to one": Model(
        mla, ("--attention-backend", "CPU_MLA"), prefill=TWO_RANKS, prefix_cache=False
    ),
    "smollm2": Model(lambda: resolve_model("smollm2")),
}
