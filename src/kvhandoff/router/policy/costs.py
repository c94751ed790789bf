"""What an engine takes for its parts of a request, learned from its accounts of legs (`LegRecord`).

Values: `learn` gives new costs. An unmeasured quantity has a prior, which only has to be in proportion to the
others: with nothing measured and nothing running, the cost model then decides as the simple rule does (more
than a block is handed over, more than a chunk is pushed).

The number of descriptors is no quantity of its own: for one layout it is in proportion to the bytes, so that
what each takes to post is in the measured seconds per byte.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kvhandoff.core.phases import Phase
from kvhandoff.core.records import LegRecord
from kvhandoff.router.policy.estimates import Estimate
from kvhandoff.router.policy.speed import Speed

MIN_TOKENS = 64
"""A leg that computed fewer says more of its fixed costs than of its speed, and a shorter prompt more of its
template than of its text."""


_PRIOR_SPEED = Speed.same(Estimate(1 / 2000))


class EngineCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's. Seconds, tokens and bytes."""

    compute_s: Speed = _PRIOR_SPEED
    """Per prompt token, by what stands before it. Prior: 2000 tokens/s, about what a 135M model does on two
    cores."""
    read_s: Estimate = Estimate(1 / 2e9)
    """Per byte that another engine's KV takes to get here. Prior: 2 GB/s, the low end of NIXL's measured raw
    copies on one host; a 25 Gbit/s network has 3."""
    token_bytes: Estimate = Estimate(100e3, above=1.0)
    """KV of a token. Prior: between the 23 kB of a 135M and the 128 kB of an 8B model in bf16."""
    pull_s: Estimate = Estimate(0.003)
    """What a read takes beyond its bytes: the rest of the claim, and taking the request up. Prior: the wait
    for the next step of a small model."""
    push_s: Estimate = Estimate(0.005)
    """The same of a write, from the last chunk computed: its commit, and taking the request up. Prior: as for
    a pull with its leg, so that a push wins by what it hides and by nothing else."""
    leg_s: Estimate = Estimate(0.002)
    """What a prefill leg that is waited for takes beyond the engine's computing, as the router sees it:
    network, response, binding, sending the next leg. Prior: two exchanges on one host."""


UNMEASURED = EngineCosts()


def learn(costs: EngineCosts, leg: LegRecord) -> EngineCosts:
    """The engine's costs after one more leg of its. What a leg doesn't show stays as it was."""
    phases = leg.phases
    if leg.computed_tokens >= MIN_TOKENS:
        computing = phases.get(Phase.PREFILL_COMPUTE if leg.leg == "prefill" else Phase.RECOMPUTE)
        if computing is not None:
            middle = leg.cached_tokens + leg.transferred_tokens + leg.computed_tokens / 2
            speed = costs.compute_s.observe(middle, computing / leg.computed_tokens)
            costs = replace(costs, compute_s=speed)
    if not leg.bytes or not leg.transferred_tokens:
        return costs
    costs = replace(costs, token_bytes=costs.token_bytes.observe(leg.bytes / leg.transferred_tokens))
    if Phase.RETURN in phases:
        return replace(costs, read_s=costs.read_s.observe(phases[Phase.RETURN] / leg.bytes))
    if Phase.WIRE in phases:
        moving = phases.get(Phase.POST, 0.0) + phases[Phase.WIRE]
        taken = phases.get(Phase.CLAIM, 0.0) + phases.get(Phase.DETECT, 0.0)
        return replace(
            costs, read_s=costs.read_s.observe(moving / leg.bytes), pull_s=costs.pull_s.observe(taken)
        )
    if Phase.WRITE_TAIL in phases:
        tail = phases[Phase.WRITE_TAIL] - (leg.bytes - leg.early_bytes) * costs.read_s.value
        return replace(costs, push_s=costs.push_s.observe(max(0.0, tail) + phases.get(Phase.DETECT, 0.0)))
    return costs


def learn_leg(costs: EngineCosts, phases: dict[str, float]) -> EngineCosts:
    """The prefill engine's costs after a pulled request with these phases, by the router's own account
    (`RequestRecord`): an engine doesn't see what its leg takes outside."""
    outside = (Phase.PREFILL_NETWORK, Phase.PREFILL_OFFER, Phase.BIND)
    return replace(
        costs, leg_s=costs.leg_s.observe(max(0.0, sum(phases.get(phase, 0.0) for phase in outside)))
    )
