"""What a request leaves to others: an offer of its prompt, and the turn that is kept for the next one.

Blocks are lent by a reference on each, while the request still has them. Used on vLLM's main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvhandoff.core.chain import TokenChain, next_hash
from kvhandoff.engine.api import KVRequest
from kvhandoff.engine.offering import descriptor_of
from kvhandoff.vllm.leg import VllmLeg
from kvhandoff.vllm.references import BlockReferences
from kvhandoff.vllm.requests import Tracked
from kvhandoff.vllm.side import Side

PROMPT_IS_COMPUTED = frozenset({"FINISHED_STOPPED", "FINISHED_REPETITION", "FINISHED_LENGTH_CAPPED"})
"""Ends, by vLLM's names, that a request comes to by generating tokens."""


def grow(tracked: Tracked, computed: int, blocks: Sequence[int], to: Side, lent: BlockReferences) -> None:
    """Hand over the prompt's next full blocks, of an offer that grows. `computed` tokens are in `blocks`."""
    kv, chain = tracked.kv, tracked.chain
    if kv is None or chain is None or not kv.grow or not tracked.offers:
        return
    full = min(computed // chain.block_size, len(chain.blocks))
    grown = list(blocks[tracked.offered_blocks : full])
    if grown:
        tracked.offered_blocks = full
        lent.take(grown)
        to.hooks.offer_grown(kv.request_id, grown)


def abandon(tracked: Tracked, to: Side) -> None:
    """The offer will not be made, or not be completed."""
    kv = tracked.kv
    if kv is not None and kv.grow and tracked.offers:
        tracked.offers = False
        to.hooks.offer_abandoned(kv.request_id)


def end(
    tracked: Tracked, leg: VllmLeg, blocks: Sequence[int], to: Side, lent: BlockReferences
) -> dict[str, Any] | None:
    """The leg's request has ended; `blocks` hold its computed tokens. Returns what its answer carries."""
    request, kv, chain = tracked.request, tracked.kv, tracked.chain
    assert kv is not None, "a leg has it"
    assert chain is not None, "a leg's request has it"
    computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
    sampled = bool(request.output_token_ids)
    answer: dict[str, Any] | None = None
    if leg.role == "prefill":
        answer = {"offer": None, "prompt_token_ids": list(kv.prompt_token_ids)}
    complete = sampled and request.status.name in PROMPT_IS_COMPUTED and computed >= chain.n_tokens
    if tracked.offers and complete and answer is not None:
        answer["offer"] = _offer(tracked, kv, chain, leg, blocks, to, lent)
    abandon(tracked, to)
    if kv.retain and sampled and request.status.name != "FINISHED_ERROR":
        # The last token was sampled, and is in no block.
        tokens = min(computed, len(request.all_token_ids) - 1)
        _retain(tracked, kv, chain, blocks[: tokens // chain.block_size], to, lent)
    return answer


def _offer(
    tracked: Tracked,
    kv: KVRequest,
    chain: TokenChain,
    leg: VllmLeg,
    blocks: Sequence[int],
    to: Side,
    lent: BlockReferences,
) -> Any:
    tracked.offers = False
    mine = list(blocks[: chain.n_blocks])
    rest = mine[tracked.offered_blocks :]
    lent.take(rest)
    cached = kv.stats.cached_tokens + kv.stats.transferred_tokens
    first_token = tracked.request.output_token_ids[0]
    offer = descriptor_of(to.host, leg.key, chain, mine, first_token, cached)
    to.hooks.offered(kv.request_id, rest, first_token)
    return msgspec.to_builtins(offer)


def _retain(
    tracked: Tracked,
    kv: KVRequest,
    chain: TokenChain,
    full: Sequence[int],
    to: Side,
    lent: BlockReferences,
) -> None:
    if not full:
        return
    size, hashes = chain.block_size, list(chain.blocks)
    tokens = tracked.request.all_token_ids
    for start in range(len(hashes) * size, len(full) * size, size):
        previous = hashes[-1] if hashes else tracked.root
        hashes.append(next_hash(previous, tokens[start : start + size]))
    lent.take(full)
    to.hooks.retained(kv.request_id, hashes[: len(full)], list(full))
