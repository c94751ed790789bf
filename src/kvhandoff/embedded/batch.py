"""Several sequences' steps packed into one forward: who comes where, and how each run of tokens attends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.attention import BatchPlan, DecodeGroup, PagedPool, PrefillChunk
from kvhandoff.embedded.exact import ROW_MULTIPLE, pad_kv, pad_rows

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """One forward's inputs, and where each step's logits will be."""

    input_ids: torch.Tensor
    """`[1, rows]`: the new tokens, in exact mode with zeros behind them."""
    position_ids: torch.Tensor
    """`[1, rows]`."""
    plan: BatchPlan
    kept: torch.Tensor
    """Rows whose logits are computed."""
    wanted: list[slice | None]
    """Per step, in the order the steps were given: its rows among `kept`."""


def pack(steps: Sequence[SequenceStep], pool: PagedPool, *, exact: bool) -> Batch:
    """The batch for these steps; blocks that they begin are cleared.

    Decode steps come first, longest first, so that sequences of similar length attend in one call; in exact
    mode each sequence attends alone, in shapes that don't depend on the others.

    Raises ValueError for a step without tokens or with too few blocks, before anything is written.
    """
    tables = [_table(step, pool.block_size) for step in steps]
    decodes = [i for i, step in enumerate(steps) if len(step.token_ids) == 1 and not exact]
    decodes.sort(key=lambda i: -len(tables[i]))
    chunks = [i for i, step in enumerate(steps) if len(step.token_ids) > 1 or exact]
    order = decodes + chunks
    for step, table in zip(steps, tables, strict=True):
        _clear_begun_block(step, table, pool)

    tokens = np.concatenate([np.asarray(steps[i].token_ids, dtype=np.int64) for i in order])
    positions = [steps[i].start + np.arange(len(steps[i].token_ids)) for i in order]
    slots = [_slots(tables[i], where, pool) for i, where in zip(order, positions, strict=True)]
    kept, wanted = _wanted_rows(steps, order)
    padding = 0
    if exact:
        padding = pad_rows(len(tokens)) - len(tokens)
        kept += kept[-1:] * (pad_rows(len(kept)) - len(kept))
    device = pool.rows.device
    return Batch(
        input_ids=_tensor(np.pad(tokens, (0, padding)), device)[None],
        position_ids=_tensor(np.pad(np.concatenate(positions), (0, padding)), device)[None],
        plan=BatchPlan(
            pool,
            _tensor(np.concatenate(slots), device),
            [
                *_decode_groups(steps, tables, decodes, pool),
                *(_chunk(steps[i], tables[i], pool, exact=exact) for i in chunks),
            ],
            padding,
        ),
        kept=_tensor(np.asarray(kept, dtype=np.int64), device),
        wanted=wanted,
    )


def _table(step: SequenceStep, block_size: int) -> Ints:
    """The blocks that hold the sequence up to its last new token."""
    end = step.start + len(step.token_ids)
    blocks = -(-end // block_size)
    if not len(step.token_ids) or step.start < 0:
        raise ValueError(f"a step has {len(step.token_ids)} new tokens at position {step.start}")
    if blocks > len(step.block_table):
        raise ValueError(f"{end} tokens need {blocks} blocks, the table has {len(step.block_table)}")
    return np.asarray(step.block_table[:blocks], dtype=np.int64)


def _slots(table: Ints, positions: Ints, pool: PagedPool) -> Ints:
    """Rows of the pool for tokens at these positions, in layer 0."""
    block_rows = pool.layers * pool.block_size
    slots: Ints = table[positions // pool.block_size] * block_rows + positions % pool.block_size
    return slots


def _clear_begun_block(step: SequenceStep, table: Ints, pool: PagedPool) -> None:
    """Zero the block that this step begins and does not fill.

    Attention reads whole blocks and masks what lies behind the last token; but a masked NaN, left by the
    block's last owner, would still be NaN.
    """
    full, rest = divmod(step.start + len(step.token_ids), pool.block_size)
    if rest and full * pool.block_size >= step.start:
        pool.blocks[table[full]].zero_()


def _wanted_rows(steps: Sequence[SequenceStep], order: Sequence[int]) -> tuple[list[int], list[slice | None]]:
    """The rows whose logits are wanted, and which of those belong to each step."""
    kept: list[int] = []
    wanted: list[slice | None] = [None] * len(steps)
    end = 0
    for i in order:
        first, end = end, end + len(steps[i].token_ids)
        if steps[i].logits is not None:
            rows = range(first if steps[i].logits == "all" else end - 1, end)
            wanted[i] = slice(len(kept), len(kept) + len(rows))
            kept.extend(rows)
    return kept, wanted


def _decode_groups(
    steps: Sequence[SequenceStep], tables: Sequence[Ints], decodes: Sequence[int], pool: PagedPool
) -> Iterator[DecodeGroup]:
    """Neighbours in `decodes`, which is sorted by length, so grouped that none is padded to more than twice
    its blocks."""
    first = 0
    while first < len(decodes):
        longest = len(tables[decodes[first]])
        end = first + 1
        while end < len(decodes) and 2 * len(tables[decodes[end]]) >= longest:
            end += 1
        group = decodes[first:end]
        table = np.stack([_padded(tables[i], longest) for i in group])
        positions = np.asarray([steps[i].start for i in group])
        device = pool.rows.device
        yield DecodeGroup(pool, _tensor(table, device), _tensor(positions, device))
        first = end


def _chunk(step: SequenceStep, table: Ints, pool: PagedPool, *, exact: bool) -> PrefillChunk:
    if exact:
        table = _padded(table, pad_kv(len(table) * pool.block_size) // pool.block_size)
    return PrefillChunk(
        pool,
        _tensor(table[None], pool.rows.device),
        step.start,
        len(step.token_ids),
        pad_queries=ROW_MULTIPLE if exact else 1,
    )


def _padded(table: Ints, length: int) -> Ints:
    """The table with its own first block as padding: what is read there is masked, and no other's."""
    return np.pad(table, (0, length - len(table)), constant_values=table[0])


def _tensor(array: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
