"""What the paths of a request take in truth, played chunk by chunk: what a cost model is held against.

It knows nothing of the router's formulas. Engines report what they did, disturbed, as real ones do; what a
policy makes of these accounts is compared with what each path would have taken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from kvhandoff.core.records import LegRecord
from kvhandoff.router.policy import UNMEASURED, EngineCosts, EngineView, learn, learn_leg

CHUNK = 512
BLOCK = 16
OTHERS_TOKENS = 500
"""Of each prompt that stands in a queue."""

Order = Literal["local", "pull", "push", "push in sequence"]
"""The last one is what a router does that sends a push's legs one after the other."""


@dataclass(frozen=True)
class Machine:
    """Engines and the network between them. Seconds, bytes, tokens."""

    name: str
    compute_s: float
    """To compute one prompt token."""
    byte_s: float
    token_bytes: float
    leg_s: float
    """Of a prefill leg that is waited for, beside computing."""
    pull_s: float
    """Of a read, beside its bytes."""
    push_s: float
    """Of a write, from its last byte on."""

    def ttft(self, order: Order, tokens: int, p_queue: int, d_queue: int = 0) -> float:
        """Seconds to the first token, with so many others in line at each engine."""
        if order == "local":
            return (d_queue * OTHERS_TOKENS + tokens) * self.compute_s
        moved = tokens // BLOCK * BLOCK
        rest = self._rest(tokens) * self.compute_s
        now = p_queue * OTHERS_TOKENS * self.compute_s
        landed = now
        for start in range(0, tokens, CHUNK):
            end = min(start + CHUNK, tokens)
            now += (end - start) * self.compute_s
            landed = max(now, landed) + (min(end, moved) - min(start, moved)) * self.token_bytes * self.byte_s
        wire = moved * self.token_bytes * self.byte_s
        if order == "push":
            return landed + self.push_s + rest
        beyond = self.pull_s if order == "pull" else self.push_s
        return now + self.leg_s + wire + beyond + rest

    @staticmethod
    def _rest(tokens: int) -> int:
        """What the decode engine computes after a handover: the last block's part, one token at least."""
        return max(1, tokens % BLOCK)

    def harm(self, order: Order, tokens: int, running: int) -> float:
        """Seconds by which the decode engine's requests get their next tokens later while it computes; one is
        assumed at least, as the documentation says."""
        there = tokens if order == "local" else self._rest(tokens)
        return there * self.compute_s * max(1, running)

    def cost(self, order: Order, tokens: int, p_queue: int, running: int) -> float:
        """What the choice of a path is about."""
        return self.ttft(order, tokens, p_queue) + self.harm(order, tokens, running)

    def learned(self, seed: int = 1, legs: int = 200) -> EngineCosts:
        """What engines' accounts of legs of all paths teach, each a fifth more or less than the truth."""
        rng = random.Random(seed)
        costs = UNMEASURED

        def about(seconds: float) -> float:
            return seconds * rng.uniform(0.8, 1.2)

        for number in range(legs):
            tokens = rng.randrange(64, 8000)
            moved, last = tokens * self.token_bytes, min(tokens, CHUNK) * self.token_bytes
            computing = about(tokens * self.compute_s)
            costs = learn(costs, _leg("prefill", {"prefill_compute": computing}, computed_tokens=tokens))
            if number % 2:
                costs = learn_leg(costs, {"prefill_network": about(self.leg_s)})
                phases = {"post": 0.0, "wire": about(moved * self.byte_s), "detect": about(self.pull_s)}
                early = 0.0
            else:
                awaited = {"await_prefill": computing + self.push_s / 4}
                costs = learn_leg(costs, awaited, {"prefill_compute": computing})
                phases = {"write_tail": about(last * self.byte_s), "detect": about(self.push_s * 3 / 4)}
                early = moved - last
            leg = _leg(
                "decode", phases, transferred_tokens=tokens, bytes=round(moved), early_bytes=round(early)
            )
            costs = learn(costs, leg)
        return costs

    def engine(self, url: str, costs: EngineCosts, **fields: Any) -> EngineView:
        """One of its engines, as the router sees it."""
        usual = {"model": "m", "healthy": True, "block_size": BLOCK, "load": 0, "chosen": 0, "waiting": 0}
        return EngineView(url=url, costs=costs, **({"room": 10**6} | usual | fields))


def _leg(role: str, phases: dict[str, float], **fields: Any) -> LegRecord:
    return LegRecord(handoff_id="h", attempt=0, leg=role, engine_id="e", epoch="1", phases=phases, **fields)


MACHINES = (
    Machine("a small model on two cores", 1 / 2000, 1 / 2e9, 23e3, 0.002, 0.003, 0.005),
    Machine("an 8B model on GPUs, 25 Gbit/s", 1 / 20_000, 1 / 3e9, 128e3, 0.004, 0.004, 0.004),
    Machine("the same, one Gbit/s", 1 / 20_000, 1 / 1.2e8, 128e3, 0.004, 0.004, 0.004),
    Machine("the same, 400 Gbit/s", 1 / 20_000, 1 / 45e9, 128e3, 0.003, 0.002, 0.003),
    Machine("one whose writes are slow to be seen", 1 / 20_000, 1 / 45e9, 128e3, 0.003, 0.002, 0.3),
)
