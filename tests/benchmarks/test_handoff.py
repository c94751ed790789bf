"""The handoff benchmark measures what it says: whole, verified handoffs, whose phases add up."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from benchmarks.engine_pair import SMOLLM2, BlankRunner, Shape, engine_pair
from benchmarks.handoff import PHASES, split

from kvhandoff.embedded.api import SequenceStep
from kvhandoff.transport.region import PrivateRegion
from tests import processes  # noqa: F401  shares its forkserver, which has torch loaded

BLOCKS = 4
SIZE = SMOLLM2.block_size


@pytest.mark.processes
@pytest.mark.parametrize(("transport", "fragmented"), [("nixl", True), ("shm", False)])
def test_the_prompt_is_handed_over_whole(transport: Literal["nixl", "shm"], fragmented: bool):
    with engine_pair(Shape(transport, BLOCKS, fragmented)) as pair:
        for _ in range(2):  # the second finds blocks with content, and no tokens it knows
            offered, landed = pair.handoff()
            record = landed.record
            assert record.transferred_tokens == BLOCKS * SIZE - 2, record
            assert record.first_token_reused
            assert record.bytes == BLOCKS * SMOLLM2.block_bytes
            assert record.descriptors == (BLOCKS if fragmented else 1)
            phases = split(offered, landed)
            assert tuple(phases) == PHASES
            assert min(phases.values()) >= 0
            total = 1e3 * (landed.running_at - offered.computed_at)
            assert sum(phases.values()) == pytest.approx(total)


@pytest.mark.parametrize("position", [0, BLOCKS * SIZE - 3])
def test_the_runner_sees_a_wrong_token(position: int):
    region = PrivateRegion.allocate(2 * BLOCKS, SMOLLM2.block_bytes)
    runner = BlankRunner(region)
    table = list(range(0, 2 * BLOCKS, 2))
    prompt = list(range(100, 100 + BLOCKS * SIZE - 1))

    def step(tokens: list[int], start: int) -> list[Any]:
        return runner.forward([SequenceStep(tokens, start, table, "last")])

    step(prompt[:-1], 0)
    runner.expected = prompt
    step(prompt[-1:], len(prompt) - 1)
    block, offset = divmod(position, SIZE)
    region.buffer[table[block] * SMOLLM2.block_bytes + 4 * offset] ^= 1
    with pytest.raises(RuntimeError, match=r"1 of 62 tokens' KV"):
        step(prompt[-1:], len(prompt) - 1)
