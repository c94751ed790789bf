"""Runners over tiny models for tests, and what plain transformers says of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.runner import TensorRegion, TorchRunner, load_runner
from tests.tinymodels import VOCAB_SIZE, cached_tiny_model

NUM_BLOCKS = 192
SERVED = (
    "llama",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "gemma3_text",
)


def scratch_region(num_blocks: int, block_bytes: int) -> TensorRegion:
    return TensorRegion(num_blocks, block_bytes, torch.device("cpu"))


@cache
def runner_of(arch: str, *, exact: bool = False, dtype: str = "float32") -> TorchRunner:
    """A runner with NUM_BLOCKS blocks of 16 tokens, shared by the tests: its blocks hold anything."""
    return load_runner(
        cached_tiny_model(arch),
        dtype=dtype,
        exact=exact,
        num_blocks=NUM_BLOCKS,
        region_factory=scratch_region,
    )


@cache
def plain_model(arch: str) -> Any:
    """The same model in plain transformers, float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(cached_tiny_model(arch), dtype=torch.float32)
    return model.eval()


def plain_logits(arch: str, tokens: Sequence[int]) -> torch.Tensor:
    """`[tokens, vocab_size]` of one plain forward."""
    with torch.no_grad():
        logits: torch.Tensor = plain_model(arch)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def random_tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


class Blocks:
    """Gives out blocks of a runner in random order, so that tables are fragmented and unsorted."""

    def __init__(self, runner: TorchRunner, seed: int = 0) -> None:
        self._block_size = runner.layout.block_size
        self._free = list(range(runner.region.num_blocks))
        random.Random(seed).shuffle(self._free)

    def table(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self._block_size))]


def steps_of(tokens: Sequence[int], sizes: Sequence[int], table: Sequence[int]) -> list[SequenceStep]:
    """The whole sequence in chunks of these sizes, then token by token; all logits wanted."""
    steps: list[SequenceStep] = []
    start = 0
    while start < len(tokens):
        size = sizes[len(steps)] if len(steps) < len(sizes) else 1
        steps.append(SequenceStep(tokens[start : start + size], start, table, "all"))
        start += size
    return steps


def run_together(runner: TorchRunner, sequences: Sequence[Sequence[SequenceStep]]) -> list[torch.Tensor]:
    """Run several sequences' steps side by side, one step of each a forward; each one's logits."""
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for turn in range(max(len(steps) for steps in sequences)):
        present = [i for i, steps in enumerate(sequences) if turn < len(steps)]
        for i, logits in zip(present, runner.forward([sequences[i][turn] for i in present]), strict=True):
            assert logits is not None
            rows[i].append(logits)
    return [torch.cat(parts) for parts in rows]


def assert_logits_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding, which the logits' size of about 4 scales."""
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
