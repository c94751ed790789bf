"""When vLLM lacks blocks: what is merely kept for a next turn is given back, and what others only queue for
when the lack lasts.

vLLM doesn't say that it lacks any. It shows in a step's plan: a waiting request that was looked at and not
placed, one that has a beginning and doesn't go on, or fewer free blocks than requests that run and may each
need one. Used on vLLM's main thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.engine.api import KVHooks
from kvhandoff.vllm.references import BlockReferences
from kvhandoff.vllm.requests import LoadState, Tracked
from kvhandoff.vllm.shapes import BlockPool

PATIENCE_STEPS = 3
"""So many steps a running request goes without a block, rather than preempting another, while blocks that are
merely kept come back."""


class MemoryWatch:
    """Looks at every step."""

    def __init__(self, pool: BlockPool, references: BlockReferences, block_size: int) -> None:
        self._pool = pool
        self._references = references
        self._block_size = block_size
        self._waiting: dict[str, Tracked] = {}
        """Requests looked at since the last step, oldest first, and not placed."""
        self._running = 0
        self._patience = PATIENCE_STEPS
        self._lacking = False

    def looked_at(self, tracked: Tracked) -> None:
        """vLLM has looked for room for a waiting request."""
        self._waiting[tracked.request.request_id] = tracked

    def placed(self, request_id: str) -> None:
        """It has found room, or the request has ended."""
        self._waiting.pop(request_id, None)

    def planned(self, running: int, loads: Sequence[Tracked], hooks: KVHooks) -> None:
        """A step with so many requests is planned. `loads`: requests whose load is under way, or has ended
        and left them with what it brought, whether vLLM has heard of it yet or not; it doesn't look at those
        anew, and they lack what their blocks don't hold."""
        waiting, self._waiting = self._waiting, {}
        self._running = running
        self._patience = max(0, self._patience - 1) if self._lacking else PATIENCE_STEPS
        self._lacking = False
        if not self._references.blocks:
            return
        free = self._pool.get_num_free_blocks()
        short = running - free
        ended = [one for one in loads if one.state is LoadState.REPORTED]
        needs = [self._blocks(one.request.num_tokens) - len(one.blocks) for one in ended]
        if waiting:
            oldest = next(iter(waiting.values()))
            needs.append(self._blocks(oldest.request.num_tokens - oldest.local_tokens))
        if needs:
            short = max(needs) + running - free
        if waiting and not running and len(ended) == len(loads):
            # vLLM has just refused it: it also counts blocks that its own beginning takes from the free ones.
            # Nothing else will end and make room.
            short = max(short, 1)
        if short > 0:
            hooks.memory_short(short)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def lacking(self, hooks: KVHooks) -> bool:
        """A running request lacks a block. Whether to go without for this step: kept blocks may come."""
        self._lacking = True
        if not self._references.blocks or not self._patience:
            return False
        hooks.memory_short(max(1, self._running))
        return True
