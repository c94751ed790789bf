"""What an engine takes for its parts of a request, learned from its accounts of legs (`LegRecord`).

Values: `learn` gives new costs. An unmeasured quantity has a prior, which only has to be in proportion to the
others: with nothing measured and nothing running, the cost model then decides as the simple rule does (more
than a block is handed over, more than a chunk is pushed).

The number of descriptors is no quantity of its own: for one layout it is in proportion to the bytes, so that
what each takes to post is in the measured seconds per byte.
"""

from __future__ import annotations

from collections.abc import Mapping

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


class EngineCosts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One engine's. Seconds, tokens and bytes. Each equals only itself, so that what follows from one is
    looked up at no cost."""

    compute_s: Speed = _PRIOR_SPEED
    """Per prompt token, by what stands before it. Prior: 2000 tokens/s, about what a 135M model does on two
    cores."""
    read_s: Estimate = Estimate(1 / 2e9)
    """Per byte that another engine's KV takes to get here. Prior: 2 GB/s, the low end of NIXL's measured raw
    copies on one host; a 25 Gbit/s network has 3."""
    token_bytes: Estimate = Estimate(100e3, above=1.0)
    """KV of a token. Prior: between the 23 kB of a 135M and the 128 kB of an 8B model in bf16."""
    pull_s: Estimate = Estimate(0.003)
    """What a read takes beyond its bytes: allocating blocks, the rest of the claim, and taking the request
    up. Prior: the wait for the next step of a small model."""
    push_s: Estimate = Estimate(0.003)
    """The same of a write: allocating its blocks, and from the last chunk computed its commit and taking the
    request up. Prior: as for a pull, so that a push wins by what it hides and by nothing else."""
    leg_s: Estimate = Estimate(0.002)
    """What a prefill leg that is waited for takes beyond the engine's computing, as the router sees it:
    network, tokenizing, response, binding, sending the next leg. Prior: two exchanges on one host."""
    beside_s: Estimate = Estimate(0.002)
    """What a prefill leg beside the decode leg takes beyond the engine's computing, as the decode engine sees
    it: from its blocks being granted to the prompt being computed. Prior: as for the other."""


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
        taken = _sum(phases, Phase.DECODE_QUEUE, Phase.CLAIM, Phase.DETECT)
        return replace(
            costs, read_s=costs.read_s.observe(moving / leg.bytes), pull_s=costs.pull_s.observe(taken)
        )
    if Phase.WRITE_TAIL in phases:
        tail = phases[Phase.WRITE_TAIL] - (leg.bytes - leg.early_bytes) * costs.read_s.value
        taken = max(0.0, tail) + _sum(phases, Phase.DECODE_QUEUE, Phase.DETECT)
        return replace(costs, push_s=costs.push_s.observe(taken))
    return costs


def learn_leg(
    costs: EngineCosts, phases: Mapping[str, float], beside: Mapping[str, float] | None = None
) -> EngineCosts:
    """The prefill engine's costs after a handed over request with these phases, by the router's own account
    (`RequestRecord`): an engine doesn't see what its leg takes outside. `beside`: the leg's own phases, when
    the request was pushed; of two engines' clocks only durations are compared."""
    if beside is None:
        outside = _sum(phases, Phase.PREFILL_NETWORK, Phase.PREFILL_TOKENIZE, Phase.PREFILL_OFFER, Phase.BIND)
        return replace(costs, leg_s=costs.leg_s.observe(max(0.0, outside)))
    waited = _sum(phases, Phase.AWAIT_PREFILL)
    computing = _sum(beside, Phase.PREFILL_QUEUE, Phase.RETURN, Phase.PREFILL_COMPUTE)
    return replace(costs, beside_s=costs.beside_s.observe(max(0.0, waited - computing)))


def _sum(phases: Mapping[str, float], *names: Phase) -> float:
    return sum(phases.get(name, 0.0) for name in names)
