"""What moving a decode leg takes: a leg that can be moved, an order to do so, and its coming about."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.router.deadline import Deadline
from kvhandoff.router.engine import Engine
from kvhandoff.router.policy import Path


class Rebound(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes on."""

    handoff_id: str
    attempt: int
    path: Path
    """`push` while the prefill leg goes on, `pull` when its offer is made."""
    decode: Identity


class Moved(Exception):
    """A decode leg was cut short, since an operator wants it elsewhere."""


@dataclass(slots=True)
class Bound:
    """A decode leg that has shown nothing yet."""

    engine: Engine
    deadline: Deadline
    """Of its first byte."""
    limit_s: float
    """How long that may take once nothing is to come of a prefill leg."""

    def alone(self) -> None:
        """The prefill leg has ended, so that from now on only this engine is waited for."""
        self.deadline.move(self.limit_s)

    def cut_short(self) -> None:
        """End the leg now; its connection is closed."""
        self.deadline.move(0)


@dataclass(slots=True)
class Move:
    """An order that is being carried out."""

    target: Engine
    done: asyncio.Future[Rebound | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """None: the answer came first, or the request ended."""

    def carried_out(self, key: HandoffKey, path: Path, engine: Identity) -> None:
        """The leg is about to be sent."""
        if not self.done.done():
            self.done.set_result(
                Rebound(handoff_id=key.handoff_id, attempt=key.attempt, path=path, decode=engine)
            )

    def overtaken(self) -> None:
        """Too late."""
        if not self.done.done():
            self.done.set_result(None)
