"""The parts of vLLM's objects that the scheduler half reads: structural types with vLLM's names and meanings.
So everything but `connector.py` and `plugin.py` runs, and is tested, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """One block of vLLM's paged cache."""

    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """vLLM's pool. Its main thread's."""

    num_gpu_blocks: int
    """Including the null block, which holds nothing."""
    blocks: Sequence[Any]
    """All of them (`Block`), by id."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more reference on each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One reference less on each; those without any are re-issued, the first ones first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference, whether or not they hold content that a prompt may find again."""
        ...


class Named(Protocol):
    """A member of an enum."""

    @property
    def name(self) -> str: ...


class Request(Protocol):
    """One sequence, from its arrival to its end."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    prompt_is_token_ids: Any
    pooling_params: Any
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    kv_transfer_params: dict[str, Any] | None
    resumable: bool
    skip_reading_prefix_cache: bool
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    """Of the computed ones, those whose step hasn't come back."""
    num_preemptions: int

    @property
    def status(self) -> Named: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class NewRequest(Protocol):
    """A request in the first step of its (or, after a preemption, another) run."""

    req_id: str
    block_ids: tuple[list[int], ...]
    """By cache group."""


class CachedRequests(Protocol):
    """The requests that were in a step before, column by column."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    """Those whose `new_block_ids` are all of their blocks, not the added ones."""
    new_block_ids: list[tuple[list[int], ...] | None]


class SchedulerOutput(Protocol):
    """One step, before it runs."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
