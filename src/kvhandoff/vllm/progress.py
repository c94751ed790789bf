"""Which tokens of a prompt are computed for certain: a step counts when it has come back.

vLLM plans a step, the workers run it, its output comes back, under asynchronous scheduling one or more steps
later. Each step has a number, which goes to the workers with its metadata and comes back with its output;
what was planned for it is kept here in between. Used on vLLM's main thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvhandoff.vllm.requests import Tracked
from kvhandoff.vllm.shapes import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step does for one request's prompt."""

    tracked: Tracked
    preemptions: int
    """The request's count then: with another one now, the blocks are no longer its own."""
    computed: int
    """Tokens with KV once the step is done."""
    blocks: tuple[int, ...]
    """The request's, at least those that hold these tokens."""


class Progress:
    """Steps under way."""

    def __init__(self) -> None:
        self.step = 0
        """The last planned step's number; steps without tokens have none."""
        self._under_way: deque[tuple[int, list[Chunk]]] = deque()

    def planned(self, output: SchedulerOutput, tracked: Mapping[str, Tracked]) -> int:
        """A step is about to run. Returns its number; 0 for a step that computes nothing.

        To be called before vLLM advances `num_computed_tokens`.
        """
        if not output.num_scheduled_tokens:
            return 0
        self.step += 1
        self._note_blocks(output, tracked)
        chunks = [
            Chunk(
                one, one.request.num_preemptions, one.request.num_computed_tokens + count, tuple(one.blocks)
            )
            for request_id, count in output.num_scheduled_tokens.items()
            if (one := tracked.get(request_id)) is not None and _computes_prompt(one)
        ]
        if chunks:
            self._under_way.append((self.step, chunks))
        return self.step

    def done(self, step: int) -> Iterator[Chunk]:
        """The chunks of all steps up to this one that their requests still stand by."""
        while self._under_way and self._under_way[0][0] <= step:
            for chunk in self._under_way.popleft()[1]:
                if chunk.tracked.request.num_preemptions == chunk.preemptions:
                    yield chunk

    def _note_blocks(self, output: SchedulerOutput, tracked: Mapping[str, Tracked]) -> None:
        for new in output.scheduled_new_reqs:
            one = tracked.get(new.req_id)
            if one is not None and _computes_prompt(one):
                one.blocks = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            one = tracked.get(request_id)
            if one is not None and _computes_prompt(one) and added is not None:
                known = [] if request_id in cached.resumed_req_ids else one.blocks
                one.blocks = [*known, *added[0]]


def _computes_prompt(tracked: Tracked) -> bool:
    """Whether what it computes is of interest: of a leg, up to the prompt's end."""
    return tracked.kv is not None and not tracked.kv.stats.prefilled_at


def begin(tracked: Tracked, now: float) -> None:
    """A request begins to run: write down where its prompt's KV comes from, as far as it is there."""
    if tracked.kv is None or not _computes_prompt(tracked):
        return
    stats = tracked.kv.stats
    stats.runnable_at = now
    stats.cached_tokens = tracked.local_tokens
    loaded = min(tracked.loaded_tokens, stats.prompt_tokens - 1)  # the last one is computed in any case
    stats.transferred_tokens = max(0, loaded - tracked.local_tokens)
    stats.computed_tokens = stats.prompt_tokens - stats.cached_tokens - stats.transferred_tokens


def advance(tracked: Tracked, computed: int, now: float) -> None:
    """A step that computed some of its prompt has come back; with the last of it the first token has."""
    if tracked.kv is None or tracked.leg is None or not _computes_prompt(tracked):
        return
    stats = tracked.kv.stats
    stats.prefill_chunks += 1
    if computed >= stats.prompt_tokens:
        stats.prefilled_at = tracked.leg.first_token_at = now
