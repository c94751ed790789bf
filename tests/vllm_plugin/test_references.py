from __future__ import annotations

import pytest

from kvhandoff.vllm.references import BlockReferences
from tests.vllm_plugin.fake_vllm import FakePool


@pytest.fixture
def pool() -> FakePool:
    return FakePool(8)


def test_a_lent_block_outlives_its_request(pool: FakePool) -> None:
    references = BlockReferences(pool)
    own = pool.get_new_blocks(3)
    ids = [block.block_id for block in own]
    references.take(ids)
    assert references.blocks == 3
    pool.free_blocks(reversed(own))
    assert pool.get_num_free_blocks() == 5
    assert references.give_back(ids) == []
    assert (pool.get_num_free_blocks(), references.blocks) == (8, 0)


def test_references_are_counted(pool: FakePool) -> None:
    """Two offers of one prefix, ended one after the other."""
    references = BlockReferences(pool)
    own = pool.get_new_blocks(2)
    ids = [block.block_id for block in own]
    references.take(ids)
    references.take(ids[:1])
    pool.free_blocks(own)
    references.give_back(ids)
    assert (pool.get_num_free_blocks(), references.blocks) == (7, 1)
    references.give_back(ids[:1])
    assert (pool.get_num_free_blocks(), references.blocks) == (8, 0)


def test_a_second_release_takes_nothing_from_an_owner(pool: FakePool) -> None:
    references = BlockReferences(pool)
    own = pool.get_new_blocks(2)
    ids = [block.block_id for block in own]
    references.take(ids)
    references.give_back(ids)
    assert references.give_back(ids) == ids[::-1]
    assert [block.ref_cnt for block in own] == [1, 1]


def test_the_end_of_a_chain_is_reissued_first(pool: FakePool) -> None:
    references = BlockReferences(pool)
    own = pool.get_new_blocks(3)
    pool.cache(own, list(range(12)))
    ids = [block.block_id for block in own]
    references.take(ids)
    pool.free_blocks(own)
    references.give_back(ids)
    reissued = [block.block_id for block in pool.get_new_blocks(8)]
    assert [block for block in reissued if block in ids] == ids[::-1]


def test_what_would_be_free(pool: FakePool) -> None:
    references = BlockReferences(pool)
    own = pool.get_new_blocks(3)
    ids = [block.block_id for block in own]
    references.take(ids)
    references.take(ids[:1])
    pool.free_blocks(own[:2])
    assert references.idle_without(ids) == 1  # the first is lent twice, the third is in use
    assert references.idle_without([*ids, ids[0]]) == 2
