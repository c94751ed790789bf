"""Attention over the paged pool: one function for every architecture, registered with transformers.

One forward step carries the new tokens of several sequences in one row, `[1, tokens]`. Everything that acts
on single tokens needs to know nothing of that; attention does, and it finds what it needs in a `BatchPlan`
that the runner hands through the model as a keyword argument: where the new tokens' keys and values go in the
pool, which blocks each sequence reads, and who may see whom.

The pool is block-major, `[num_blocks, layers, block_size, 2, kv_heads, head_dim]`, so that a block is one
contiguous range with all layers. One gather therefore fetches keys and values of one layer.

Decode steps (one new token) of several sequences run as one padded call; prefill chunks run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "kvhandoff_paged"
PLAN_KWARG = "kvhandoff_plan"

PIECE_TOKENS = 128
"""Queries of a chunk that share one mask. Keys beyond the last of them aren't touched, so that a chunk does
little work above the diagonal; fewer queries a call would leave the matrix products too small."""

_UNDERSTOOD = frozenset(
    {
        PLAN_KWARG,
        "sliding_window",
        # These don't change what is computed here.
        "dropout",
        "position_ids",
        "use_cache",
        "output_router_logits",
    }
)
"""Keyword arguments that layers may pass. Others can change what attention means (soft caps, sinks, biases),
so a model that passes one is refused."""


class UnsupportedAttention(Exception):
    """A model wants an attention that this function does not compute."""


class PagedPool:
    """The KV pool as tensors on a region's memory (or on a device).

    `blocks`: `[num_blocks, layers, block_size, 2, kv_heads, head_dim]`.
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks
        self.num_blocks, self.layers, self.block_size, _, self.kv_heads, self.head_dim = blocks.shape
        self.token_width = 2 * self.kv_heads * self.head_dim
        self.rows = blocks.view(-1, self.token_width)
        """One row per (block, layer, token)."""
        self.layer_blocks = blocks.flatten(2).unbind(1)
        """Per layer `[num_blocks, block_size * token_width]`, strided over the pool."""
        self.layer_offsets = (torch.arange(self.layers) * self.block_size).to(blocks.device)[:, None]
        self._scratch = torch.empty(0, dtype=blocks.dtype, device=blocks.device)

    def scratch(self, n_blocks: int) -> torch.Tensor:
        """`[n_blocks, block_size * token_width]`, re-used by every caller: valid until the next gather."""
        size = n_blocks * self.block_size * self.token_width
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=self.rows.dtype, device=self.rows.device)
        return self._scratch[:size].view(n_blocks, -1)


class Reader:
    """Gathers some sequences' blocks of one layer, and shows them as keys and values.

    `table`: `[sequences, blocks_each]`, any valid block where a sequence has fewer.
    """

    def __init__(self, pool: PagedPool, table: torch.Tensor) -> None:
        self._pool = pool
        self._ids = table.flatten()
        sequences, blocks_each = table.shape
        self._gathered = pool.scratch(self._ids.numel())
        self.kv_length = blocks_each * pool.block_size
        kv = self._gathered.view(sequences, self.kv_length, 2, pool.kv_heads, pool.head_dim)
        # Views of the scratch memory: [sequences, kv_heads, kv_length, head_dim], made once for all layers.
        self.keys, self.values = (part.transpose(1, 2) for part in kv.unbind(2))

    def read(self, layer: int) -> None:
        """Fetch this layer's blocks into `keys` and `values`."""
        torch.index_select(self._pool.layer_blocks[layer], 0, self._ids, out=self._gathered)


class Visibility:
    """Additive masks for query positions against keys 0 … kv_length − 1, one per window, made when asked."""

    def __init__(self, positions: torch.Tensor, kv_length: int, dtype: torch.dtype) -> None:
        self._positions = positions[..., None]
        self._kv_length = kv_length
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask(self, window: int | None, repeat: int = 1) -> torch.Tensor:
        """0 where the key is visible, else −inf; `positions.shape + [kv_length]`, with the positions
        `repeat` times one after the other."""
        mask = self._masks.get((window, repeat))
        if mask is None:
            keys = torch.arange(self._kv_length, device=self._positions.device)
            hidden = keys > self._positions
            if window is not None:
                hidden |= keys <= self._positions - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            mask = self._masks[window, repeat] = mask.repeat(repeat, 1) if repeat > 1 else mask
        return mask


class DecodeGroup:
    """One new token each of several sequences of similar length: one padded attention call."""

    def __init__(self, pool: PagedPool, table: torch.Tensor, positions: torch.Tensor) -> None:
        self.tokens = len(positions)
        self._reader = Reader(pool, table)
        self._visible = Visibility(positions[:, None, None], self._reader.kv_length, pool.rows.dtype)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """`query` and result: `[sequences, heads, head_dim]`."""
        self._reader.read(layer)
        keys = self._reader.keys
        # The heads that share a KV head become rows of one small matrix: K and V are read once for all.
        grouped = query.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])
        out = scaled_dot_product_attention(
            grouped, keys, self._reader.values, attn_mask=self._visible.mask(window), scale=scale
        )
        return out.reshape(query.shape)


