"""Exact mode: the same logits bit for bit, alone or batched, in any chunks, on copied blocks.

The environment that it needs is set in tests/conftest.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded import exact
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.runner import TorchRunner
from tests.embedded.runners import (
    Blocks,
    assert_logits_close,
    plain_logits,
    random_tokens,
    run_together,
    runner_of,
    steps_of,
)

ARCHITECTURES = ["llama", "qwen2_sliding", "gemma3_text"]
LENGTH = 560
"""More than the 512 keys that an attention is padded to."""


def alone(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    """All logits of one forward with nothing beside it."""
    [logits] = runner.forward([SequenceStep(tokens, 0, Blocks(runner, 1).table(len(tokens)), "all")])
    assert logits is not None
    return logits


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_logits_are_the_plain_ones_up_to_rounding(arch: str):
    tokens = random_tokens(LENGTH)
    assert_logits_close(alone(runner_of(arch, exact=True), tokens), plain_logits(arch, tokens))


@settings(max_examples=25)
@given(data=st.data())
def test_any_chunks_in_any_company_give_the_same_bits(data: st.DataObject):
    runner = runner_of(data.draw(st.sampled_from(ARCHITECTURES)), exact=True)
    blocks = Blocks(runner, seed=data.draw(st.integers(0, 99)))
    prompts, sequences = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = random_tokens(data.draw(st.integers(1, LENGTH)), seed=data.draw(st.integers(0, 99)))
        # A few decode steps at the end, the rest in chunks.
        sizes = data.draw(st.lists(st.integers(1, 300), max_size=5))
        sizes.append(max(1, len(tokens) - sum(sizes) - 4))
        prompts.append(tokens)
        sequences.append(steps_of(tokens, sizes, blocks.table(len(tokens))))
    for tokens, logits in zip(prompts, run_together(runner, sequences), strict=True):
        assert torch.equal(logits, alone(runner, tokens))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_on_copied_blocks_gives_the_bits_of_a_prefill(arch: str):
    """As a handoff does: prefill here, its blocks copied, decode there."""
    runner = runner_of(arch, exact=True)
    prompt, whole = random_tokens(500), random_tokens(500) + random_tokens(16, seed=1)
    expected = alone(runner, whole)
    blocks = Blocks(runner, seed=2)
    mine, theirs = blocks.table(len(whole)), blocks.table(len(whole))
    runner.forward([SequenceStep(prompt, 0, mine, None)])
    buffer, size = runner.region.buffer, runner.layout.block_bytes
    for a, b in zip(mine, theirs, strict=True):
        buffer[b * size : (b + 1) * size] = buffer[a * size : (a + 1) * size]
        buffer[a * size : (a + 1) * size] = bytes(size)
    for position in range(499, len(whole)):  # the last prompt token is computed again
        [logits] = runner.forward([SequenceStep(whole[position : position + 1], position, theirs, "last")])
        assert logits is not None
        assert torch.equal(logits[0], expected[position])


def test_logits_do_not_depend_on_how_many_are_asked_for():
    runner, tokens = runner_of("llama", exact=True), random_tokens(100)
    expected, table = alone(runner, tokens), Blocks(runner, 3).table(100)
    [last] = runner.forward([SequenceStep(tokens, 0, table, "last")])
    assert last is not None
    assert torch.equal(last[0], expected[-1])
    assert runner.forward([SequenceStep(tokens, 0, table, None)]) == [None]


class Tampered:
    """A runner that does one thing differently, as a machine without exactness would."""

    def __init__(self, runner: TorchRunner, tamper: Any) -> None:
        self.layout, self.vocab_size, self.max_context = runner.layout, runner.vocab_size, runner.max_context
        self.region = runner.region
        self._runner = runner
        self._tamper = tamper

    def forward(self, steps: list[SequenceStep]) -> Any:
        return self._tamper(self._runner.forward(steps), steps, self.region.buffer)


def nudge(logits: torch.Tensor) -> torch.Tensor:
    """One bit in one number."""
    logits[-1, 5] = torch.nextafter(logits[-1, 5], torch.tensor(torch.inf))
    return logits


@pytest.mark.parametrize(
    ("applies", "message"),
    [
        (lambda step: len(step.token_ids) == 130, "the logits of 130 tokens after 3, computed in chunks"),
        (
            lambda step: step.start > 500 and len(step.token_ids) == 1,
            "1 tokens after 549, computed on copied",
        ),
    ],
)
def test_the_proof_fails_on_a_single_bit(applies: Any, message: str):
    def tamper(logits: list[torch.Tensor], steps: list[SequenceStep], buffer: memoryview) -> Any:
        return [nudge(logits[0]), *logits[1:]] if applies(steps[0]) else logits

    runner: Any = Tampered(runner_of("llama", exact=True), tamper)
    with pytest.raises(ConfigError, match=f"exact mode does not hold .*{message}"):
        exact.prove(runner)


def test_the_proof_fails_on_a_single_bit_of_a_key():
    def tamper(logits: Any, steps: list[SequenceStep], buffer: memoryview) -> Any:
        if steps[0].start == 134:
            # Of a token that later chunks hardly look at, so that only the comparison of blocks can tell.
            where = steps[0].block_table[2] * runner.layout.block_bytes
            buffer[where] ^= 1
        return logits

    runner: Any = Tampered(runner_of("llama", exact=True), tamper)
    with pytest.raises(ConfigError, match=r"exact mode does not hold .*keys and values of chunks in a batch"):
        exact.prove(runner)


def test_the_proof_holds_here():
    exact.prove(runner_of("llama", exact=True))


def test_padding():
    assert [exact.pad_rows(n) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [exact.pad_kv(n) for n in (1, 512, 513)] == [512, 512, 1024]


def test_exact_mode_wants_to_be_chosen_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch):
    wanted = exact._mkl_mode()
    if wanted is None:
        pytest.skip("torch has no MKL on this processor")
    exact.prepare_environment(True)  # set by conftest
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    exact.prepare_environment(False)
    with pytest.raises(ConfigError, match=f"torch is loaded already and MKL_CBWR is 'AUTO'.*{wanted}"):
        exact.prepare_environment(True)


def test_preparing_sets_the_environment_without_loading_torch():
    script = (
        "import os, sys\n"
        "from kvhandoff.embedded import exact\n"
        "exact.prepare_environment(False)\n"
        "assert 'MKL_CBWR' not in os.environ\n"
        "exact.prepare_environment(True)\n"
        "assert os.environ.get('MKL_CBWR') == exact._mkl_mode()\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_the_tables_of_the_proof_are_disjoint():
    tables = exact._tables(random.Random(0), 16, exact.PROOF_TOKENS)
    used = [block for table in tables for block in table]
    assert len(used) == len(set(used)) == exact.blocks_needed(16)
