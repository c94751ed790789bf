from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.layout import KVLayout
from kvhandoff.transport.api import HeadRange, MemoryKind, Part
from kvhandoff.transport.pieces import narrowed
from kvhandoff.transport.region import ForeignRegion
from kvhandoff.vllm.cache_layout import cache_facts, describe_cache
from tests.vllm_plugin.caches import (
    BLOCK_SIZE,
    BLOCKS,
    HEAD_SIZE,
    LAYERS,
    Attention,
    FakeConfig,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    QuantMode,
    SlidingWindowSpec,
    block_bytes_of,
    bytes_of,
    full_content,
    layer_name,
    make_caches,
)

MLA = MLAAttentionSpec(num_kv_heads=1, head_size=2 * HEAD_SIZE, head_size_v=0)


def described(
    config: FakeConfig, caches: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1
) -> tuple[KVLayout, ForeignRegion]:
    facts = cache_facts(config.vllm_config, config.kv_cache_config)
    return describe_cache(caches, facts, rank, ranks)


# What the bytes of a block are, for each order of memory.


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_pages_are_pieces_wherever_layers_lie(order: str) -> None:
    content = full_content(1, heads=2)
    layout, region = described(FakeConfig(layout=order), caches := make_caches(content, order))
    page = 2 * BLOCK_SIZE * 2 * HEAD_SIZE * 4
    assert [piece.size for piece in region.pieces] == [page] * LAYERS
    assert {piece.stride for piece in region.pieces} == {page if order == "LBHNC" else LAYERS * page}
    for block in range(BLOCKS):
        assert block_bytes_of(region, block) == bytes_of(content[:, block])
    assert layout == KVLayout(
        order="layer,head,token,content; CPU_ATTN vec",
        dtype="float32",
        layers=LAYERS,
        kv_heads=2,
        head_dim=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        block_bytes=LAYERS * page,
    )
    storage = next(iter(caches.values())).untyped_storage()
    assert region.ranges == ((storage.data_ptr(), storage.nbytes()),)
    assert (region.num_blocks, region.memory, region.device) == (BLOCKS, MemoryKind.DRAM, 0)
    assert region.heads == HeadRange(0, 2, 2)


def test_a_block_of_heads_with_all_their_layers_is_one_piece() -> None:
    content = full_content(1, heads=2)
    caches = make_caches(content, "BHLNC")
    layout, region = described(FakeConfig(layout="BHLNC"), caches)
    assert len(region.pieces) == 1
    for block in range(BLOCKS):
        assert block_bytes_of(region, block) == bytes_of(content[:, block].transpose(0, 1))
    assert layout.order == "head,layer,token,content; CPU_ATTN vec"


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_token_major_pages_say_so_and_how_many_ranks_share_them(order: str) -> None:
    content = full_content(1, heads=2)
    layout, region = described(FakeConfig(layout=order), caches := make_caches(content, order))
    for block in range(BLOCKS):
        assert block_bytes_of(region, block) == bytes_of(content[:, block].transpose(1, 2))
    assert layout.order == "layer,token,head,content; CPU_ATTN vec"
    shared = FakeConfig(layout=order, total_kv_heads=4)
    on_two, _ = described(shared.on_ranks(2), caches, rank=1, ranks=2)
    assert on_two.order == "rank/2,layer,token,head,content; CPU_ATTN vec"
    on_one, _ = described(shared.on_ranks(1), make_caches(full_content(1, heads=4), order))
    assert [*on_one.differences(on_two)] == [
        "order: 'layer,token,head,content; CPU_ATTN vec' here, "
        "'rank/2,layer,token,head,content; CPU_ATTN vec' there"
    ]


@pytest.mark.parametrize(("vllm_name", "order"), [("HND", "LBHNC"), ("NHD", "LBNHC")])
def test_vllms_short_names_of_orders(vllm_name: str, order: str) -> None:
    caches = make_caches(full_content(1, heads=2), order)
    assert (
        described(FakeConfig(layout=vllm_name), caches)[0] == described(FakeConfig(layout=order), caches)[0]
    )


