"""KV caches as vLLM makes them, and what its configuration says of them, without vLLM."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from kvhandoff.transport.api import Region

LAYERS = 3
BLOCKS = 5
BLOCK_SIZE = 4
HEAD_SIZE = 8
_AXES = "LBHNC"


class QuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1


@dataclass(frozen=True)
class FullAttentionSpec:
    """The fields that are read, under the class name that is looked at."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = 2
    head_size: int = HEAD_SIZE
    head_size_v: int = HEAD_SIZE
    dtype: torch.dtype = torch.float32
    kv_quant_mode: QuantMode = QuantMode.NONE
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class Attention:
    """One of vLLM's layers."""

    def __init__(self, backend: str = "CPU_ATTN", isa: str | None = "vec") -> None:
        self._backend = SimpleNamespace(get_name=lambda: backend)
        if isa is not None:
            self.isa = isa

    def get_attn_backend(self) -> Any:
        return self._backend


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


@dataclass
class FakeConfig:
    """One engine's configuration, seen by one rank."""

    spec: FullAttentionSpec = field(default_factory=FullAttentionSpec)
    total_kv_heads: int = 2
    layout: str | None = "LBHNC"
    layers: Sequence[str] = tuple(layer_name(index) for index in range(LAYERS))
    num_blocks: int = BLOCKS
    zeroing: bool = False
    more_groups: Sequence[FullAttentionSpec] = ()
    attention: Attention | None = field(default_factory=Attention)

    @property
    def vllm_config(self) -> Any:
        context = {} if self.attention is None else dict.fromkeys(self.layers, self.attention)
        return SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_layout=self.layout),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: self.total_kv_heads),
            compilation_config=SimpleNamespace(static_forward_context=context),
        )

    @property
    def kv_cache_config(self) -> Any:
        specs = [self.spec, *self.more_groups]
        return SimpleNamespace(
            num_blocks=self.num_blocks,
            needs_kv_cache_zeroing=self.zeroing,
            kv_cache_groups=[
                SimpleNamespace(layer_names=list(self.layers), kv_cache_spec=spec) for spec in specs
            ],
        )

    def on_ranks(self, ranks: int) -> FakeConfig:
        """The same model with its heads shared out."""
        heads = max(1, self.total_kv_heads // ranks)
        return replace(self, spec=replace(self.spec, num_kv_heads=heads))


def full_content(
    seed: int, *, heads: int, layers: int = LAYERS, blocks: int = BLOCKS, content: int = 2 * HEAD_SIZE
) -> torch.Tensor:
    """A whole engine's cache `[L, B, H, N, C]` in which no two numbers are the same."""
    shape = (layers, blocks, heads, BLOCK_SIZE, content)
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape) + seed * 2.0**20


def make_caches(
    content: torch.Tensor, order: str = "LBHNC", *, parts: int = 1, padding: int = 0
) -> dict[str, torch.Tensor]:
    """vLLM's tensors of one rank, `[B, H, N, C]` by layer, in memory of that order, filled with `content`
    `[L, B, H, N, C]`. A block is made of `parts` kernel blocks; `padding` numbers lie behind each page of a
    layer-major cache."""
    layers, blocks, heads, tokens, size = content.shape
    split = content.reshape(layers, blocks, heads, parts, tokens // parts, size)
    kernel = split.permute(0, 1, 3, 2, 4, 5).reshape(layers, blocks * parts, heads, tokens // parts, size)
    axes = [_AXES.index(axis) for axis in order]
    shape = kernel.shape
    strides, step = [0] * 5, 1
    for axis in reversed(axes):
        if axis == _AXES.index("B"):
            step += padding
        strides[axis] = step
        step *= shape[axis]
    memory = torch.zeros(step, dtype=content.dtype)
    whole = torch.as_strided(memory, shape, strides)
    whole.copy_(kernel)
    return {layer_name(index): whole[index] for index in range(layers)}


def block_bytes_of(region: Region, block: int) -> bytes:
    """One block as it is handed over: its pieces, one behind the other."""
    return b"".join(
        ctypes.string_at(piece.address + block * piece.stride, piece.size) for piece in region.pieces
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's numbers in the order of its axes."""
    return bytes(tensor.contiguous().numpy().tobytes())
