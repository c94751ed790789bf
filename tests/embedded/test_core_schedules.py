"""Random schedules: arrivals, aborts, loads that end late, fail or are abandoned, bytes that land until the
fence, offers that stay, a model that raises, and pools that are much too small.

Whatever happens, each request's tokens are a prefix of what it gets alone, all of it if it ended by itself;
blocks have exactly the owners they should; and once the handoff side has returned what it holds, every
request ends within a bounded number of steps and the pool is at its baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhandoff.embedded.api import SamplingParams, SequenceStep
from kvhandoff.embedded.sampler import RequestSampler
from tests.embedded.fakes import EOS, GARBAGE, Bench, Client, fake_logits

RARELY = st.integers(0, 7).map(lambda n: n == 0)


def alone(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The answer without an engine."""
    sampler = RequestSampler(params, frozenset({EOS}), prompt)
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        tokens.append(sampler.sample(fake_logits([*prompt, *tokens]), len(tokens)).token_id)
        if sampler.stops_at(tokens[-1], len(tokens)):
            break
    return tokens


def one_of(names: Sequence[str], pick: int) -> str:
    return names[pick % len(names)]


class Schedules(RuleBasedStateMachine):
    """One engine, stepped by the rules; the rules are also its clients and its handoff side."""

    @initialize(
        num_blocks=st.integers(4, 10),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(1, 4),
        max_step_tokens=st.integers(1, 12),
        prefix_cache=st.booleans(),
    )
    def begin(self, **options: Any) -> None:
        self.bench = Bench(**options)
        self.clients: dict[str, Client] = {}
        self.answers: dict[str, list[int]] = {}
        self.breaks = 0
        self.bench.runner.before = self.before_forward

    def before_forward(self, steps: Sequence[SequenceStep]) -> None:
        if self.breaks:
            self.breaks -= 1
            raise ArithmeticError("scheduled")

    # -- what may happen ------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 12),
        change=st.integers(0, 12),
        answer=st.integers(1, 20),
        salt=st.sampled_from(["", "red"]),
        kind=st.sampled_from(["plain", "plain", "load", "offer", "load and offer"]),
        seed=st.sampled_from([None, None, 1, 2]),
        prompt_logprobs=RARELY,
    )
    def submit(
        self,
        length: int,
        change: int,
        answer: int,
        salt: str,
        kind: str,
        seed: int | None,
        prompt_logprobs: bool,
    ) -> None:
        most = self.bench.core.max_model_len
        length = min(length, most - 1)
        # Prompts share prefixes: all ones, but for one token.
        prompt = [2 if index == change else 1 for index in range(length)]
        params: dict[str, Any] = {"temperature": 0.0 if seed is None else 1.0, "seed": seed}
        params |= {"prompt_logprobs": 0 if prompt_logprobs else None}
        max_tokens = 1 if "offer" in kind else min(answer, most - length)
        name = f"r{len(self.clients)}"
        self.answers[name] = alone(prompt, SamplingParams(max_tokens=max_tokens, **params))
        self.clients[name] = self.bench.submit(
            name, prompt, max_tokens, salt=salt, load="load" in kind, offer="offer" in kind, **params
        )

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.core.step()

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        self.bench.core.abort(one_of(self.living() or list(self.clients), pick))

    @precondition(lambda self: self.bench.hooks.awaited)
    @rule(pick=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 0.9, 1.0, 1.0, 1.0]))
    def land(self, pick: int, share: float) -> None:
        name = one_of(self.bench.hooks.awaited, pick)
        self.bench.land(name, int(share * len(self.bench.requests[name].prompt_token_ids)))

    @precondition(lambda self: self.bench.hooks.awaited)
    @rule(pick=st.integers(0, 1000))
    def fail(self, pick: int) -> None:
        self.bench.fail_load(one_of(self.bench.hooks.awaited, pick))

    @precondition(lambda self: self.bench.hooks.awaited or self.bench.hooks.unfenced)
    @rule(pick=st.integers(0, 1000))
    def bytes_land(self, pick: int) -> None:
        hooks = self.bench.hooks
        self.bench.scribble(one_of([*hooks.awaited, *hooks.unfenced], pick), [GARBAGE] * 3)

    @precondition(lambda self: self.bench.hooks.unfenced)
    @rule(pick=st.integers(0, 1000))
    def fence(self, pick: int) -> None:
        self.bench.fence(one_of(self.bench.hooks.unfenced, pick))

    @precondition(lambda self: self.bench.hooks.offers)
    @rule(pick=st.integers(0, 1000))
    def release_offer(self, pick: int) -> None:
        name = one_of(list(self.bench.hooks.offers), pick)
        blocks = self.bench.hooks.offers.pop(name)
        prompt = self.bench.requests[name].prompt_token_ids
        assert self.bench.runner.read(blocks, len(prompt)) == prompt, "what was offered has changed"
        self.bench.core.release_blocks(blocks)

    @rule(now=RARELY)
    def model_breaks(self, now: bool) -> None:
        self.breaks += now

    def living(self) -> list[str]:
        return [name for name, client in self.clients.items() if not client.ended]

    # -- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def owners_and_contents_are_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.check()
        for state in self.bench.core._scheduler.requests.values():
            if state.stage.value != "loading":
                content = self.bench.runner.read(state.blocks, state.computed)
                assert content == state.tokens[: state.computed]
            awaited = set(state.blocks[state.cached_blocks :]) if state.stage.value == "loading" else set()
            assert not awaited & set(self.bench.core._pool._hash_of)
        for name, client in self.clients.items():
            tokens, answer = client.tokens, self.answers[name]
            assert tokens == answer[: len(tokens)], f"{name} goes astray"
            if client.ended in ("stop", "length"):
                assert tokens == answer

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.breaks = 0
        hooks = self.bench.hooks
        # Each round answers all loads that were admitted; a request is loaded once at most.
        for _ in range(len(self.clients) + 1):
            self.bench.run(most=2000)
            for index, name in enumerate(list(hooks.awaited)):
                self.bench.land(name) if index % 2 else self.bench.fail_load(name)
            while hooks.unfenced:
                self.fence(0)
            while hooks.offers:
                self.release_offer(0)
        self.bench.run(most=2000)
        self.owners_and_contents_are_right()
        assert all(client.ended for client in self.clients.values())
        self.bench.assert_baseline()
        told = [name for call, name in hooks.calls if call in ("load_allocated", "load_skipped")]
        assert len(told) == len(set(told)), "a load was asked for twice"


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
