"""Why a request did not take the path it might have taken: the one enum of metrics and records (rule 7)."""

from __future__ import annotations

from enum import StrEnum


class ReasonKind(StrEnum):
    """What a reason says about health. Autoscalers alarm on failures, never on declines or choices."""

    CHOICE = "choice"
    """The router chose so; nothing went wrong."""
    DECLINE = "decline"
    """The other side no longer has, or never had, what was asked for; recompute is the right answer."""
    FAILURE = "failure"
    """Something broke: a peer, the network, an engine."""


class Reason(StrEnum):
    """One cause each, so that one counter never mixes two."""

    # choices of the router
    FORCED = "forced"
    SHORT_PROMPT = "short_prompt"
    LOCAL_CHEAPER = "local_cheaper"
    NO_PREFILL_ENGINE = "no_prefill_engine"
    SEVERAL_PROMPTS = "several_prompts"
    SEVERAL_ANSWERS = "several_answers"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ALREADY_CACHED = "already_cached"
    CLIENT_ABORTED = "client_aborted"
    REBOUND = "rebound"
    RETURN_TOO_SHORT = "return_too_short"

    # declines
    OFFER_UNKNOWN = "offer_unknown"
    OFFER_EXPIRED = "offer_expired"
    OFFER_CONSUMED = "offer_consumed"
    OFFER_WITHDRAWN = "offer_withdrawn"
    CHAIN_MISMATCH = "chain_mismatch"
    EPOCH_CHANGED = "epoch_changed"
    OFFER_ABANDONED = "offer_abandoned"
    OFFER_GIVEN_UP = "offer_given_up"
    SOURCE_SHORT = "source_short"
    REVOKED = "revoked"
    QUEUE_TIMEOUT = "queue_timeout"
    INDEX_FOREIGN = "index_foreign"

    # failures
    LEASE_LAPSED = "lease_lapsed"
    CLAIM_TIMEOUT = "claim_timeout"
    READ_TIMEOUT = "read_timeout"
    PUSH_TIMEOUT = "push_timeout"
    COMMIT_MISMATCH = "commit_mismatch"
    FENCE_OVERDUE = "fence_overdue"
    QUARANTINE_GROWS = "quarantine_grows"
    TRANSFER_FAILED = "transfer_failed"
    HANDSHAKE_REFUSED = "handshake_refused"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    BAD_REFERENCE = "bad_reference"
    NO_DECODE_ENGINE = "no_decode_engine"
    PREFILL_FAILED = "prefill_failed"
    NO_REFERENCE = "no_reference"
    DECODE_FAILED = "decode_failed"
    INDEX_TIMEOUT = "index_timeout"
    INDEX_FAILED = "index_failed"
    SHUTDOWN = "shutdown"
    LIMITS_NOT_SHARED = "limits_not_shared"
    UNKNOWN = "unknown"
    """One of a newer version, which this one doesn't know."""

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        """What another process calls by a name that isn't here is a reason all the same: its message or its
        report stays usable, and what is counted by reason stays bounded."""
        return cls.UNKNOWN if isinstance(value, str) else None

    @property
    def kind(self) -> ReasonKind:
        """Whether this is a choice, a decline or a failure."""
        if self in _CHOICES:
            return ReasonKind.CHOICE
        return ReasonKind.DECLINE if self in _DECLINES else ReasonKind.FAILURE


_CHOICES = frozenset(
    {
        Reason.FORCED,
        Reason.SHORT_PROMPT,
        Reason.LOCAL_CHEAPER,
        Reason.NO_PREFILL_ENGINE,
        Reason.SEVERAL_PROMPTS,
        Reason.SEVERAL_ANSWERS,
        Reason.PROMPT_LOGPROBS,
        Reason.ALREADY_CACHED,
        Reason.CLIENT_ABORTED,
        Reason.REBOUND,
        Reason.RETURN_TOO_SHORT,
    }
)
_DECLINES = frozenset(
    {
        Reason.OFFER_UNKNOWN,
        Reason.OFFER_EXPIRED,
        Reason.OFFER_CONSUMED,
        Reason.OFFER_WITHDRAWN,
        Reason.CHAIN_MISMATCH,
        Reason.EPOCH_CHANGED,
        Reason.OFFER_ABANDONED,
        Reason.OFFER_GIVEN_UP,
        Reason.SOURCE_SHORT,
        Reason.REVOKED,
        Reason.QUEUE_TIMEOUT,
        Reason.INDEX_FOREIGN,
    }
)
