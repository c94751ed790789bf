"""Prefill and decode speed of the embedded engine's runner beside plain transformers forwards.

Both run the same model in the same dtype on the same threads in this process, in turn. transformers gets what
suits it: sdpa attention, its own DynamicCache, sequences of equal length (no padding), logits of the last
token only. The runner does what the engine does: chunks of the engine's step budget, blocks scattered over
the pool. Both choose the next token greedily.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.report import Report, alternate, at_least, paired_ratio, progress_bar
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.models import DEFAULT_MODEL, resolve_model
from kvhandoff.embedded.runner import TensorRegion, TorchRunner, load_runner

CONTEXTS = (128, 1024)
BATCHES = (1, 8)
STEP_TOKENS = 512
DECODE_STEPS = 2
GOAL = 0.95


class Plain:
    """transformers' own way."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompts: list[list[int]]) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._next = self._forward(torch.tensor(prompts))

    def decode(self) -> None:
        self._next = self._forward(self._next[:, None])

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            out = self._model(input_ids=input_ids, cache=self._cache, use_cache=True, logits_to_keep=1)
            tokens: torch.Tensor = out.logits[:, -1].argmax(-1)
        tokens.tolist()
        return tokens


class Paged:
    """The runner, stepped as the engine steps it."""

    def __init__(self, runner: TorchRunner, num_blocks: int) -> None:
        self._runner = runner
        self._blocks = list(range(num_blocks))

    def prefill(self, prompts: list[list[int]]) -> None:
        random.shuffle(self._blocks)
        each = len(self._blocks) // max(BATCHES)
        self._tables = [self._blocks[i * each : (i + 1) * each] for i in range(len(prompts))]
        self._lengths = [len(prompt) for prompt in prompts]
        self._next = [self._prefill(*pair) for pair in zip(prompts, self._tables, strict=True)]

    def decode(self) -> None:
        steps = [
            SequenceStep([token], length, table, "last")
            for token, length, table in zip(self._next, self._lengths, self._tables, strict=True)
        ]
        self._next = [_greedy(logits) for logits in self._runner.forward(steps)]
        self._lengths = [length + 1 for length in self._lengths]

    def _prefill(self, prompt: list[int], table: list[int]) -> int:
        *chunks, last = [
            SequenceStep(prompt[start : start + STEP_TOKENS], start, table, None)
            for start in range(0, len(prompt), STEP_TOKENS)
        ]
        for step in chunks:
            self._runner.forward([step])
        [logits] = self._runner.forward([replace(last, logits="last")])
        return _greedy(logits)


def _greedy(logits: torch.Tensor | None) -> int:
    assert logits is not None
    return int(logits.argmax())


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _repeat(step: Callable[[], None]) -> None:
    for _ in range(DECODE_STEPS):
        step()


def _prompts(rng: random.Random, batch: int, context: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(context)] for _ in range(batch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    with Progress(transient=True) as progress:
        model_dir = resolve_model(options.model, progress)
    tokens_each = max(CONTEXTS) + (options.rounds + 1) * DECODE_STEPS
    num_blocks = max(BATCHES) * -(-tokens_each // 16)
    runner = load_runner(
        model_dir,
        dtype=options.dtype,
        num_blocks=num_blocks,
        region_factory=lambda blocks, size: TensorRegion(blocks, size, torch.device("cpu")),
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    plain, paged = Plain(model.eval()), Paged(runner, num_blocks)
    report = Report(
        name="engine",
        title=f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads: tokens/s (medians)",
        columns=("shape", "transformers", "kvhandoff", "ratio"),
        conditions={"model": options.model, "dtype": options.dtype, "threads": torch.get_num_threads()},
    )

    def measure(
        shape: str, tokens: int, plain_work: Callable[[], None], paged_work: Callable[[], None]
    ) -> None:
        contestants = {"plain": lambda: _timed(plain_work), "paged": lambda: _timed(paged_work)}
        alternate(contestants, 1)
        seconds = alternate(contestants, options.rounds, after_round=advance)
        ratio = paired_ratio(seconds["plain"], seconds["paged"])
        rates = [f"{tokens / statistics.median(seconds[name]):.1f}" for name in ("plain", "paged")]
        report.row(shape, *rates, f"{ratio:.3f}")
        report.goals.append(at_least(shape, ratio, GOAL))

    rng = random.Random(0)
    with progress_bar("measuring", options.rounds * len(CONTEXTS) * (1 + len(BATCHES))) as advance:
        for context in CONTEXTS:
            prompts = _prompts(rng, 1, context, runner.vocab_size)
            measure(
                f"prefill, context {context}",
                context,
                partial(plain.prefill, prompts),
                partial(paged.prefill, prompts),
            )
        for batch, context in itertools.product(BATCHES, CONTEXTS):
            prompts = _prompts(rng, batch, context, runner.vocab_size)
            plain.prefill(prompts)
            paged.prefill(prompts)
            measure(
                f"decode, batch {batch}, context {context}",
                batch * DECODE_STEPS,
                partial(_repeat, plain.decode),
                partial(_repeat, paged.decode),
            )
    report.finish()


if __name__ == "__main__":
    main()