def test_a_padded_page_leaves_its_padding_behind() -> None:
    content = full_content(1, heads=2)
    caches = make_caches(content, padding=16)
    for tensor in caches.values():
        torch.as_strided(tensor, (BLOCKS, 16), (tensor.stride(0), 1), tensor.storage_offset() + 128).fill_(-1)
    _, region = described(FakeConfig(), caches)
    assert {piece.stride - piece.size for piece in region.pieces} == {64}
    for block in range(BLOCKS):
        assert block_bytes_of(region, block) == bytes_of(content[:, block])


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ranks_pieces_are_its_heads_of_the_whole_ones(order: str, ranks: int) -> None:
    config = FakeConfig(layout=order, total_kv_heads=4)
    content = full_content(1, heads=4)
    whole_layout, whole = described(config.on_ranks(1), kept := make_caches(content, order))
    count = 4 // ranks
    for rank in range(ranks):
        mine = content[:, :, rank * count : (rank + 1) * count]
        layout, region = described(config.on_ranks(ranks), caches := make_caches(mine, order), rank, ranks)
        assert layout == whole_layout
        assert region.heads == HeadRange(rank * count, count, 4)
        part = replace(whole, pieces=narrowed(whole.pieces, _part(region.heads)))
        for block in range(BLOCKS):
            assert block_bytes_of(region, block) == block_bytes_of(part, block)
        del caches
    del kept


def _part(heads: HeadRange | None) -> Part:
    assert heads is not None
    return Part(heads.first, heads.count, heads.total)


def test_more_ranks_than_heads_share_them_in_runs() -> None:
    config = FakeConfig(total_kv_heads=2).on_ranks(4)
    caches = make_caches(full_content(1, heads=1))
    described_ranks = [described(config, caches, rank, 4) for rank in range(4)]
    assert [region.heads for _, region in described_ranks] == [HeadRange(head, 1, 2) for head in (0, 0, 1, 1)]
    whole, _ = described(FakeConfig(total_kv_heads=2), make_caches(full_content(1, heads=2)))
    assert {layout for layout, _ in described_ranks} == {whole}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_latent_cache_is_the_same_on_every_rank(ranks: int) -> None:
    content = full_content(1, heads=1)
    config = FakeConfig(spec=MLA, total_kv_heads=16, attention=Attention("CPU_MLA", None))
    layout, region = described(config, caches := make_caches(content), ranks - 1, ranks)
    assert region.heads is None
    assert (layout.kv_heads, layout.head_dim) == (1, 2 * HEAD_SIZE)
    assert layout.order == "layer,token,content; CPU_MLA"
    assert layout.block_bytes == region.block_bytes == LAYERS * BLOCK_SIZE * 2 * HEAD_SIZE * 4
    assert block_bytes_of(region, 2) == bytes_of(content[:, 2])
    del caches


@pytest.mark.parametrize(("order", "pieces"), [("BLHNC", 1), ("BHLNC", 1), ("BLNHC", 1), ("LBHNC", LAYERS)])
def test_neighbours_are_one_piece_where_no_heads_can_be_divided(order: str, pieces: int) -> None:
    content = full_content(1, heads=1)
    config = FakeConfig(spec=FullAttentionSpec(num_kv_heads=1), total_kv_heads=1, layout=order)
    layout, region = described(config, caches := make_caches(content, order))
    assert len(region.pieces) == pieces
    assert layout.order == "layer,token,content; CPU_ATTN vec"
    assert block_bytes_of(region, 3) == bytes_of(content[:, 3])
    del caches


def test_kernel_blocks_that_divide_a_block_are_pieces_of_their_own() -> None:
    content = full_content(1, heads=2)
    layout, region = described(FakeConfig(), caches := make_caches(content, parts=2))
    assert len(region.pieces) == 2 * LAYERS
    assert layout.order == "layer,part of 2 tokens,head,token,content; CPU_ATTN vec"
    for block in range(BLOCKS):
        parts = content[:, block].reshape(LAYERS, 2, 2, BLOCK_SIZE // 2, -1).transpose(1, 2)
        assert block_bytes_of(region, block) == bytes_of(parts)
    del caches


def test_with_one_head_kernel_blocks_change_nothing() -> None:
    config = FakeConfig(spec=MLA, attention=Attention("FLASHMLA", None))
    content = full_content(1, heads=1)
    split = described(config, caches := make_caches(content, parts=2))
    whole = described(config, others := make_caches(content))
    assert split[0] == whole[0]
    assert len(split[1].pieces) == LAYERS
    assert block_bytes_of(split[1], 4) == block_bytes_of(whole[1], 4)
    del caches, others


def test_layers_are_taken_by_their_numbers() -> None:
    names = [layer_name(index) for index in (10, 2, 1)]
    facts = cache_facts(FakeConfig(layers=names).vllm_config, FakeConfig(layers=names).kv_cache_config)
    assert facts.layers == tuple(layer_name(index) for index in (1, 2, 10))


def test_layers_that_share_a_cache_are_one() -> None:
    content = full_content(1, heads=2)
    caches = make_caches(content)
    layout, region = described(FakeConfig(), {**caches, "model.layers.9.attn": caches[layer_name(1)]})
    assert (layout.layers, len(region.pieces)) == (LAYERS, LAYERS)
    shared = {**caches, layer_name(3): caches[layer_name(1)]}
    config = FakeConfig(layers=[layer_name(index) for index in range(4)])
    assert described(config, shared)[1] == region


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Attention("CPU_ATTN", "amx"), Attention("CPU_ATTN", "vec")),
        (Attention("FLASH_ATTN", None), Attention("FLASHINFER", None)),
    ],
)
def test_backends_that_pack_otherwise_are_another_layout(mine: Attention, theirs: Attention) -> None:
    caches = make_caches(full_content(1, heads=2))
    ours, _ = described(FakeConfig(attention=mine), caches)
    others, _ = described(FakeConfig(attention=theirs), caches)
    (difference,) = ours.differences(others)
    assert difference.startswith("order: ")


