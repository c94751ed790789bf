"""The models: tiny random ones of shapes that vLLM's CPU kernels take."""

from __future__ import annotations

from pathlib import Path

from tests.tinymodels import cached_tiny_model


def gqa() -> Path:
    """Grouped-query attention: 4 query heads, 2 KV heads of 32."""
    return cached_tiny_model("llama", head_dim=32)


def mla() -> Path:
    """Multi-head latent attention with DeepSeek's sizes of a head. Dense layers only: its experts don't load
    from random weights."""
    return cached_tiny_model(
        "deepseek_v3",
        first_k_dense_replace=3,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
