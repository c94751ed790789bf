"""Random schedules: arrivals, aborts, loads of all or of a beginning that end late, with a first token or
without, fail or are abandoned, bytes that land until the fence, offers that grow and stay, turns that are
retained, a model that raises, and pools that are much too small.

Whatever happens, each request's tokens are a prefix of what it gets alone, all of it if it ended by itself;
blocks have exactly the owners they should, and hold what they should; and once the handoff side has returned
what it holds (retained turns only when it is told to), every request ends within a bounded number of steps
and the pool is at its baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

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


def first_token_elsewhere(prompt: Sequence[int], params: SamplingParams) -> int:
    """What the prefill leg of the request samples (`router/legs.py`)."""
    sent = replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1), stop_token_ids=())
    [token] = alone(prompt, sent)
    return token


T = TypeVar("T")


def one_of(choices: Sequence[T], pick: int) -> T:
    return choices[pick % len(choices)]


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
        self.released: Counter[str] = Counter()  # leading blocks of offers that were returned
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
        load=st.sampled_from([None, None, "all", "some"]),
        offer=st.sampled_from([None, None, "offer", "grow"]),
        retain=st.booleans(),
        seed=st.sampled_from([None, None, 1, 2]),
        stops=st.sampled_from([(), (), (1, 2, 3, 4)]),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=RARELY,
    )
    def submit(
        self,
        length: int,
        change: int,
        answer: int,
        salt: str,
        load: str | None,
        offer: str | None,
        retain: bool,
        seed: int | None,
        stops: tuple[int, ...],
        min_tokens: int,
        prompt_logprobs: bool,
    ) -> None:
        most = self.bench.core.max_model_len
        length = min(length, most - 1)
        # Prompts share prefixes: all ones, but for one token.
        prompt = [2 if index == change else 1 for index in range(length)]
        params: dict[str, Any] = {"temperature": 0.0 if seed is None else 1.0, "seed": seed}
        params |= {"prompt_logprobs": 0 if prompt_logprobs else None, "stop_token_ids": stops}
        max_tokens = min(answer, most - length)
        params["min_tokens"] = min(min_tokens, max_tokens)
        name = f"r{len(self.clients)}"
        self.answers[name] = alone(prompt, SamplingParams(max_tokens=max_tokens, **params))
        self.clients[name] = self.bench.submit(
            name,
            prompt,
            max_tokens,
            salt=salt,
            load=load is not None,
            load_tokens=change if load == "some" else None,
            load_gain=1 + answer % 3,
            offer=offer is not None,
            grow=offer == "grow",
            retain=retain,
            **params,
        )

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> bool:
        bench, scheduler = self.bench, self.bench.core._scheduler
        told = len(bench.hooks.shortages)
        busy = bench.core.step()
        stuck = scheduler.running or (scheduler.waiting and scheduler._has_place(scheduler.waiting[0]))
        if stuck and not busy:
            assert len(bench.hooks.shortages) > told, "nobody was told what the engine waits for"
        return busy

    @precondition(lambda self: self.clients)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        self.bench.core.abort(one_of(self.living() or list(self.clients), pick))

    @precondition(lambda self: self.bench.hooks.awaited)
    @rule(pick=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))
    def land(self, pick: int, share: float) -> None:
        self.bring(one_of(self.bench.hooks.awaited, pick), share)

    @precondition(lambda self: self.bench.hooks.awaited)
    @rule(pick=st.integers(0, 1000), share=st.sampled_from([0.9, 1.0, 1.0, 1.0]))
    def land_with_first_token(self, pick: int, share: float) -> None:
        name = one_of(self.bench.hooks.awaited, pick)
        request = self.bench.requests[name]
        self.bring(name, share, first_token_elsewhere(request.prompt_token_ids, request.params))

    def bring(self, name: str, share: float, first_token: int | None = None) -> None:
        request = self.bench.requests[name]
        length = len(request.prompt_token_ids)
        most = length if request.load_tokens is None else min(length, request.load_tokens)
        self.bench.land(name, int(share * most), first_token=first_token)

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

    @precondition(lambda self: self.lent_by_offers())
    @rule(pick=st.integers(0, 1000))
    def release_offer(self, pick: int) -> None:
        """Complete and abandoned offers end; one that is withdrawn while it grows, too."""
        blocks = one_of(self.lent_by_offers(), pick)
        self.bench.core.release_blocks(blocks)
        for offers in self.offers_by_state():
            for name in [name for name, mine in offers.items() if mine is blocks]:
                self.released[name] += len(blocks)
                offers[name] = []

    @precondition(lambda self: self.bench.hooks.turns)
    @rule(pick=st.integers(0, 1000))
    def release_turn(self, pick: int) -> None:
        """Its lease is over."""
        turns = self.bench.hooks.turns
        _, blocks = turns.pop(one_of(list(turns), pick))
        self.bench.core.release_blocks(blocks)

    @precondition(lambda self: self.bench.hooks.shortages)
    @rule()
    def answer_shortages(self) -> None:
        """What was asked for last is given back: the least recently used turns."""
        hooks = self.bench.hooks
        wanted = hooks.shortages[-1]
        hooks.shortages.clear()
        while hooks.turns and wanted > 0:
            _, blocks = hooks.turns.pop(next(iter(hooks.turns)))
            self.bench.core.release_blocks(blocks)
            wanted -= len(blocks)

    @rule(now=RARELY)
    def model_breaks(self, now: bool) -> None:
        self.breaks += now

    def offers_by_state(self) -> list[dict[str, list[int]]]:
        return [self.bench.hooks.growing, self.bench.hooks.offers, self.bench.hooks.abandoned]

    def lent_by_offers(self) -> list[list[int]]:
        return [blocks for offers in self.offers_by_state() for blocks in offers.values() if blocks]

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

    @invariant()
    def what_is_lent_is_right(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench, hooks, size = self.bench, self.bench.hooks, self.bench.runner.layout.block_size
        lent: Counter[int] = Counter()
        for offers in self.offers_by_state():
            for name, blocks in offers.items():
                prompt = list(bench.requests[name].prompt_token_ids)
                start = self.released[name] * size
                covered = prompt[start : start + len(blocks) * size]
                assert bench.runner.read(blocks, len(covered)) == covered, f"{name}'s offer has changed"
                if offers is hooks.offers:
                    assert start + len(blocks) * size >= len(prompt), f"{name}'s offer is not complete"
                lent.update(blocks)
        for name, (hashes, blocks) in hooks.turns.items():
            request, tokens = bench.requests[name], len(blocks) * size
            turn = [*request.prompt_token_ids, *self.answers[name]]
            assert bench.runner.read(blocks, tokens) == turn[:tokens], f"{name}'s turn has changed"
            chain = bench.core.chain(turn, request.cache_salt)
            assert tuple(hashes) == chain.blocks[: len(blocks)]
            lent.update(blocks)
        for name in hooks.unfenced:
            blocks, cached = hooks.loads[name]  # type: ignore[assignment]
            lent.update(blocks[cached:])
        if not bench.core._inbox:  # nothing is on its way back
            assert lent == bench.core._scheduler.lent

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.breaks = 0
        hooks = self.bench.hooks
        # Each round answers all loads and offers; a request is loaded once at most, but may wait for a turn
        # to be given up, or be preempted, in between. Turns are not given up unless memory is short.
        for _ in range(4 * len(self.clients) + 4):
            steps = 0
            while self.one_step():
                steps += 1
                assert steps < 2000
            for index, name in enumerate(list(hooks.awaited)):
                if index % 3 == 2:
                    self.bench.fail_load(name)
                elif index % 3:
                    self.land(0, 0.9)
                else:
                    self.land_with_first_token(0, 1.0)
            while hooks.unfenced:
                self.fence(0)
            while self.lent_by_offers():
                self.release_offer(0)
            if hooks.shortages:
                self.answer_shortages()
        assert all(client.ended for client in self.clients.values())
        while hooks.turns:
            self.release_turn(0)
        self.bench.run(most=2000)
        self.owners_and_contents_are_right()
        self.what_is_lent_is_right()
        self.bench.assert_baseline()
        self.all_was_told()

    def all_was_told(self) -> None:
        calls = self.bench.hooks.calls
        told = Counter(calls)
        for name, client in self.clients.items():
            request = self.bench.requests[name]
            assert [call for call, of in calls if of == name][-1] == "end"
            loads = told["load_allocated", name] + told["load_skipped", name]
            assert loads <= request.load
            assert told["load_abandoned", name] <= told["load_allocated", name]
            offers = told["offered", name], told["offer_abandoned", name]
            if request.grow:
                assert sum(offers) == 1
            elif request.offer:
                assert offers == (bool(client.tokens), 0)
            else:
                assert offers == (0, 0)
            if offers[0]:
                assert client.tokens[:1] in ([], [self.bench.hooks.first_tokens[name]])
            full = (
                len(request.prompt_token_ids) + len(client.tokens) - 1
            ) // self.bench.runner.layout.block_size
            if not request.retain or client.ended == "error" or not client.tokens:
                assert told["retained", name] == 0
            elif client.ended in ("stop", "length"):
                assert told["retained", name] == (full > 0)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40)
