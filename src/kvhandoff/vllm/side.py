"""The handoff side as the scheduler half sees it: whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvhandoff.engine.api import KVHooks
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.vllm.leg import VllmLeg


class Side(Protocol):
    """Thread-safe, and nothing blocks."""

    @property
    def hooks(self) -> KVHooks: ...
    @property
    def host(self) -> LegHost: ...

    def admit(self, signed: object) -> Ticket:
        """The ticket to a leg. Raises BadTicket."""
        ...

    def refused(self) -> None:
        """A ticket was not obeyed: count it."""
        ...

    def enter(self, leg: VllmLeg) -> bool:
        """vLLM has the leg's request. False: the handoff side has ended, and does nothing for it."""
        ...

    def finish(self, leg: VllmLeg, finish_reason: str, completion_tokens: int) -> None:
        """vLLM is done with the leg's request. Behind all the hooks' calls for it."""
        ...

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        """Have every worker tell vLLM that the load has ended. Once per load."""
        ...
