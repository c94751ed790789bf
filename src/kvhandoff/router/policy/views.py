"""What a policy may know: of the engines, of the request, and of its conversation. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy.costs import UNMEASURED, EngineCosts

TYPICAL_TOKENS = 512
"""A request of which nothing else is known is taken for one of so many tokens: one prefill chunk."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as a policy sees it."""

    url: str
    model: str
    healthy: bool
    block_size: int
    load: int
    """Tokens of the requests here: the prompts of legs that the router has reserved and not seen end, plus
    others' requests that the engine reported. For a prefill engine, those that it has yet to compute."""
    chosen: int
    """Legs that it was ever given; spreads requests over equally loaded engines."""
    waiting: int
    """Requests that have no blocks there yet, as it reported."""
    room: int
    """Blocks that an allocation could take, as it reported."""
    queue: int = 0
    """Prompt tokens to be computed here before those of a new request."""
    running: int = 0
    """Requests here: on a decode engine, those that a prompt computed there would hold up."""
    costs: EngineCosts = UNMEASURED
    """What it takes for its parts of a request, as far as it has been measured."""


class FleetView(msgspec.Struct, frozen=True):
    """The engines by role."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]
    tokens_per_byte: float = 1.0
    """How many tokens a byte of a prompt's text has been; 1 until measured: no text has more."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of a request."""

    model: str
    endpoint: Endpoint
    stream: bool
    prompts: int
    """Prompts in the body; completions may have several."""
    prompt_bound: int
    """The prompt has about this many tokens at most: its token ids, or the bytes of its text (a token has one
    at least); for a chat the bytes of its messages' JSON, whose roles and brackets stand for the template,
    and for a response those of its input and instructions."""
    prompt_exact: bool = False
    """The bound is the number of its token ids."""
    prompt_logprobs: bool
    """Log-probabilities of the prompt itself are asked for."""
    cache_salt: str


class History(NamedTuple):
    """What a decode engine keeps of the conversation."""

    holder: str
    """Its URL."""
    tokens: int
    """At most."""
    required: bool = False
    """It is fetched whatever that costs (`x-kvhandoff-return: on`)."""


def tokens_of(request: RequestSummary, fleet: FleetView) -> int:
    """The number of the prompt's tokens, as far as it is known before it is tokenized; 1 at least."""
    scale = 1.0 if request.prompt_exact else fleet.tokens_per_byte
    return max(1, round(request.prompt_bound * scale))


def usable(engines: Sequence[EngineView], model: str) -> list[EngineView]:
    """The healthy ones that serve the model: no policy chooses another."""
    return [engine for engine in engines if engine.healthy and engine.model == model]
