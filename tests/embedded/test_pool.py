"""The block pool: references, free list, prefix cache."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded.pool import BlockPool


def hashes(text: str) -> tuple[bytes, ...]:
    """The chain hashes of a text of one-token blocks."""
    return TokenChain.of(b"root", 1, list(text.encode())).blocks


def filled(pool: BlockPool, text: str) -> list[int]:
    """Blocks for a text: what matches is shared, the rest allocated and published."""
    blocks = pool.match(hashes(text))
    pool.retain(blocks)
    blocks += pool.allocate(len(text) - len(blocks))
    for block, block_hash in zip(blocks, hashes(text), strict=True):
        pool.publish(block, block_hash)
    return blocks


def counters(pool: BlockPool) -> tuple[int, int, int]:
    return pool.free, pool.cached, pool.used


def test_allocated_blocks_are_used_until_released():
    pool = BlockPool(5, 16)
    assert counters(pool) == (5, 0, 0)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    assert counters(pool) == (2, 0, 3)
    pool.retain(blocks[:1])
    pool.release(blocks)
    assert counters(pool) == (4, 0, 1)
    pool.release([0])
    assert counters(pool) == (5, 0, 0)


def test_allocation_gives_neighbours_in_ascending_order_even_from_the_cache():
    pool = BlockPool(6, 16)
    pool.release(filled(pool, "abcdef"))
    assert counters(pool) == (0, 6, 0)
    assert pool.allocate(4) == [2, 3, 4, 5]


def test_more_than_there_is_raises_and_takes_nothing():
    pool = BlockPool(4, 16)
    pool.allocate(2)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 free and 0 cached"):
        pool.allocate(3)
    assert counters(pool) == (2, 0, 2)


def test_a_match_ends_at_the_first_unknown_block():
    pool = BlockPool(8, 16)
    blocks = filled(pool, "abc")
    assert pool.match(hashes("abcd")) == blocks
    assert pool.match(hashes("abx")) == blocks[:2]
    assert pool.match(hashes("bc")) == []  # same tokens behind another beginning
    pool.release(blocks)
    assert pool.match(hashes("abcd")) == blocks  # idle content is still found


def test_cached_blocks_are_taken_only_when_nothing_is_free_least_recently_used_first():
    pool = BlockPool(6, 16)
    old = filled(pool, "ab")
    new = filled(pool, "xy")
    pool.release(old)
    pool.release(new)
    assert counters(pool) == (2, 4, 0)
    assert pool.allocate(2) == [4, 5]
    assert pool.match(hashes("ab")) == old
    # The end of a chain goes before its beginning.
    assert pool.allocate(1) == old[1:]
    assert pool.match(hashes("ab")) == old[:1]
    # Using the old one again makes the other the least recently used.
    pool.retain(old[:1])
    pool.release(old[:1])
    assert pool.allocate(1) == new[1:]
    assert pool.match(hashes("ab")) == old[:1]
    assert pool.match(hashes("xy")) == new[:1]


def test_matched_idle_blocks_do_not_count_as_allocatable():
    pool = BlockPool(4, 16)
    blocks = filled(pool, "ab")
    pool.release(blocks)
    assert pool.available() == 4
    assert pool.available(keeping=blocks) == 2
    assert pool.can_allocate(4)
    pool.retain(blocks)
    assert pool.available(keeping=blocks) == 2
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)


def test_equal_content_is_published_once():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    [block_hash] = hashes("a")
    pool.publish(first, block_hash)
    pool.publish(second, block_hash)
    assert pool.match([block_hash]) == [first]
    pool.release([second])
    assert counters(pool) == (3, 0, 1)  # the copy keeps nothing
    pool.release([first])
    assert counters(pool) == (3, 1, 0)


def test_a_switched_off_prefix_cache_keeps_and_finds_nothing():
    pool = BlockPool(4, 16, prefix_cache=False)
    blocks = filled(pool, "ab")
    assert pool.match(hashes("ab")) == []
    pool.release(blocks)
    assert counters(pool) == (4, 0, 0)


def test_misuse_raises_and_changes_nothing():
    pool = BlockPool(4, 16)
    [block] = pool.allocate(1)
    with pytest.raises(RuntimeError, match="block 3 is free"):
        pool.retain([block, 3])
    assert pool.references(block) == 1
    with pytest.raises(RuntimeError, match="block 3 has no owner"):
        pool.publish(3, b"x")
    pool.publish(block, b"x")
    with pytest.raises(RuntimeError, match="is published as"):
        pool.publish(block, b"y")
    pool.release([block])
    with pytest.raises(RuntimeError, match="no reference to return"):
        pool.release([block])


@pytest.mark.parametrize(("blocks", "size", "named"), [(0, 16, "num_blocks"), (4, 0, "block_size")])
def test_sizes_are_checked(blocks: int, size: int, named: str):
    with pytest.raises(ConfigError, match=f"{named}: got 0, allowed is 1 or more"):
        BlockPool(blocks, size)


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.integers(0, 3)), max_size=60))
def test_no_block_is_lost_or_shared_by_two_contents(actions: list[tuple[str, int]]):
    pool = BlockPool(8, 16)
    held: list[tuple[str, list[int]]] = []
    for text, action in actions:
        missing = len(text) - len(pool.match(hashes(text)))
        if action and missing <= pool.available(keeping=pool.match(hashes(text))):
            held.append((text, filled(pool, text)))
        elif held:
            pool.release(held.pop(len(held) // 2)[1])
        owners = Counter(block for _, blocks in held for block in blocks)
        assert all(pool.references(block) == owners[block] for block in range(8))
        assert pool.free + pool.cached + pool.used == 8
        assert pool.used == len(owners)
        # Two that share a block share all tokens up to it.
        contents: dict[int, str] = {}
        for text_held, blocks in held:
            for index, block in enumerate(blocks):
                assert contents.setdefault(block, text_held[: index + 1]) == text_held[: index + 1]
    for _, blocks in held:
        pool.release(blocks)
    assert pool.free + pool.cached == 8
