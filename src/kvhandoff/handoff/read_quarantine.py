"""Blocks that a read has let go of while its transfer was in flight: they are not used again before its
fence, which is the transfer's own report that it has landed or failed (*no use after free*).

A source whose fence is overdue (`fence_s`) gets no more reads: one that is silent would get ever more blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.events import Effect, FreeBlocks, Noted


@dataclass(slots=True)
class _Entry:
    source: Identity
    blocks: tuple[int, ...]
    overdue_at: float
    overdue: bool = False


class ReadQuarantine:
    """Those of one engine, by the reads that they were targets of. Times are on the engine's own clock."""

    def __init__(self, fence_s: float) -> None:
        self._fence_s = fence_s
        self._entries: dict[HandoffKey, _Entry] = {}

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._entries

    def blocks(self) -> list[int]:
        """All of them."""
        return [block for entry in self._entries.values() for block in entry.blocks]

    def owed_by(self, source: Identity, *, overdue: bool = False) -> bool:
        """Whether a transfer from `source` has no fence yet; `overdue`: for too long."""
        return any(e.source == source and (e.overdue or not overdue) for e in self._entries.values())

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return min((e.overdue_at for e in self._entries.values() if not e.overdue), default=None)

    def add(self, now: float, key: HandoffKey, source: Identity, blocks: tuple[int, ...]) -> None:
        """The read has ended, its transfer has not."""
        self._entries[key] = _Entry(source, blocks, now + self._fence_s)

    def fenced(self, key: HandoffKey) -> list[Effect]:
        """The transfer has ended, if it was one of these."""
        entry = self._entries.pop(key, None)
        return [] if entry is None else [FreeBlocks(entry.blocks)]

    def tick(self, now: float) -> list[Effect]:
        """Note what is overdue, once."""
        effects: list[Effect] = []
        for key, entry in self._entries.items():
            if not entry.overdue and now >= entry.overdue_at:
                entry.overdue = True
                detail = f"{len(entry.blocks)} blocks, from {entry.source}"
                effects.append(Noted(key, Reason.FENCE_OVERDUE, detail))
        return effects
