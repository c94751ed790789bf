"""The seams inside the embedded engine.

    server (asyncio thread)  ──Leg.submit───▶  agent (asyncio thread)
    agent   ──submit/abort/load_finished/…──▶  EngineCore (engine thread)  ──forward──▶  ModelRunner
    agent   ◀──KVHooks───────────────────────  EngineCore

No torch in this file: the server, the agent and their tests import it without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.errors import RequestError
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import BlockCounts, EngineState

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names, ranges and meanings are vLLM's."""

    max_tokens: int = 16
    min_tokens: int = 0
    """EOS and stop tokens are masked until this many tokens are out."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many top alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen (or given, for prompts) token's log-probability and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token, or the end of the request without one (`token_id` None)."""

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """With the first token, when asked for; the first prompt token has None."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The EOS or stop token that ended it; it is not part of the text."""
    error: RequestError | None = None
    """With finish_reason `error`: what the client is told."""


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
class EngineRequest:
    """One sequence for the engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    on_output: Callable[[TokenOutput], None]
    """Called on the engine thread, once per token; must not block."""
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


class KVHooks(Protocol):
    """What the engine core asks of the handoff side. Called on the engine thread; must not block."""

    def load_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        """`blocks` are the prompt's blocks, ceil(prompt_tokens / block_size) of them; the first
        `cached_blocks` hold content already, the rest await it.

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
    """What others may ask of the engine core. Thread-safe, none blocks."""

    layout: KVLayout
    max_model_len: int
    """Tokens of prompt plus completion a request may have: the model's context or the pool, if smaller."""

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        ...

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain: ...
    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError at once for one that can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; it gets a last output with finish_reason `abort`. Unknown: no-op."""
        ...

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
        """`running`, `waiting`, `loading` requests, and `blocks_total`, `blocks_free`, `blocks_cached`."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one sequence does in one forward step."""

    token_ids: Sequence[int]
    """New tokens, one or more."""
    start: int
    """Position of the first new token: this many tokens have KV in the blocks already."""
    block_table: Sequence[int]
    """At least ceil((start + len(token_ids)) / block_size) blocks."""
    logits: Literal["last", "all"] | None
    """Which new tokens' logits are wanted."""


class ModelRunner(Protocol):
    """Runs the model on the pool's memory. Single-threaded: the engine thread's."""

    layout: KVLayout
    model_fingerprint: str
    """Equal on two engines only when the same tokens give the same KV: the model's part of every chain."""
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]

    def forward(self, steps: Sequence[SequenceStep]) -> list[Any]:
        """Write the new tokens' KV into their blocks; per step the wanted logits as a float32 tensor
        `[rows, vocab_size]` (1 row for `last`), or None."""
        ...


class Leg(Protocol):
    """One HTTP request's KV side, as the server sees it. Used on the asyncio thread only.

    Calls come in this order: `tokenized`, `submit` once, `submit_sibling` (n > 1), `first_token`, `finished`.
    `finished` comes exactly once, whatever happens, also when nothing else did.
    """

    handoff_id: str
    """What the response's `id` is made of."""
    role: Literal["prefill", "decode", "local"]
    """A `prefill` leg computes one token, never streams, and answers with `response_params`."""
    prompt_token_ids: Sequence[int] | None
    """Decode leg: the prefill engine's token ids, to be used instead of tokenizing again."""
    cache_salt: str | None
    """The router's salt; overrides the body's. None: no router, the body's counts."""

    def tokenized(self) -> None:
        """The prompt's token ids are known."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Hand the (first) sequence to the engine with this leg's load or offer. Raises RequestError."""
        ...

    def submit_sibling(self, request: EngineRequest) -> None:
        """Another sequence of the same prompt (n > 1), submitted once the first one has its first token, so
        that it finds the prompt in the prefix cache. Raises RequestError."""
        ...

    def abort(self, request_id: str) -> None:
        """End one sequence, e.g. at a stop string."""
        ...

    def first_token(self) -> None:
        """The first token is about to be given out."""
        ...

    def cached_tokens(self) -> int:
        """What usage reports as `prompt_tokens_details.cached_tokens`: what a single engine would say."""
        ...

    async def response_params(self) -> dict[str, Any] | None:
        """Prefill leg: `{"offer": OfferDescriptor | None, "prompt_token_ids": [...]}` as JSON-able values."""
        ...

    def finished(self, finish_reason: str | None, completion_tokens: int) -> None:
        """The response is complete or given up; still running sequences of this leg are aborted."""
        ...


class Agent(Protocol):
    """The engine's handoff side, as the server sees it. Used on the asyncio thread only."""

    def leg(self, kv_transfer_params: object | None) -> Leg:
        """Open a leg; call it when the request has been read. None: a plain request, served alone.

        Raises BadTicket for anything but a ticket this engine may obey now.
        """
        ...

    def state(self, after: int) -> EngineState: ...
    def blocks(self) -> BlockCounts: ...
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
