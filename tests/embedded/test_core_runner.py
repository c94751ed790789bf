"""The engine core over the real runner: a tiny random Llama says what plain transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvhandoff.embedded.api import EngineRequest, SamplingParams
from kvhandoff.embedded.core import EngineCore
from kvhandoff.embedded.runner import TensorRegion, TorchRunner, load_runner
from tests.embedded.fakes import Client, FakeHooks
from tests.tinymodels import VOCAB_SIZE, cached_tiny_model

ANSWER = 12
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 70]


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(10, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Plain transformers' greedy answers, by the prompt's length; EOS does not end them."""
    model = AutoModelForCausalLM.from_pretrained(cached_tiny_model("llama"), dtype=torch.float32).eval()
    answers = {}
    for length in LENGTHS:
        ids = torch.tensor([prompt_of(length)])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, **options)
        answers[length] = output[0, length:].tolist()
    return answers


class Engine:
    """A core and its runner, stepped by the test."""

    def __init__(self, num_blocks: int, **options: int) -> None:
        self.runner: TorchRunner = load_runner(
            cached_tiny_model("llama"),
            dtype="float32",
            num_blocks=num_blocks,
            region_factory=lambda blocks, size: TensorRegion(blocks, size, torch.device("cpu")),
        )
        self.hooks = FakeHooks()
        self.core = EngineCore(self.runner, self.hooks, num_blocks=num_blocks, **options)

    def submit(self, length: int, max_tokens: int = ANSWER, **options: bool) -> Client:
        name = f"r{length}"
        client = Client(name, self.hooks.calls)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.submit(EngineRequest(name, prompt_of(length), params, client, **options))
        return client

    def run(self) -> None:
        while self.core.step():
            pass

    def block(self, index: int) -> torch.Tensor:
        size = self.runner.layout.block_bytes
        region = self.runner.region
        assert isinstance(region, TensorRegion)
        return region.tensor[index * size : (index + 1) * size]


def answers(clients: dict[int, Client]) -> dict[int, list[int]]:
    return {length: client.tokens for length, client in clients.items()}


def is_at_baseline(engine: Engine) -> bool:
    counts = engine.core.load()
    return counts["blocks_free"] + counts["blocks_cached"] == counts["blocks_total"]


@pytest.mark.parametrize(
    ("num_blocks", "max_step_tokens"), [(64, 512), (64, 24), (8, 512)], ids=["roomy", "chunked", "crowded"]
)
def test_a_batch_says_what_plain_transformers_says(
    num_blocks: int, max_step_tokens: int, expected: dict[int, list[int]]
):
    engine = Engine(num_blocks, max_step_tokens=max_step_tokens, max_num_seqs=4)
    clients = {length: engine.submit(length) for length in LENGTHS}
    engine.run()
    assert answers(clients) == expected
    assert is_at_baseline(engine)
    again = {length: engine.submit(length) for length in reversed(LENGTHS)}  # from the prefix cache
    engine.run()
    assert answers(again) == expected


def test_kv_computed_by_one_engine_is_used_by_another(expected: dict[int, list[int]]):
    prefill, decode = Engine(64), Engine(80)
    assert prefill.core.chain([1, 2], "") == decode.core.chain([1, 2], "")
    offered = {length: prefill.submit(length, 1, offer=True) for length in LENGTHS}
    prefill.run()
    clients = {length: decode.submit(length, load=True) for length in LENGTHS}
    decode.run()
    for length in LENGTHS[1:]:
        blocks, cached = decode.hooks.loads[f"r{length}"]
        copy(prefill, prefill.hooks.offers[f"r{length}"], decode, blocks[cached:])
        decode.core.load_finished(f"r{length}", length)
    decode.run()
    assert answers(clients) == expected
    assert [offered[length].tokens for length in LENGTHS] == [[expected[length][0]] for length in LENGTHS]
    for blocks in prefill.hooks.offers.values():
        prefill.core.release_blocks(blocks)
    prefill.run()
    assert is_at_baseline(prefill)
    assert is_at_baseline(decode)


def copy(source: Engine, offered: Sequence[int], target: Engine, awaited: Sequence[int]) -> None:
    assert len(offered) == len(awaited)
    for theirs, mine in zip(offered, awaited, strict=True):
        target.block(mine).copy_(source.block(theirs))