# What is refused: each text names what was found and what is allowed.


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            FakeConfig(more_groups=[SlidingWindowSpec()]),
            "cache groups: got FullAttentionSpec of 3 layers + SlidingWindowSpec of 3 layers, "
            "allowed is one group, of FullAttentionSpec or MLAAttentionSpec",
        ),
        (
            FakeConfig(spec=SlidingWindowSpec()),
            "cache spec: got SlidingWindowSpec of 3 layers, allowed is FullAttentionSpec or MLAAttentionSpec",
        ),
        (
            FakeConfig(spec=MambaSpec()),
            "cache spec: got MambaSpec of 3 layers, allowed is FullAttentionSpec or MLAAttentionSpec",
        ),
        (
            FakeConfig(spec=FullAttentionSpec(dtype=torch.uint8, kv_quant_mode=QuantMode.FP8_PER_TENSOR)),
            "cache dtype: got uint8, FP8_PER_TENSOR, "
            "allowed is an unquantised cache of float16, bfloat16, float32",
        ),
        (
            FakeConfig(spec=FullAttentionSpec(dtype=torch.float8_e4m3fn)),
            "cache dtype: got float8_e4m3fn, NONE, "
            "allowed is an unquantised cache of float16, bfloat16, float32",
        ),
        (
            FakeConfig(spec=FullAttentionSpec(num_head_slots=2)),
            "FullAttentionSpec.num_head_slots: got 2, "
            "allowed is None: a cache of plain keys and values, or plain latent vectors",
        ),
        (
            FakeConfig(spec=replace(MLA, state_content_bytes=656)),
            "MLAAttentionSpec.state_content_bytes: got 656, "
            "allowed is None: a cache of plain keys and values, or plain latent vectors",
        ),
        (
            FakeConfig(spec=replace(MLA, tokens_per_state=4)),
            "MLAAttentionSpec.tokens_per_state: got 4, "
            "allowed is 1: a cache of plain keys and values, or plain latent vectors",
        ),
        (
            FakeConfig(zeroing=True),
            "needs_kv_cache_zeroing: got True, allowed is False: zeroes would be written over what is loaded",
        ),
        (
            FakeConfig(layout="LHBNC"),
            "kv_cache_layout: got LHBNC, allowed is LBHNC, BLHNC, LBNHC, BLNHC, BHLNC",
        ),
        (
            FakeConfig(layout=None),
            "kv_cache_layout: got None, allowed is LBHNC, BLHNC, LBNHC, BLNHC, BHLNC",
        ),
    ],
)
def test_refused_configurations(config: FakeConfig, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        cache_facts(config.vllm_config, config.kv_cache_config)
    assert str(refusal.value) == f"KV cache: {text}"


def refusal_of(config: FakeConfig, caches: dict[str, Any], rank: int = 0, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as refusal:
        described(config, caches, rank, ranks)
    return str(refusal.value)


def test_refused_memory_that_is_not_of_the_order_named() -> None:
    caches = make_caches(full_content(1, heads=2), "LBNHC")
    assert refusal_of(FakeConfig(), caches) == (
        "KV cache: cache tensor: got [5, 2, 4, 16] torch.float32 strides [128, 16, 32, 1] on cpu, allowed is "
        "strides [128 or more, 64, 16, 1]: pages without gaps, as LBHNC has"
    )
    assert "as LBNHC has" in refusal_of(FakeConfig(layout="LBNHC"), make_caches(full_content(1, heads=2)))
    assert "as BHLNC has" in refusal_of(FakeConfig(layout="BHLNC"), make_caches(full_content(1, heads=2)))


def test_refused_pages_with_gaps() -> None:
    wide = make_caches(full_content(1, heads=2, content=4 * HEAD_SIZE))
    gaps = {name: tensor[..., : 2 * HEAD_SIZE] for name, tensor in wide.items()}
    assert "strides [256, 128, 32, 1] on cpu, allowed is strides [128 or more, 64, 16, 1]" in refusal_of(
        FakeConfig(), gaps
    )


def test_refused_layers_that_lie_in_another_order_than_bhlnc_has() -> None:
    caches = make_caches(full_content(1, heads=2), "BHLNC")
    names = list(caches)
    swapped = dict(zip(names, [caches[names[1]], caches[names[0]], caches[names[2]]], strict=True))
    assert "256 bytes apart, as BHLNC has them" in refusal_of(FakeConfig(layout="BHLNC"), swapped)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"heads": 3}, "got [5, 3, 4, 16] torch.float32"),
        ({"heads": 2, "content": 12}, "got [5, 2, 4, 12] torch.float32"),
        ({"heads": 2, "blocks": 7}, "got [7, 2, 4, 16] torch.float32"),
        ({"heads": 2, "blocks": 15}, "got [15, 2, 4, 16] torch.float32"),
    ],
)
def test_refused_tensors_that_are_not_what_was_promised(found: dict[str, int], text: str) -> None:
    said = refusal_of(FakeConfig(), make_caches(full_content(1, **found)))
    assert text in said
    assert (
        "allowed is [5, 2, 4, 16] float32, or whole parts of its blocks (blocks, heads, tokens, content)"
        in said
    )