class PrefillChunk:
    """Several new tokens of one sequence.

    `pad_queries` rounds the number of query rows of every call up, `table` may be padded to any length:
    exact mode wants shapes of one kind. What is padded never shows.
    """

    def __init__(
        self, pool: PagedPool, table: torch.Tensor, start: int, length: int, *, pad_queries: int = 1
    ) -> None:
        self.tokens = length
        self._reader = Reader(pool, table)
        padded_kv = pad_queries > 1
        self._pieces: list[_Piece] = []
        for first in range(0, length, PIECE_TOKENS):
            count = min(PIECE_TOKENS, length - first)
            rows = -(-count // pad_queries) * pad_queries
            position = start + first
            # Padding queries see what the last real one sees: at least one key, so nothing is NaN.
            positions = (position + torch.arange(rows)).clamp_(max=position + count - 1)
            kv_length = self._reader.kv_length if padded_kv else position + count
            self._pieces.append(
                _Piece(
                    first=first,
                    count=count,
                    padding=rows - count,
                    visible=Visibility(positions.to(pool.rows.device), kv_length, pool.rows.dtype),
                    keys=self._reader.keys[:, :, :kv_length],
                    values=self._reader.values[:, :, :kv_length],
                )
            )

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """`query` and result: `[tokens, heads, head_dim]`."""
        self._reader.read(layer)
        rows = query.transpose(0, 1)
        parts = [piece.attend(rows, scale, window) for piece in self._pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class _Piece:
    first: int
    count: int
    padding: int
    visible: Visibility
    keys: torch.Tensor
    values: torch.Tensor

    def attend(self, rows: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        query = rows[:, self.first : self.first + self.count]
        if self.padding:
            query = torch.nn.functional.pad(query, (0, 0, 0, self.padding))
        heads, count, head_dim = query.shape
        kv_heads = self.keys.shape[1]
        # As for decode steps: the heads that share a KV head stand below each other.
        grouped = query.reshape(1, kv_heads, -1, head_dim)
        mask = self.visible.mask(window, repeat=heads // kv_heads)
        out = scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=mask, scale=scale)
        return out.reshape(heads, count, head_dim)[:, : self.count].transpose(0, 1)


class BatchPlan:
    """What attention needs to know of one forward step.

    `slots`: `[new tokens]`, the row in the pool of each new token in layer 0; `parts` cover all new tokens in
    order; `padding` rows follow them.
    """

    def __init__(
        self, pool: PagedPool, slots: torch.Tensor, parts: Sequence[DecodeGroup | PrefillChunk], padding: int
    ) -> None:
        self.pool = pool
        self.tokens = slots.shape[0]
        self.layer_slots = (slots + pool.layer_offsets).unbind(0)
        self.parts = parts
        self.sizes = [part.tokens for part in parts]
        self.padding = padding
        self.windows: dict[int, int | None] = {}
        """Sliding window that each layer asked for."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new tokens' keys and values to the pool, then attend to all that each token may see.

    `query`: `[1, heads, tokens, head_dim]`, `key` and `value` with kv_heads; tokens beyond the plan's are
    padding: not written, attending to nothing, their rows are zero. Returns `[1, tokens, heads, head_dim]`.

    Raises UnsupportedAttention for what it doesn't compute.
    """
    plan: BatchPlan | None = kwargs.get(PLAN_KWARG)
    if plan is None:
        raise UnsupportedAttention("its layers don't pass keyword arguments on to attention")
    pool, layer = plan.pool, module.layer_idx
    _check_arguments(pool, key, value, attention_mask, kwargs)
    window = plan.windows[layer] = kwargs.get("sliding_window")

    new_kv = torch.cat([part[0, :, : plan.tokens].transpose(0, 1) for part in (key, value)], dim=1)
    pool.rows.index_copy_(0, plan.layer_slots[layer], new_kv.view(plan.tokens, -1))

    rows = query[0, :, : plan.tokens].transpose(0, 1)
    queries = torch.split(rows, plan.sizes) if len(plan.sizes) > 1 else [rows]
    outs = [part.attend(layer, q, scaling, window) for part, q in zip(plan.parts, queries, strict=True)]
    if plan.padding:
        outs.append(rows.new_zeros((plan.padding, *rows.shape[1:])))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


def _check_arguments(
    pool: PagedPool,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    if key.shape != value.shape or (key.shape[1], key.shape[3]) != (pool.kv_heads, pool.head_dim):
        raise UnsupportedAttention(
            f"its keys are {tuple(key.shape)} and its values {tuple(value.shape)}, "
            f"where the KV pool has {pool.kv_heads} heads of {pool.head_dim}"
        )
    if attention_mask is not None:
        raise UnsupportedAttention("its layers make attention masks of their own")
    for name, argument in kwargs.items():
        if name not in _UNDERSTOOD and argument is not None and argument is not False:
            raise UnsupportedAttention(f"its attention uses {name}")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
