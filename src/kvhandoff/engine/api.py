"""The seam between an engine and its handoff side, the same for every integration.

    engine  ──KVHooks───────▶  HandoffAgent      what is computed, allocated, lent, ended
    engine  ◀─EngineControl──  HandoffAgent      what has come in, what is given back

An *engine* is whatever schedules requests on a paged KV cache: the embedded engine's core, vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import BlockCounts, EngineState


@dataclass(slots=True)
class PrefillStats:
    """What the engine knows of a request's prompt when its first token is out. Times in its own clock.

    `prompt_tokens` = cached + transferred + computed: of a whole loaded prompt, the last token is computed,
    unless the token after it was reused.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    computed_tokens: int = 0
    prefill_chunks: int = 0
    admitted_at: float = 0.0
    """Blocks allocated (the first time, if preempted later)."""
    runnable_at: float = 0.0
    """For a load: when the engine thread took it up again; else admitted_at."""
    prefilled_at: float = 0.0
    """The step that computed the last prompt token ended; when the first token was reused: runnable_at."""
    first_token_reused: bool = False
    """The first token is what the engine that computed the prompt sampled; no step was needed for it."""
    preemptions: int = 0


@dataclass(slots=True)
class KVRequest:
    """The KV side of one sequence: what it is to load, to offer and to keep."""

    request_id: str
    prompt_token_ids: Sequence[int]
    _: KW_ONLY
    cache_salt: str = ""
    chain: TokenChain | None = None
    """The prompt's chain; computed by the engine when None."""
    load: bool = False
    """After admission ask the hooks for the prompt's KV, or a beginning of it, instead of computing it."""
    load_tokens: int | None = None
    """How many leading tokens a load can bring at most; None: all of the prompt."""
    load_gain: int = 1
    """With fewer tokens to gain over the prefix cache, or none, the load is skipped."""
    offer: bool = False
    """Prefill leg: after the last token hand the prompt's blocks to the hooks instead of freeing them."""
    grow: bool = False
    """With `offer`: hand over each chunk's full blocks as soon as they are computed."""
    retain: bool = False
    """When it ends after its first token, other than by an error, hand the full blocks of prompt and answer
    to the hooks."""
    stats: PrefillStats = field(default_factory=PrefillStats)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt has to be computed in any case, for its log-probabilities."""
        return False


class KVHooks(Protocol):
    """What the engine tells the handoff side. Called on the engine's thread; must not block."""

    def load_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        """`blocks` are the prompt's leading blocks, for all of its tokens or for those that the load can
        bring; the first `cached_blocks` hold content already, the rest await it.

        The rest now belong to the handoff side until it answers with `load_finished` (they are the request's
        again) or `load_failed` (the handoff side returns them through `release_blocks` once they are fenced;
        the engine allocates others). The engine answers with exactly one `load_allocated` or
        `load_skipped` for each request submitted with `load=True` that is not ended before.
        """
        ...

    def load_skipped(self, request_id: str) -> None:
        """The prefix cache holds all that a load could bring; the request runs on its own."""
        ...

    def load_abandoned(self, request_id: str) -> None:
        """The request ended while loading. The awaited blocks stay with the handoff side until it returns
        them through `release_blocks`; a later load_finished or load_failed for the request is ignored."""
        ...

    def offer_grown(self, request_id: str, blocks: Sequence[int]) -> None:
        """The next full blocks of a `grow=True` request are computed (or came from the prefix cache, or a
        load). One reference on each now belongs to the handoff side, which returns it through
        `release_blocks`."""
        ...

    def offer_abandoned(self, request_id: str) -> None:
        """A `grow=True` request lost its blocks (it was preempted) or ended before `offered`, whether or not
        it had grown. What was handed over stays with the handoff side. No `offer_grown` or `offered`
        follows."""
        ...

    def offered(self, request_id: str, blocks: Sequence[int], first_token: int) -> None:
        """The prompt of an `offer=True` request is computed, and the token after it sampled. One reference on
        each of `blocks` (the prompt's, in order, without those of `offer_grown`) now belongs to the handoff
        side, which returns it through `release_blocks`.

        Comes before the request's last `on_output`; a request that ends without it made no offer.
        """
        ...

    def retained(self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """A `retain=True` request has ended. `blocks` are the full blocks of prompt and answer, `hashes`
        their token chain's. One reference on each block now belongs to the handoff side, which returns it
        through `release_blocks`. Comes before the request's last `on_output`; not at all when no block is
        full."""
        ...

    def memory_short(self, blocks: int) -> None:
        """This many more blocks would have to be free: for the oldest waiting request, or to leave one for
        each request that may still grow. Blocks that are merely retained should be returned now. Called once
        a step while that is so."""
        ...


class EngineControl(Protocol):
    """What the handoff side may ask of the engine. Thread-safe, none blocks."""

    layout: KVLayout
    max_model_len: int
    """Tokens of prompt plus completion a request may have: the model's context or the pool, if smaller."""

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        ...

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain: ...
    def load_finished(self, request_id: str, tokens: int, first_token: int | None = None) -> None:
        """The first `tokens` prompt tokens' KV is in the request's blocks, verified. `first_token`: what the
        engine that computed the whole prompt sampled after it; given out as the answer's first token when
        `tokens` is the whole prompt and this engine would have sampled the same (greedy or seeded, no
        log-probabilities asked, no stop token; field case 40)."""
        ...

    def load_failed(self, request_id: str, reason: Reason) -> None:
        """Nothing was loaded; compute the prompt in other blocks."""
        ...

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Return the references that `offer_grown`, `offered`, `retained` or a failed or abandoned load left
        with the handoff side."""
        ...

    def load(self) -> dict[str, Any]:
        """`running`, `waiting`, `loading` requests, `blocks_total`, `blocks_free`, `blocks_cached`, and the
        model `steps` of this life."""
        ...


class HandoffSide(Protocol):
    """The handoff side as the router and the operator see it, over HTTP. Used on the asyncio thread only."""

    @property
    def healthy(self) -> bool:
        """Whether KV can be handed over; False for good once the data plane has ended."""
        ...

    def state(self, after: int) -> EngineState:
        """With the legs that ended after the cursor `after`."""
        ...

    def blocks(self) -> BlockCounts: ...
    def about(self) -> dict[str, str]:
        """What is in use here, for people: versions, data plane, layout, leases."""
        ...

    def withdraw(self, signed: object) -> None:
        """End an offer nobody will come for, or the leg that would make it. Raises BadTicket."""
        ...

    def yield_leg(self, signed: object) -> None:
        """End a decode leg so that another engine answers. Raises RequestError (409, `leg_begun`) when it has
        begun, or has taken the KV over; BadTicket."""
        ...

    def connect_peers(self, signed: object) -> None:
        """Handshake with peers ahead of the first request. Raises BadTicket."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text format."""
        ...
