"""Engines of two tensor parallel ranks, and of unequal numbers of them. By hand: they take minutes to start.

KVHANDOFF_VLLM=full pytest tests/vllm/test_tensor_parallel.py
"""

from __future__ import annotations

import pytest

from tests.vllm.marks import FULL
from tests.vllm.models import MODELS
from tests.vllm.pair import Pair

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not FULL, reason="by hand: KVHANDOFF_VLLM=full"),
]

ranks = pytest.mark.parametrize("engines", [name for name in MODELS if "rank" in name], indirect=True)
LENGTHS = (33, 200, 311, 640)


@ranks
async def test_pull_and_push(pair: Pair) -> None:
    for tokens in LENGTHS:
        for way in (pair.pull, pair.push):
            question = await pair.question(tokens)
            answer = await way(question.prompt)
            assert answer.token_ids == question.expected
            prefilled, decoded = await pair.records(answer.key)
            assert (prefilled.reasons, decoded.reasons) == ([], [])
            assert decoded.transferred_tokens == tokens - 1


@ranks
async def test_return(pair: Pair) -> None:
    first = await pair.question(300, 40)
    turn = await pair.local(first.prompt, 40)
    assert turn.token_ids == first.expected
    history = await pair.history(turn)
    second = await pair.question(400, begins=first.transcript)
    answer = await pair.push(second.prompt, history=history)
    assert answer.token_ids == second.expected
    prefilled, decoded = await pair.records(answer.key)
    assert prefilled.transferred_tokens == history.n_tokens
    assert (prefilled.reasons, decoded.reasons) == ([], [])
