"""vLLM's cache as the handoff knows it: what its bytes mean (`KVLayout`), where they are (`ForeignRegion`).

vLLM registers one tensor `[blocks, heads, tokens, content]` a layer; how the axes lie in memory is in its
strides. A block, as it is handed over, is made of pieces: bytes that lie together, in an order that does not
depend on where vLLM puts them. So engines that place layers or blocks differently can exchange blocks, as
long as the order within a block is the same; that order is a field of the layout, and so is the attention
backend, which alone knows what a token's content is.

Pieces are as large as they can be while the heads stay their outermost axis: then any range of heads is one
part of each piece, and engines of unequal tensor parallelism can exchange them.

Whatever is not known to be right is refused, by name, with what was found and what is allowed. Nothing here
imports vLLM or torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.layout import KVLayout
from kvhandoff.transport.api import HeadRange, MemoryKind, Piece
from kvhandoff.transport.region import ForeignRegion

_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_DTYPES = ("float16", "bfloat16", "float32")

_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}
_ORDERS = {
    "LBHNC": "layer,head,token,content",
    "BLHNC": "layer,head,token,content",
    "LBNHC": "layer,token,head,content",
    "BLNHC": "layer,token,head,content",
    "BHLNC": "head,layer,token,content",
}
"""vLLM's names of memory orders (L layer, B block, H head, N token, C content) → the order within a block.
LHBNC is missing: a block's heads are far apart there."""