def test_refused_tensors_of_another_type_or_rank() -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in make_caches(full_content(1, heads=2)).items()}
    assert "got [5, 2, 4, 16] torch.bfloat16" in refusal_of(FakeConfig(), half)
    five = {name: tensor.unsqueeze(0) for name, tensor in make_caches(full_content(1, heads=2)).items()}
    assert "got [1, 5, 2, 4, 16] torch.float32" in refusal_of(FakeConfig(), five)


def test_refused_layers_of_different_forms() -> None:
    caches = make_caches(full_content(1, heads=2))
    caches[layer_name(1)] = caches[layer_name(1)].to(torch.bfloat16)
    assert "[5, 2, 4, 16] torch.float32 strides [128, 64, 16, 1] on cpu and [5, 2, 4, 16] torch.bfloat16" in (
        refusal_of(FakeConfig(), caches)
    )


def test_refused_layers_that_are_missing_or_unknown() -> None:
    caches = make_caches(full_content(1, heads=2))
    alone = {layer_name(0): caches[layer_name(0)]}
    assert f"registered layers: got none for {layer_name(1)}, {layer_name(2)}" in refusal_of(
        FakeConfig(), alone
    )
    other = {**caches, "draft.0": torch.zeros_like(caches[layer_name(0)])}
    assert "registered layers: got draft.0, which no cache group has" in refusal_of(FakeConfig(), other)


def test_refused_devices() -> None:
    caches = {name: _Elsewhere(tensor) for name, tensor in make_caches(full_content(1, heads=2)).items()}
    assert refusal_of(FakeConfig(), caches) == "KV cache: cache device: got xpu:0, allowed is cpu, cuda"


class _Elsewhere:
    """A tensor on a device that this machine does not have."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = torch.device("xpu:0")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class _OnGpu(_Elsewhere):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.device = torch.device("cuda:1")


def test_gpu_memory_is_told_with_its_device() -> None:
    caches: Any = {name: _OnGpu(tensor) for name, tensor in make_caches(full_content(1, heads=2)).items()}
    _, region = described(FakeConfig(), caches)
    assert (region.memory, region.device) == (MemoryKind.VRAM, 1)


@pytest.mark.parametrize(("heads", "total", "ranks"), [(1, 3, 2), (2, 4, 4), (1, 2, 3)])
def test_refused_heads_that_ranks_cant_share(heads: int, total: int, ranks: int) -> None:
    config = FakeConfig(spec=FullAttentionSpec(num_kv_heads=heads), total_kv_heads=total)
    said = refusal_of(config, make_caches(full_content(1, heads=heads)), 0, ranks)
    assert (
        f"KV heads: got {heads} of {total} on each of {ranks} ranks, allowed is a number of ranks that"
        in said
    )


def test_refused_attention_that_does_not_say_how_it_packs() -> None:
    caches = make_caches(full_content(1, heads=2))
    assert f"{layer_name(0)}.isa: got None, allowed is the name of the instructions" in refusal_of(
        FakeConfig(attention=Attention("CPU_ATTN", None)), caches
    )
    assert f"attention layers: got none called {layer_name(0)}" in refusal_of(
        FakeConfig(attention=None), caches
    )
