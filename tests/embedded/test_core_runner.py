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
        self.requests: dict[str, EngineRequest] = {}
        self.core = EngineCore(self.runner, self.hooks, num_blocks=num_blocks, **options)

    def submit(
        self,
        length: int,
        max_tokens: int = ANSWER,
        *,
        sampling: dict[str, Any] | None = None,
        **options: bool,
    ) -> Client:
        """Queue the prompt of this length: greedy, unless `sampling` says otherwise."""
        name = f"r{length}"
        client = Client(name, self.hooks.calls)
        how = {"temperature": 0.0, **(sampling or {})}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **how)
        self.requests[name] = EngineRequest(name, prompt_of(length), params, client, **options)
        self.core.submit(self.requests[name])
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


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 20},
]


@pytest.mark.parametrize("crowded", [False, True])
def test_with_the_first_token_of_the_other_engine_the_text_is_the_same(crowded: bool):
    """Field case 40, greedy and with many seeds; crowded: with a preemption after the first token."""
    lengths = [15, 16, 17, 33]
    seeded = [{**SAMPLED[seed % 3], "seed": seed} for seed in range(12)]
    one, prefill, decode = Engine(64), Engine(64), Engine(8 if crowded else 64)
    preemptions = 0
    for sampling in [{}, *seeded]:
        alone = {length: one.submit(length, 24, sampling=sampling) for length in lengths}
        one.run()
        for length in lengths:
            prefill.submit(length, 1, sampling=sampling, offer=True)
        prefill.run()
        clients = {length: decode.submit(length, 24, sampling=sampling, load=True) for length in lengths}
        while not all(client.ended for client in clients.values()):
            decode.core.step()
            while decode.hooks.loads:
                name, (blocks, cached) = decode.hooks.loads.popitem()
                copy(prefill, prefill.hooks.offers[name][cached:], decode, blocks[cached:])
                length, first_token = int(name[1:]), prefill.hooks.first_tokens.pop(name)
                decode.core.load_finished(name, length, first_token)
        assert answers(clients) == answers(alone)
        for request in decode.requests.values():
            assert request.stats.first_token_reused
            assert request.stats.computed_tokens == 0
            preemptions += request.stats.preemptions
        for name in list(prefill.hooks.offers):
            prefill.core.release_blocks(prefill.hooks.offers.pop(name))
        prefill.run()
        for engine in (prefill, decode):  # nothing is found in a cache the next time
            assert is_at_baseline(engine)
            engine.core._pool.allocate(engine.core._pool.num_blocks)
            engine.core._pool.release(range(engine.core._pool.num_blocks))
    assert (preemptions > 0) == crowded


def copy(source: Engine, offered: Sequence[int], target: Engine, awaited: Sequence[int]) -> None:
    assert len(offered) == len(awaited)
    for theirs, mine in zip(offered, awaited, strict=True):
        target.block(mine).copy_(source.block(theirs))
