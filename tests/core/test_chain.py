from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.chain import HASH_BYTES, TokenChain, chain_root

ROOT = chain_root("model", "layout", "salt")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain(token_ids: list[int], root: bytes = ROOT, block_size: int = 4) -> TokenChain:
    return TokenChain.of(root, block_size, token_ids)


def test_blocks_and_tail() -> None:
    nine = chain(list(range(9)))
    assert (nine.n_tokens, len(nine.blocks), len(nine.tail), nine.n_blocks) == (9, 2, HASH_BYTES, 3)
    eight = chain(list(range(8)))
    assert (eight.n_tokens, len(eight.blocks), eight.tail, eight.n_blocks) == (8, 2, b"", 2)
    assert chain([]).n_blocks == 0


@given(tokens, tokens)
def test_common_tokens_is_the_shared_beginning_in_whole_blocks_or_all_of_it(
    a: list[int], b: list[int]
) -> None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    expected = len(a) if a == b else same // 4 * 4
    assert chain(a).common_tokens(chain(b)) == expected
    assert chain(b).common_tokens(chain(a)) == expected


@given(tokens, tokens)
def test_digests_are_equal_exactly_when_chains_are(a: list[int], b: list[int]) -> None:
    assert (chain(a).digest() == chain(b).digest()) == (a == b)


def test_a_block_stands_for_all_before_it() -> None:
    assert chain([1, 2, 3, 4, 5, 6, 7, 8]).blocks[1] != chain([0, 2, 3, 4, 5, 6, 7, 8]).blocks[1]


def test_roots_never_mix() -> None:
    roots = [
        chain_root(*parts)
        for parts in [("m", "l", "a"), ("m", "l", "b"), ("m", "la", ""), ("ml", "", "a"), ("m", "l", "")]
    ]
    assert len(set(roots)) == len(roots)
    ids = list(range(8))
    assert chain(ids, roots[0]).common_tokens(chain(ids, roots[1])) == 0


def test_other_block_sizes_share_nothing() -> None:
    ids = list(range(16))
    assert chain(ids, block_size=4).common_tokens(chain(ids, block_size=8)) == 0


def test_well_formed() -> None:
    good = chain(list(range(9)))
    assert good.is_well_formed()
    bad = [
        TokenChain(4, 9, good.blocks[:1], good.tail),
        TokenChain(4, 9, good.blocks, b""),
        TokenChain(4, 8, good.blocks, good.tail),
        TokenChain(4, 9, (b"short", b"short"), good.tail),
        TokenChain(0, 9, good.blocks, good.tail),
        TokenChain(4, -1, (), b""),
    ]
    assert not any(one.is_well_formed() for one in bad)
