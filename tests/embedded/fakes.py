"""A model without a model, and a handoff side without a network, for tests of the engine core.

`FakeRunner` keeps the token ids themselves in its blocks, and the next token's logits are a hash of all that
it finds there through the block table: a wrong block, a stale one or a missing write gives other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep, TokenOutput
from kvhandoff.embedded.core import EngineCore

VOCAB = 32
EOS = 0
UNWRITTEN = 999
GARBAGE = 777


def fake_logits(context: Sequence[int]) -> torch.Tensor:
    """[VOCAB] float32, from 0 to 8, all different for all practical purposes."""
    digest = blake2b(b"".join(t.to_bytes(4, "little") for t in context), digest_size=64).digest()
    values = [int.from_bytes(digest[2 * i : 2 * i + 2], "little") / 8192 for i in range(VOCAB)]
    return torch.tensor(values, dtype=torch.float32)


def greedy(prompt: Sequence[int], max_tokens: int, *, eos: int | None = EOS) -> list[int]:
    """What greedy decoding gives, without any engine."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(fake_logits(tokens).argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements `ModelRunner`. `memory[block]` is the list of the block's token ids."""

    def __init__(self, num_blocks: int, block_size: int = 4, max_context: int = 4096) -> None:
        self.layout = KVLayout(
            order="block,token",
            dtype="int",
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_size=block_size,
            block_bytes=4 * block_size,
        )
        self.model_fingerprint = "fake"
        self.vocab_size = VOCAB
        self.max_context = max_context
        self.eos_token_ids = frozenset({EOS})
        self.memory = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.steps: list[list[tuple[int, int]]] = []
        """Per forward: (start, count) of each sequence."""
        self.before: Callable[[Sequence[SequenceStep]], None] = lambda steps: None
        """Called first in every forward; may raise."""
        self.logits: Callable[[Sequence[int]], torch.Tensor] = fake_logits

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor | None]:
        self.before(steps)
        self.steps.append([(step.start, len(step.token_ids)) for step in steps])
        size = self.layout.block_size
        for step in steps:
            for position, token in enumerate(step.token_ids, step.start):
                self.memory[step.block_table[position // size]][position % size] = token
        results: list[torch.Tensor | None] = []
        for step in steps:
            end = step.start + len(step.token_ids)
            context = self.read(step.block_table, end)
            ends = range(step.start + 1, end + 1) if step.logits == "all" else [end]
            rows = [self.logits(context[:stop]) for stop in ends]
            results.append(None if step.logits is None else torch.stack(rows))
        return results

    def read(self, blocks: Sequence[int], tokens: int) -> list[int]:
        size = self.layout.block_size
        return [self.memory[blocks[position // size]][position % size] for position in range(tokens)]


class FakeHooks:
    """Implements `KVHooks`: writes down what it is told, and which blocks the handoff side has to return."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.loads: dict[str, tuple[tuple[int, ...], int]] = {}
        """Every load that was asked for: the prompt's blocks, how many of them were cached."""
        self.awaited: list[str] = []
        """Loads without an answer."""
        self.unfenced: list[str] = []
        """Loads that failed or were abandoned; bytes may still land in their blocks."""
        self.fenced: list[str] = []
        """Those whose blocks were returned."""
        self.growing: dict[str, list[int]] = {}
        """The blocks of growing offers that are neither complete nor abandoned."""
        self.offers: dict[str, list[int]] = {}
        """The blocks of complete offers."""
        self.first_tokens: dict[str, int] = {}
        self.abandoned: dict[str, list[int]] = {}
        """The blocks of abandoned offers."""
        self.turns: dict[str, tuple[list[bytes], list[int]]] = {}
        """What was retained: hashes and blocks."""
        self.shortages: list[int] = []

    def load_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        self.calls.append(("load_allocated", request_id))
        self.loads[request_id] = (tuple(blocks), cached_blocks)
        self.awaited.append(request_id)

    def load_skipped(self, request_id: str) -> None:
        self.calls.append(("load_skipped", request_id))

    def load_abandoned(self, request_id: str) -> None:
        self.calls.append(("load_abandoned", request_id))
        self.gave_up(request_id)

    def gave_up(self, request_id: str) -> None:
        """The load has failed or was abandoned, or both when the two cross."""
        if request_id in self.awaited:
            self.awaited.remove(request_id)
        if request_id not in [*self.unfenced, *self.fenced]:
            self.unfenced.append(request_id)

    def offer_grown(self, request_id: str, blocks: Sequence[int]) -> None:
        self.calls.append(("offer_grown", request_id))
        assert blocks
        assert request_id not in [*self.offers, *self.abandoned]
        self.growing.setdefault(request_id, []).extend(blocks)

    def offer_abandoned(self, request_id: str) -> None:
        self.calls.append(("offer_abandoned", request_id))
        assert request_id not in [*self.offers, *self.abandoned]
        self.abandoned[request_id] = self.growing.pop(request_id, [])

    def offered(self, request_id: str, blocks: Sequence[int], first_token: int) -> None:
        self.calls.append(("offered", request_id))
        assert request_id not in [*self.offers, *self.abandoned]
        self.offers[request_id] = [*self.growing.pop(request_id, []), *blocks]
        self.first_tokens[request_id] = first_token

    def retained(self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.calls.append(("retained", request_id))
        assert len(hashes) == len(blocks) > 0
        self.turns[request_id] = list(hashes), list(blocks)

    def memory_short(self, blocks: int) -> None:
        assert blocks > 0
        self.shortages.append(blocks)


class Client:
    """One request and what came out of it."""

    def __init__(self, request_id: str, calls: list[tuple[str, str]]) -> None:
        self.request_id = request_id
        self.outputs: list[TokenOutput] = []
        self.strays: list[TokenOutput] = []
        """Of another request, or after the end. Raising would not help: the engine catches it."""
        self._calls = calls

    def __call__(self, output: TokenOutput) -> None:
        if output.request_id != self.request_id or self.ended:
            self.strays.append(output)
        self.outputs.append(output)
        if output.finish_reason:
            self._calls.append(("end", self.request_id))

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id is not None]

    @property
    def ended(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Bench:
    """An engine core on fakes, stepped by the test."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options: object) -> None:
        self.clock = ManualClock()
        self.runner = FakeRunner(num_blocks, block_size)
        self.hooks = FakeHooks()
        self.core = EngineCore(self.runner, self.hooks, num_blocks=num_blocks, clock=self.clock, **options)
        self.requests: dict[str, EngineRequest] = {}
        self.clients: list[Client] = []

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str = "",
        load: bool = False,
        load_tokens: int | None = None,
        load_gain: int = 1,
        offer: bool = False,
        grow: bool = False,
        retain: bool = False,
        **params: object,
    ) -> Client:
        """Queue a greedy request, unless `params` say otherwise."""
        client = Client(request_id, self.hooks.calls)
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
        request = EngineRequest(
            request_id,
            prompt,
            sampling,
            client,
            cache_salt=salt,
            load=load,
            load_tokens=load_tokens,
            load_gain=load_gain,
            offer=offer,
            grow=grow,
            retain=retain,
        )
        self.core.submit(request)
        self.requests[request_id] = request
        self.clients.append(client)
        return client

    def run(self, *, most: int = 10_000) -> None:
        """Step until only something new could bring progress."""
        for _ in range(most):
            if not self.core.step():
                return
        raise AssertionError(f"still busy after {most} steps")

    def land(self, request_id: str, tokens: int | None = None, *, first_token: int | None = None) -> None:
        """The awaited blocks get the prompt's KV, as a verified transfer would bring it."""
        prompt = self.requests[request_id].prompt_token_ids
        tokens = len(prompt) if tokens is None else tokens
        self.scribble(request_id, prompt[:tokens])
        if request_id in self.hooks.awaited:
            self.hooks.awaited.remove(request_id)
        self.core.load_finished(request_id, tokens, first_token)

    def fail_load(self, request_id: str) -> None:
        self.hooks.gave_up(request_id)
        self.core.load_failed(request_id, Reason.TRANSFER_FAILED)

    def scribble(self, request_id: str, tokens: Sequence[int] = ()) -> None:
        """Bytes land in the awaited blocks: `tokens`, garbage behind them."""
        blocks, cached = self.hooks.loads[request_id]
        size = self.runner.layout.block_size
        for index, block in enumerate(blocks[cached:], cached):
            content = list(tokens[index * size : (index + 1) * size])
            self.runner.memory[block] = content + [GARBAGE] * (size - len(content))

    def fence(self, request_id: str) -> None:
        """Return the blocks of a failed or abandoned load; until now bytes could land in them."""
        self.scribble(request_id)
        self.hooks.unfenced.remove(request_id)
        self.hooks.fenced.append(request_id)
        blocks, cached = self.hooks.loads[request_id]
        self.core.release_blocks(blocks[cached:])

    def assert_baseline(self) -> None:
        """No request, no reference, nothing lost."""
        counts = self.core.load()
        assert (counts["running"], counts["waiting"], counts["loading"]) == (0, 0, 0)
        assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks_total"]
        self.check()

    def check(self) -> None:
        """The pool's references are exactly those of the requests and of the handoff side; no client got
        what it should not."""
        assert [client.strays for client in self.clients if client.strays] == []
        scheduler, pool = self.core._scheduler, self.core._pool
        owners = [0] * pool.num_blocks
        for state in scheduler.requests.values():
            for block in state.blocks:
                owners[block] += 1
        for block, count in scheduler.lent.items():
            assert count > 0
            owners[block] += count
        assert owners == [pool.references(block) for block in range(pool.num_blocks)]
        assert pool.used == sum(count > 0 for count in owners)
        assert not set(pool._free) & set(pool._idle)
        assert len(pool._free) + len(pool._idle) + pool.used == pool.num_blocks
        assert {block: h for h, block in pool._block_of.items()} == pool._hash_of
        assert set(pool._idle) <= set(pool._hash_of)
        stages = [*scheduler.waiting, *scheduler.loading, *scheduler.running]
        assert sorted(s.arrival for s in stages) == sorted(s.arrival for s in scheduler.requests.values())
        assert set(scheduler.requests) == set(self.core._stepper._samplers)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    ids: list[int] = torch.randint(
        1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return ids


def prompt_ending_in_eos_after(count: int) -> list[int]:
    for seed in range(10_000):
        answer = greedy(prompt_of(7, seed), count)
        if len(answer) == count and answer[-1] == EOS and EOS not in answer[:-1]:
            return prompt_of(7, seed)
    raise AssertionError("no such prompt")
