"""The runner computes what plain transformers computes, however the work is cut up and wherever KV lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.models import resolve_model
from kvhandoff.embedded.runner import TensorRegion, load_runner
from kvhandoff.transport.region import SharedRegion
from tests.embedded.runners import (
    SERVED,
    Blocks,
    assert_logits_close,
    plain_logits,
    plain_model,
    random_tokens,
    run_together,
    runner_of,
    scratch_region,
    steps_of,
)
from tests.tinymodels import VOCAB_SIZE, cached_tiny_model


@pytest.mark.parametrize("arch", SERVED)
def test_chunks_and_decode_steps_in_a_batch_give_the_plain_logits(arch: str):
    runner, blocks = runner_of(arch), Blocks(runner_of(arch))
    prompts = [random_tokens(n, seed=n) for n in (90, 33, 16, 1)]
    chunks = [(20, 1, 45, 16), (17, 15), (16,), ()]
    sequences = [
        steps_of(tokens, sizes, blocks.table(len(tokens)))
        for tokens, sizes in zip(prompts, chunks, strict=True)
    ]
    for tokens, logits in zip(prompts, run_together(runner, sequences), strict=True):
        assert_logits_close(logits, plain_logits(arch, tokens))


@pytest.mark.parametrize("arch", SERVED)
def test_greedy_answers_are_those_of_generate(arch: str):
    runner, blocks = runner_of(arch), Blocks(runner_of(arch))
    prompts = [random_tokens(n, seed=100 + n) for n in (5, 31, 50)]
    tables = [blocks.table(len(prompt) + 12) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    steps = [SequenceStep(prompt, 0, table, "last") for prompt, table in zip(prompts, tables, strict=True)]
    for turn in range(12):
        for answer, logits in zip(answers, runner.forward(steps), strict=True):
            assert logits is not None
            answer.append(int(logits[0].argmax()))
        steps = [
            SequenceStep(answer[-1:], len(prompt) + turn, table, "last")
            for answer, prompt, table in zip(answers, prompts, tables, strict=True)
        ]
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = plain_model(arch).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert answer == expected[0, len(prompt) :].tolist()


@settings(max_examples=30)
@given(data=st.data())
def test_any_schedule_over_any_blocks_gives_the_plain_logits(data: st.DataObject):
    arch = data.draw(st.sampled_from(["llama", "qwen2_sliding"]))
    runner, blocks = runner_of(arch), Blocks(runner_of(arch), seed=data.draw(st.integers(0, 99)))
    prompts, sequences = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = random_tokens(data.draw(st.integers(1, 80)), seed=data.draw(st.integers(0, 99)))
        sizes = data.draw(st.lists(st.integers(1, 40), max_size=6))
        prompts.append(tokens)
        sequences.append(steps_of(tokens, sizes, blocks.table(len(tokens))))
    for tokens, logits in zip(prompts, run_together(runner, sequences), strict=True):
        assert_logits_close(logits, plain_logits(arch, tokens))


@pytest.mark.parametrize("arch", ["llama", "qwen2_sliding", "mistral"])
def test_long_contexts_beside_short_ones(arch: str):
    """Several mask pieces in one chunk, windows that hide whole runs of keys, groups of unlike lengths."""
    runner, blocks = runner_of(arch), Blocks(runner_of(arch))
    prompts = [random_tokens(n, seed=n) for n in (1300, 700, 300, 40, 3)]
    chunks = [(512, 512, 270), (650, 48), (298,), (38,), (1,)]
    sequences = [
        steps_of(tokens, sizes, blocks.table(len(tokens)))
        for tokens, sizes in zip(prompts, chunks, strict=True)
    ]
    for tokens, logits in zip(prompts, run_together(runner, sequences), strict=True):
        assert_logits_close(logits, plain_logits(arch, tokens))


def test_what_the_blocks_held_before_does_not_show():
    runner = runner_of("llama")
    assert isinstance(runner.region, TensorRegion)
    memory = runner.region.tensor.view(torch.float32)
    memory.fill_(float("nan"))
    tokens, table = random_tokens(45), [3, 9, 4, 7]
    beside = random_tokens(70, seed=1)
    sequences = [steps_of(tokens, (30, 5), table), steps_of(beside, (40,), [11, 12, 5, 8, 20])]
    for prompt, logits in zip((tokens, beside), run_together(runner, sequences), strict=True):
        assert_logits_close(logits, plain_logits("llama", prompt))
    memory.zero_()


def test_logits_come_in_the_order_of_the_steps_and_as_asked():
    runner = runner_of("llama")
    tokens, expected = random_tokens(40), plain_logits("llama", random_tokens(40))
    blocks = Blocks(runner)
    first, second, third = (blocks.table(40) for _ in range(3))
    runner.forward([SequenceStep(tokens[:20], 0, second, None)])
    everything, last, nothing = runner.forward(
        [
            SequenceStep(tokens, 0, first, "all"),
            SequenceStep(tokens[20:21], 20, second, "last"),
            SequenceStep(tokens[:7], 0, third, None),
        ]
    )
    assert nothing is None
    assert everything is not None
    assert last is not None
    assert everything.shape == (40, VOCAB_SIZE)
    assert last.shape == (1, VOCAB_SIZE)
    assert everything.dtype == last.dtype == torch.float32
    assert_logits_close(everything, expected)
    assert_logits_close(last[0], expected[20])
    last[0, 0] = 1.0  # a sampler may write into it


def test_a_forward_without_any_logits():
    runner = runner_of("llama")
    tokens = random_tokens(30)
    assert runner.forward([SequenceStep(tokens[:20], 0, [1, 2], None)]) == [None]
    [logits] = runner.forward([SequenceStep(tokens[20:], 20, [1, 2], "last")])
    assert logits is not None
    assert_logits_close(logits[0], plain_logits("llama", tokens)[-1])


def test_blocks_lie_in_the_region_in_the_order_that_the_layout_says():
    runner = runner_of("llama")
    layout, tokens, table = runner.layout, random_tokens(36), [5, 2, 8]
    runner.forward([SequenceStep(tokens, 0, table, None)])
    cache: Any = DynamicCache(config=plain_model("llama").config)
    with torch.no_grad():
        plain_model("llama")(torch.tensor([tokens]), cache=cache, use_cache=True)
    assert layout.order == "block,layer,token,2,head,dim"
    shape = (layout.layers, layout.block_size, 2, layout.kv_heads, layout.head_dim)
    assert torch.Size(shape).numel() * 4 == layout.block_bytes
    for position in range(len(tokens)):
        block, offset = table[position // 16], position % 16
        raw = runner.region.buffer[block * layout.block_bytes : (block + 1) * layout.block_bytes]
        kv = torch.frombuffer(raw, dtype=torch.float32).view(shape)[:, offset]
        for layer, plain in enumerate(cache.layers):
            torch.testing.assert_close(kv[layer, 0], plain.keys[0, :, position])
            torch.testing.assert_close(kv[layer, 1], plain.values[0, :, position])


def test_the_pool_lies_in_the_memory_it_is_given():
    region = SharedRegion.allocate(4, runner_of("llama").layout.block_bytes)
    asked = []

    def factory(num_blocks: int, block_bytes: int) -> SharedRegion:
        asked.append((num_blocks, block_bytes))
        return region

    runner = load_runner(cached_tiny_model("llama"), dtype="float32", num_blocks=4, region_factory=factory)
    assert asked == [(4, runner.layout.block_bytes)]
    assert not any(region.buffer)
    tokens = random_tokens(20)
    [first] = runner.forward([SequenceStep(tokens, 0, [3, 1], "last")])
    size = region.block_bytes
    # Move the sequence to other blocks, as a transfer would, and go on from there.
    region.buffer[:size] = region.buffer[3 * size :]
    region.buffer[2 * size : 3 * size] = region.buffer[size : 2 * size]
    region.buffer[3 * size :] = bytes(size)
    [again] = runner.forward([SequenceStep(tokens[-1:], 19, [0, 2], "last")])
    assert first is not None
    assert again is not None
    assert_logits_close(again, first)
    region.close()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (SequenceStep([1] * 17, 0, [4], "last"), "17 tokens need 2 blocks, the table has 1"),
        (SequenceStep([1], 32, [4, 5], "last"), "33 tokens need 3 blocks, the table has 2"),
        (SequenceStep([], 4, [4], "last"), "0 new tokens at position 4"),
        (SequenceStep([1], -1, [4], "last"), "1 new tokens at position -1"),
    ],
)
def test_a_step_that_can_not_be_right_is_refused_before_anything_is_written(step: SequenceStep, message: str):
    runner = runner_of("llama")
    before = bytes(runner.region.buffer)
    with pytest.raises(ValueError, match=message):
        runner.forward([SequenceStep([1, 2, 3], 0, [7], "last"), step])
    assert bytes(runner.region.buffer) == before


def test_a_token_outside_the_vocabulary_is_an_error():
    with pytest.raises(IndexError):
        runner_of("llama").forward([SequenceStep([VOCAB_SIZE], 0, [1], "last")])


def test_bfloat16_is_close_and_its_pool_half_the_size():
    runner, full = runner_of("llama", dtype="bfloat16"), runner_of("llama")
    assert 2 * runner.layout.block_bytes == full.layout.block_bytes
    assert runner.layout.dtype == "bfloat16"
    tokens, blocks = random_tokens(70), Blocks(runner)
    [logits] = run_together(runner, [steps_of(tokens, (40, 20), blocks.table(70))])
    expected = plain_logits("llama", tokens)
    error = (logits - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.05  # rounding, and no more than that


@pytest.mark.smollm2
def test_smollm2_knows_the_capital_of_france():
    from transformers import AutoTokenizer

    directory = resolve_model("smollm2")
    runner = load_runner(directory, num_blocks=8, region_factory=scratch_region)
    assert runner.layout.dtype == "bfloat16"
    assert runner.max_context == 8192
    assert runner.eos_token_ids == {2}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = list(tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False))
    prompt = len(tokens)
    new = tokens
    while (start := len(tokens) - len(new)) < prompt + 20:
        [logits] = runner.forward([SequenceStep(new, start, range(8), "last")])
        assert logits is not None
        new = [int(logits.argmax())]
        if new[0] in runner.eos_token_ids:
            break
        tokens = tokens + new
    assert tokenizer.decode(tokens[prompt:]) == "The capital of France is Paris."
