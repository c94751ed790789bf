"""Where the time to the first token went.

A `PhaseTimer` cuts one engine's (or the router's) time into consecutive phases: each mark gives the time
since the last mark to one phase. Phases of one timer therefore add up to its span exactly, and no reading
of one machine's clock is compared with another's.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvhandoff.core.clock import Clock


class Phase(StrEnum):
    """In the order that requests meet them."""

    ROUTE = "route"
    """Router: read the request, choose the path, build the legs."""
    RETRY = "retry"
    """Router: attempts that came to nothing, and undoing them."""
    PREFILL_NETWORK = "prefill_network"
    """Prefill leg as the router sees it, minus what the prefill engine accounts for."""
    PREFILL_TOKENIZE = "prefill_tokenize"
    PREFILL_QUEUE = "prefill_queue"
    RETURN = "return"
    """Until the history's KV is in, from the decode engine that kept it."""
    PREFILL_COMPUTE = "prefill_compute"
    PREFILL_OFFER = "prefill_offer"
    """Prefill engine: from the last layer to the response with the offer."""
    BIND = "bind"
    """Router: choose the decode engine and send its leg."""
    DECODE_NETWORK = "decode_network"
    """Decode leg up to the first content, minus what the decode engine accounts for."""
    DECODE_TOKENIZE = "decode_tokenize"
    DECODE_QUEUE = "decode_queue"
    """Decode engine: until its blocks are allocated."""
    AWAIT_PREFILL = "await_prefill"
    """Pushed, decode engine: from its blocks being granted until the prefill engine had computed the
    prompt."""
    WRITE_TAIL = "write_tail"
    """Pushed: from there until the prefill engine's commit, on that engine's clock."""
    POST = "post"
    """Decode engine: until the transfer is posted."""
    WIRE = "wire"
    """The bytes moving."""
    CLAIM = "claim"
    """What the claim's answer took beyond the transfer: 0 when it came first."""
    DETECT = "detect"
    """From transfer and claim being both in to the engine running the request."""
    RECOMPUTE = "recompute"
    """Prompt computed on the decode engine: the tokens that were not transferred."""
    FIRST_STEP = "first_step"
    """Decode engine: from runnable to the first token given out."""


class PhaseTimer:
    """Consecutive phases of one clock, in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.started = self._last = clock()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: Phase) -> float:
        """Give the time since the last mark (or the start) to `phase`; returns now."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
        return now

    def for_nothing(self) -> None:
        """A router's: what the legs of this attempt took belongs to RETRY."""
        wasted = [self.seconds.pop(p, 0.0) for p in (Phase.PREFILL_NETWORK, Phase.BIND, Phase.DECODE_NETWORK)]
        self.seconds[Phase.RETRY] = self.seconds.get(Phase.RETRY, 0.0) + sum(wasted)

    @property
    def total(self) -> float:
        """Seconds between the start and the last mark; equals the sum of the phases."""
        return self._last - self.started


def cut(started: float, marks: Iterable[tuple[Phase, float | None]]) -> dict[str, float]:
    """Seconds by phase from readings of one clock taken here and there: each mark is when its phase ended.

    A mark that is missing, or earlier than one before it, takes no time: phases that ran side by side are
    charged to the one that ended last. The sum is the span from `started` to the latest mark.
    """
    seconds: dict[str, float] = {}
    last = started
    for phase, ended in marks:
        if ended is not None:
            seconds[phase] = max(0.0, ended - last)
            last = max(last, ended)
    return seconds