_TOKEN_MAJOR = _ORDERS["LBNHC"]
_HEAD_LAYER = _ORDERS["BHLNC"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What vLLM's configuration says about the cache; made and checked by `cache_facts`."""

    layers: tuple[str, ...]
    num_blocks: int
    block_size: int
    """Tokens in a block of the scheduler."""
    kv_heads: int
    """KV heads that one rank holds."""
    total_kv_heads: int
    """KV heads of the model; 1 for a latent cache."""
    head_size: int
    content: int
    """Elements per token and head: key and value, or the latent vector."""
    dtype: str
    latent: bool
    """MLA: one latent vector a token, the same on every rank."""
    memory_order: str
    """The name that vLLM gives to the order of axes, e.g. `LBHNC`."""
    attention_layers: Mapping[str, Any]
    """vLLM's layer objects by name. Asked at registration only: the CPU backend chooses late how it packs."""


class CacheTensor(Protocol):
    """What is asked of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...
    def untyped_storage(self) -> Any: ...


def cache_facts(vllm_config: Any, kv_cache_config: Any) -> CacheFacts:
    """Read vLLM's `VllmConfig` and `KVCacheConfig` (0.29 to 0.32). Raises ConfigError for a cache that can't
    be handed over."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [f"{type(g.kv_cache_spec).__name__} of {len(g.layer_names)} layers" for g in groups]
    if len(groups) != 1:
        raise _refused("cache groups", " + ".join(kinds) or "none", f"one group, of {' or '.join(_SPECS)}")
    (group,) = groups
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if kind not in _SPECS:
        raise _refused("cache spec", kinds[0], " or ".join(_SPECS))
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or int(spec.kv_quant_mode) != 0:
        found = f"{dtype}, {getattr(spec.kv_quant_mode, 'name', spec.kv_quant_mode)}"
        raise _refused("cache dtype", found, f"an unquantised cache of {', '.join(_DTYPES)}")
    for field, plain in (("num_head_slots", None), ("state_content_bytes", None), ("tokens_per_state", 1)):
        if getattr(spec, field) != plain:
            allowed = f"{plain}: a cache of plain keys and values, or plain latent vectors"
            raise _refused(f"{kind}.{field}", getattr(spec, field), allowed)
    if kv_cache_config.needs_kv_cache_zeroing:
        raise _refused("needs_kv_cache_zeroing", True, "False: zeroes would be written over what is loaded")
    memory_order = str(vllm_config.cache_config.kv_cache_layout)
    memory_order = _ALIASES.get(memory_order, memory_order)
    if memory_order not in _ORDERS:
        raise _refused("kv_cache_layout", memory_order, ", ".join(_ORDERS))
    latent = kind == "MLAAttentionSpec"
    return CacheFacts(
        layers=tuple(sorted(group.layer_names, key=_by_number)),
        num_blocks=kv_cache_config.num_blocks,
        block_size=spec.block_size,
        kv_heads=spec.num_kv_heads,
        total_kv_heads=1 if latent else vllm_config.model_config.get_total_num_kv_heads(),
        head_size=spec.head_size,
        content=spec.head_size + spec.head_size_v,
        dtype=dtype,
        latent=latent,
        memory_order=memory_order,
        attention_layers=vllm_config.compilation_config.static_forward_context,
    )


def describe_cache(
    caches: Mapping[str, CacheTensor], facts: CacheFacts, rank: int, ranks: int
) -> tuple[KVLayout, ForeignRegion]:
    """The layout of the whole engine's blocks, equal on all ranks and for all tensor parallel sizes, and this
    rank's region.

    `caches` are the tensors that vLLM registered by layer; the region looks into their memory, which has to
    outlive it. Raises ConfigError for tensors that are not what `facts` promise or can't be handed over.
    """
    heads = _head_range(facts, rank, ranks)
    tensors = _tensors_of_layers(caches, facts)
    ratio = _check_shape(tensors, facts)
    _check_order(tensors, facts)
    pieces = _pieces(tensors, facts, ratio)
    block_bytes = sum(piece.size for piece in pieces)
    device = tensors[0].device
    region = ForeignRegion(
        num_blocks=facts.num_blocks,
        pieces=pieces,
        ranges=_ranges(tensors),
        memory=MemoryKind.DRAM if device.type == "cpu" else MemoryKind.VRAM,
        device=0 if device.type == "cpu" else device.index,
        heads=heads,
    )
    layout = KVLayout(
        order=f"{_order(facts, ratio, ranks)}; {_attention(facts)}",
        dtype=facts.dtype,
        layers=len(tensors),
        kv_heads=facts.total_kv_heads,
        head_dim=facts.head_size,
        block_size=facts.block_size,
        block_bytes=block_bytes // facts.kv_heads * facts.total_kv_heads,
    )
    return layout, region


def _head_range(facts: CacheFacts, rank: int, ranks: int) -> HeadRange | None:
    """Which of the model's heads this rank has. With more ranks than heads, neighbours share one."""
    count, total = facts.kv_heads, facts.total_kv_heads
    if facts.latent:
        if count != 1:
            raise _refused("MLAAttentionSpec.num_kv_heads", count, "1")
        return None
    if (total % ranks and ranks % total) or count != max(1, total // ranks):
        allowed = "a number of ranks that divides the heads, or is divided by them"
        raise _refused("KV heads", f"{count} of {total} on each of {ranks} ranks", allowed)
    return HeadRange(rank * total // ranks, count, total)


def _tensors_of_layers(caches: Mapping[str, CacheTensor], facts: CacheFacts) -> list[CacheTensor]:
    """One tensor for each layer that has a cache of its own, in the order of the layers."""
    missing = [name for name in facts.layers if name not in caches]
    if missing:
        raise _refused("registered layers", f"none for {', '.join(missing)}", "all of the cache group")
    own = {caches[name].data_ptr(): caches[name] for name in facts.layers}
    for name, tensor in caches.items():
        if tensor.data_ptr() not in own:
            raise _refused("registered layers", f"{name}, which no cache group has", ", ".join(facts.layers))
    return list(own.values())


def _check_shape(tensors: Sequence[CacheTensor], facts: CacheFacts) -> int:
    """How many of the attention kernel's blocks one block of the scheduler is made of."""
    first = tensors[0]
    for tensor in tensors:
        if _form(tensor) != _form(first):
            raise _refused("layers", f"{_form(first)} and {_form(tensor)}", "layers of one form")
    if first.device.type not in ("cpu", "cuda"):
        raise _refused("cache device", first.device, "cpu, cuda")
    shape = tuple(first.shape)
    ratio = shape[0] // facts.num_blocks if shape else 0
    tokens = facts.block_size // max(1, ratio)
    expected = (facts.num_blocks * ratio, facts.kv_heads, tokens, facts.content)
    dtype = str(first.dtype).removeprefix("torch.")
    if ratio < 1 or tokens * ratio != facts.block_size or shape != expected or dtype != facts.dtype:
        promised = (facts.num_blocks, facts.kv_heads, facts.block_size, facts.content)
        allowed = (
            f"{list(promised)} {facts.dtype}, or whole parts of its blocks (blocks, heads, tokens, content)"
        )
        raise _refused("cache tensor", _form(first), allowed)
    if ratio > 1 and facts.memory_order == "BHLNC":
        raise _refused("cache tensor", f"{ratio} kernel blocks in a block of order BHLNC", "one")
    return ratio


def _form(tensor: CacheTensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} strides {list(tensor.stride())} on {tensor.device}"


def _check_order(tensors: Sequence[CacheTensor], facts: CacheFacts) -> None:
    """The strides are those of the order that vLLM names; nothing is between the parts of a piece."""
    first = tensors[0]
    _, heads, tokens, content = first.shape
    order = _ORDERS[facts.memory_order]
    if order == _TOKEN_MAJOR:
        token, head, page = heads * content, content, heads * tokens * content
    elif order == _HEAD_LAYER:
        token, head = content, len(tensors) * tokens * content
        page = heads * head
    else:
        token, head, page = content, tokens * content, heads * tokens * content
    block_stride, *inner = first.stride()
    wanted = (head, token, 1)
    # The stride of an axis of one means nothing.
    dense = all(
        size == 1 or have == want for size, have, want in zip(first.shape[1:], inner, wanted, strict=True)
    )
    if not dense or block_stride < page:
        allowed = (
            f"strides [{page} or more, {head}, {token}, 1]: pages without gaps, as {facts.memory_order} has"
        )
        raise _refused("cache tensor", _form(first), allowed)
    if order == _HEAD_LAYER:
        step = tokens * content * first.element_size()
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != [addresses[0] + layer * step for layer in range(len(tensors))]:
            raise _refused(
                "layers", f"at {list(map(hex, addresses))}", f"{step} bytes apart, as BHLNC has them"
            )


def _pieces(tensors: Sequence[CacheTensor], facts: CacheFacts, ratio: int) -> tuple[Piece, ...]:
    """A block's pieces in the order of `_order`; the kernel's parts of a block come one by one."""
    first = tensors[0]
    part_stride = first.stride()[0] * first.element_size()
    page = facts.kv_heads * first.shape[2] * facts.content * first.element_size()
    if _ORDERS[facts.memory_order] == _HEAD_LAYER:
        starts, size = [first.data_ptr()], page * len(tensors)
    else:
        starts, size = [tensor.data_ptr() for tensor in tensors], page
    pieces = [
        Piece(start + part * part_stride, ratio * part_stride, size)
        for start in starts
        for part in range(ratio)
    ]
    # Heads can't be divided further where there is one: neighbours may become one piece.
    return tuple(_joined(pieces) if facts.total_kv_heads == 1 else pieces)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that follow one another in memory as they do in the block, as one."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        last = joined[-1]
        if last.address + last.size == piece.address and last.stride == piece.stride:
            joined[-1] = Piece(last.address, last.stride, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


def _ranges(tensors: Sequence[CacheTensor]) -> tuple[tuple[int, int], ...]:
    """(address, bytes) of each allocation that the tensors look into."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return tuple(sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages}))


def _order(facts: CacheFacts, ratio: int, ranks: int) -> str:
    """The order of a block's bytes, all ranks' taken together."""
    if facts.total_kv_heads == 1:
        return "layer,token,content"
    order = _ORDERS[facts.memory_order]
    if order == _TOKEN_MAJOR and ranks > 1:
        order = (
            f"rank/{ranks},{order}"  # a rank's heads are no run of bytes, so that ranks can't be regrouped
        )
    if ratio > 1:
        order = order.replace("layer,", f"layer,part of {facts.block_size // ratio} tokens,", 1)
    return order


def _attention(facts: CacheFacts) -> str:
    """Which attention backends write and read the content, and how they pack it, where they choose that."""
    names = set()
    for layer in facts.layers:
        attention = facts.attention_layers.get(layer)
        if attention is None:
            raise _refused("attention layers", f"none called {layer}", ", ".join(facts.attention_layers))
        name = attention.get_attn_backend().get_name()
        packing = getattr(attention, "isa", None)
        if name == "CPU_ATTN" and packing is None:
            raise _refused(f"{layer}.isa", None, "the name of the instructions that CPU_ATTN packs for")
        names.add(f"{name} {packing}" if packing else name)
    return " + ".join(sorted(names))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts `layers.2` before `layers.10`, on every engine alike."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _refused(field: str, found: object, allowed: str) -> ConfigError:
    return ConfigError(f"KV cache: {field}: got {found}, allowed is {allowed}")
