"""Random schedules: vLLM's scheduler and the handoff side's thread in every order, with aborts, preemptions,
misses, late bytes and given-up offers.

The fake scheduler holds the connector to vLLM's rules (`fake_vllm.py`): nothing is computed from wrong KV, a
load is reported once and only if it was allocated, no block is freed twice. At the end every answer is the
one that the model gives alone, and every block is back.
"""

from __future__ import annotations

import random

import pytest

from kvhandoff.core.layout import KVLayout
from kvhandoff.vllm.scheduler_half import SchedulerHalf
from tests.vllm_plugin.fake_handoff import (
    FakeHandoff,
    descriptor,
    history_ref,
    offer_ref,
    signed,
)
from tests.vllm_plugin.fake_vllm import (
    BLOCK,
    FakePool,
    FakeRequest,
    FakeScheduler,
    Status,
    alone,
)

LAYOUT = KVLayout("fake", "float32", 1, 1, 1, BLOCK, BLOCK)
STEPS = 400
MAX_PROMPT = 26


class World:
    """One engine and chance."""

    def __init__(self, seed: int, *, reports_failures: bool, depth: int, blocks: int) -> None:
        self.rng = random.Random(seed)
        self.pool = FakePool(blocks)
        self.half = SchedulerHalf(self.pool, LAYOUT, "model", 1000, reports_failures=reports_failures)
        self.handoff = FakeHandoff(self.half, self.pool, seed)
        self.half.connect(self.handoff)
        self.vllm = FakeScheduler(self.half, self.pool, depth=depth)
        self.handoff.scheduler = self.vllm
        self.vllm.meanwhile = self.meanwhile
        self.count = 0
        self.expected: dict[str, list[int]] = {}
        self.seen: set[str] = set()
        """Names of what has happened, so that a run that tests nothing is noticed."""

    def one_event(self) -> None:
        kinds = {"step": 8, "thread": 8, "chance": 5, "add": 2, "abort": 0.4, "preempt": 0.3}
        match self.rng.choices(list(kinds), list(kinds.values()))[0]:
            case "step":
                self.vllm.step()
            case "thread":
                self.handoff.run(self.rng.randint(1, 4))
            case "chance":
                self.chance()
            case "add" if len(self.vllm.requests) < 8:
                self.add()
            case "abort" if self.vllm.requests:
                self.seen.add("abort")
                self.vllm.abort(self.rng.choice(list(self.vllm.requests.values())))
            case "preempt" if self.vllm.running:
                self.seen.add("preempt")
                self.vllm.preempt(self.rng.choice(self.vllm.running))

    def meanwhile(self) -> None:
        """Between two of vLLM's calls: the handoff side is a thread of its own."""
        if self.rng.random() < 0.1:
            self.handoff.run(self.rng.randint(1, 2))
        if self.rng.random() < 0.1:
            self.chance()

    def add(self) -> None:
        rng = self.rng
        self.count += 1
        salt = rng.choice(("", "tenant"))
        # Prompts share beginnings, so that the prefix cache has some of most of them.
        prompt = [rng.choice((1, 2)) * 100 + i // 8 for i in range(rng.randint(2, MAX_PROMPT))]
        kind = rng.choice(("plain", "pull", "push", "prefill", "grow", "local", "bad", "siblings"))
        ticket: str | None
        max_tokens = rng.randint(1, 6)
        history = history_ref(rng.randint(1, 30)) if rng.random() < 0.5 else None
        retain = rng.choice((None, "renewable"))
        if kind == "plain":
            ticket = None
        elif kind == "bad":
            ticket = "no.ticket"
        elif kind in ("pull", "siblings"):
            ticket = signed("decode", cache_salt=salt, offer=descriptor(len(prompt)), retain=retain)
        elif kind == "push":
            ticket = signed("decode", cache_salt=salt, push_from=offer_ref(), retain=retain)
        elif kind == "local":
            ticket = signed("local", cache_salt=salt, history=history, retain=retain)
        else:
            max_tokens = 1
            ticket = signed("prefill", cache_salt=salt, push=kind == "grow", history=history)
        for i in range(3 if kind == "siblings" else 1):
            request = FakeRequest(
                f"{self.count}.{i}",
                prompt,
                max_tokens,
                salt or None,
                None if ticket is None else {"ticket": ticket},
                skip_reading_prefix_cache=rng.random() < 0.05,
            )
            self.expected[request.request_id] = alone(prompt, max_tokens)
            self.vllm.add(request)

    def chance(self) -> None:
        """Something becomes of a load, or of an offer."""
        rng, handoff = self.rng, self.handoff
        if handoff.early and rng.random() < 0.3:
            load = rng.choice(sorted(handoff.early))
            fate = rng.choice(("missed", "yielded", "withdrawn"))
            self.seen.add(f"{fate} early")
            end = {"missed": handoff.miss, "yielded": handoff.yields, "withdrawn": handoff.withdraw}
            end[fate](load)
        if handoff.transfers:
            load = rng.choice(sorted(handoff.transfers))
            transfer = handoff.transfers[load]
            if not transfer.wanted:
                self.seen.add("late bytes")
                handoff.land(load)
                handoff.fence(load)
                return
            fate = rng.choice(("arrive", "arrive", "arrive", "part", "miss", "yield"))
            self.seen.add(fate)
            if fate == "arrive":
                handoff.arrive(load)
            elif fate == "part":
                most = len(transfer.blocks)
                blocks = rng.randint(transfer.cached_blocks, max(transfer.cached_blocks, most - 1))
                handoff.arrive(load, blocks * BLOCK)
            elif fate == "miss":
                handoff.miss(load)
            else:
                handoff.yields(load)
                if load in handoff.transfers and handoff.transfers[load].wanted:
                    raise AssertionError("a load that was given up is still wanted")
        if handoff.offers and rng.random() < 0.3:
            handoff.end_offer(rng.choice(handoff.offers))

    def settle(self) -> None:
        """Nothing new comes; all that is under way ends."""
        for _ in range(3000):
            self.handoff.run()
            for load in sorted(self.handoff.transfers):
                if self.handoff.transfers[load].wanted:
                    self.handoff.arrive(load)
                else:
                    self.handoff.fence(load)
            self.vllm.step()
            if self.vllm.idle and not self.handoff.tasks and not self.handoff.transfers:
                break
        self.handoff.give_up()

    def check(self) -> None:
        assert self.vllm.idle, f"these never end: {list(self.vllm.requests)}"
        for request in self.vllm.ended:
            expected = self.expected[request.request_id]
            if request.status is Status.FINISHED_ABORTED:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected
        load = self.half.load()
        assert (load["running"], load["waiting"], load["loading"]) == (0, 0, 0)
        assert load["blocks_free"] == load["blocks_total"], "blocks are lost"
        plain = FakeRequest("last", [7] * 5, 1)  # and once vLLM has taken them back, really
        self.vllm.add(plain)
        self.vllm.step()
        self.vllm.step()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert not self.handoff.early


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reports_failures", [True, False], ids=["0.32", "0.29"])
@pytest.mark.parametrize("blocks", [14, 60], ids=["short of memory", "roomy"])
def test_random_schedules(reports_failures: bool, depth: int, blocks: int) -> None:
    seen: set[str] = set()
    names: set[str] = set()
    for seed in range(40):
        world = World(seed, reports_failures=reports_failures, depth=depth, blocks=blocks)
        for _ in range(STEPS):
            world.one_event()
        world.settle()
        world.check()
        seen |= world.seen
        names |= {call[0] for call in world.handoff.calls}
    early = {"missed early", "yielded early", "withdrawn early"}
    assert seen == early | {"abort", "preempt", "late bytes", "arrive", "part", "miss", "yield"}
    assert names >= {
        "load_allocated",
        "load_skipped",
        "load_abandoned",
        "offer_grown",
        "offer_abandoned",
        "offered",
        "retained",
        "report",
    }
    if blocks == 14:
        assert "memory_short" in names
