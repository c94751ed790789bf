"""References on vLLM's blocks that the handoff side holds: lent by `touch`, given back by `free_blocks`.

A block that has a reference is not re-issued (rule 2: no use after free). So an offer, a turn that is kept
and a given-up load's targets outlive their request by nothing but a reference, and vLLM frees what is its own
at once: no request's free is ever delayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvhandoff.vllm.shapes import BlockPool


class BlockReferences:
    """All references of one engine's handoff side. vLLM's main thread's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: Counter[int] = Counter()

    @property
    def blocks(self) -> int:
        """Blocks with at least one reference."""
        return len(self._held)

    def take(self, blocks: Sequence[int]) -> None:
        """One more reference on each; they hold or await content of a request that has them."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._held.update(blocks)

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """One reference less on each. The last ones are re-issued first: what begins a chain is worth most.

        Returns those without a reference: nothing is done to them, since a second release would take them
        from an owner.
        """
        strangers, ours = [], []
        for block in reversed(blocks):
            if self._held[block] == 0:
                strangers.append(block)
                continue
            self._held[block] -= 1
            if self._held[block] == 0:
                del self._held[block]
            ours.append(self._pool.blocks[block])
        self._pool.free_blocks(ours)
        return strangers

    def idle_without(self, blocks: Iterable[int]) -> int:
        """How many blocks would be free if these references were given back. Any thread."""
        counts = Counter(blocks)
        return sum(self._pool.blocks[block].ref_cnt == count for block, count in counts.items())
