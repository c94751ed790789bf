"""What the engine keeps of one request: its tokens, its blocks, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvhandoff.embedded.api import EngineRequest


class Stage(Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between `add` and `end`."""

    request: EngineRequest
    arrival: int
    """Counts requests; the smaller, the older."""
    root: bytes
    """What the request's token chain starts from."""
    hashes: list[bytes]
    """One per full block of `tokens`."""
    tokens: list[int]
    """The prompt and what was generated."""
    stage: Stage = Stage.WAITING
    load_wanted: bool = False
    """The hooks have not been told of the load yet."""
    offers: bool = False
    """The prompt's blocks are still to be offered."""
    offered_blocks: int = 0
    """How many leading blocks a growing offer has been given."""
    admitted: bool = False
    """Has been admitted before."""
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    """How many leading blocks came from the prefix cache."""
    computed: int = 0
    """How many leading tokens have their KV in `blocks`."""
    published: int = 0
    """How many leading blocks have been published, or came from the prefix cache."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated(self) -> int:
        """How many tokens have been generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def offer_grows(self) -> bool:
        """Whether blocks are offered as soon as they are full."""
        return self.offers and self.request.grow

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every prompt position must be computed here, for its logits."""
        return self.request.params.prompt_logprobs is not None and self.generated == 0

    @property
    def final_kv_tokens(self) -> int:
        """Tokens whose KV it can need at most; the last token's KV is never needed."""
        return self.prompt_tokens + self.request.params.max_tokens - 1
