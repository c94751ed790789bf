"""The seams inside the embedded engine.

    server (asyncio thread)  ──Leg.submit───▶  agent (asyncio thread)
    agent   ──submit/abort/load_finished/…──▶  EngineCore (engine thread)  ──forward──▶  ModelRunner
    agent   ◀──KVHooks───────────────────────  EngineCore

No torch in this file: the server, the agent and their tests import it without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvhandoff.core.errors import RequestError
from kvhandoff.core.layout import KVLayout
from kvhandoff.engine.api import EngineControl, HandoffSide, KVRequest

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
class EngineRequest(KVRequest):
    """One sequence for the engine."""

    params: SamplingParams
    on_output: Callable[[TokenOutput], None]
    """Called on the engine thread, once per token; must not block."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """See `KVRequest`."""
        return self.params.prompt_logprobs is not None


class Engine(EngineControl, Protocol):
    """What others may ask of the engine core. Thread-safe, none blocks."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError at once for one that can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; it gets a last output with finish_reason `abort`. Unknown: no-op."""
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


class Agent(HandoffSide, Protocol):
    """The engine's handoff side, as the server sees it. Used on the asyncio thread only."""

    def leg(self, kv_transfer_params: object | None) -> Leg:
        """Open a leg; call it when the request has been read. None: a plain request, served alone.

        Raises BadTicket for anything but a ticket this engine may obey now.
        """
        ...
