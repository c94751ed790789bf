"""What each side writes down about a request. The router joins the legs into one record."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhandoff.core.reasons import Reason

KVSource = Literal["transferred", "recomputed", "local"]


class LegRecord(msgspec.Struct, kw_only=True):
    """One engine's account of its leg of a request."""

    handoff_id: str
    attempt: int
    leg: str
    """`prefill`, `decode` or `local`; a newer engine may have others."""
    engine_id: str
    epoch: str
    phases: dict[str, float] = {}
    """Seconds by phase, up to the first token (decode, local) or the response (prefill)."""
    total_s: float = 0.0
    """From the request read to the response complete, on this engine's clock."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    transferred_tokens: int = 0
    """Prompt tokens whose KV came from the other engine, verified."""
    computed_tokens: int = 0
    """Prompt tokens this engine ran through the model."""
    completion_tokens: int = 0
    bytes: int = 0
    """Bytes read or written by the transfer, used or not; of a push, by the decode leg's account."""
    early_bytes: int = 0
    """Pushed: how many of them had landed before the prompt's last chunk was computed."""
    blocks: int = 0
    descriptors: int = 0
    prefill_chunks: int = 0
    grants: int = 0
    """Pushed: grants given to a writer."""
    write_chunks: int = 0
    """Pushed: transfers that the bytes came in."""
    first_token_reused: bool = False
    """The token that the prefill engine sampled is the answer's first."""
    retained_tokens: int = 0
    """Tokens kept for the conversation's next turn."""
    reasons: list[Reason] = []
    finish_reason: str | None = None
    traced: bool = False
    """The engine has given out spans of these phases itself."""

    @property
    def kv_source(self) -> KVSource:
        """Where the prompt's KV came from: the other engine, or this one, which was meant to compute it (or
        had it in its cache) or had to."""
        if self.transferred_tokens:
            return "transferred"
        meant_to = self.leg == "local" or Reason.ALREADY_CACHED in self.reasons
        return "local" if meant_to else "recomputed"


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /debug/kv` shows. `total` = free + cached + used + offered + loading + granted +
    quarantined."""

    total: int
    free: int
    """Never written, or content given up."""
    cached: int
    """Idle content that a later prompt may reuse, and that an allocation may take."""
    used: int
    """Held by running requests."""
    offered: int
    """Kept for other engines under a lease, retained ones included."""
    retained: int = 0
    """Those of `offered` that are kept for a conversation's next turn, and given up when memory is short."""
    loading: int
    """Targets of reads under way."""
    quarantined: int
    """Targets of given-up transfers that have no fence yet."""
    granted: int = 0
    """Named to a writer of a push."""


class EngineState(msgspec.Struct, kw_only=True):
    """What an engine tells the router at `GET /internal/state?after=CURSOR`."""

    engine_id: str
    epoch: str
    role: str
    """`prefill`, `decode` or `both`; the router uses no engine of another."""
    model: str
    """Name under which the model is served."""
    model_fingerprint: str
    max_model_len: int
    block_size: int
    control_address: str
    data_plane: str
    now: float
    """This engine's monotonic clock, read while answering."""
    running: int
    waiting: int
    loading: int
    blocks: BlockCounts
    records: list[LegRecord]
    """Legs that ended after the cursor, oldest first; a bounded history."""
    cursor: int
    """Pass it as `after` next time."""
    integration: Literal["embedded", "vllm"] = "embedded"
    progress: int | None = None
    """Model steps done in this life; with requests under way and this standing still, the engine is stuck.
    None: it does not count them."""
