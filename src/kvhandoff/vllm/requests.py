"""What each request's load stands at with vLLM: `TABLE`, the one place that decides what vLLM is told of it.

vLLM's own rules, upheld by that table: a load is reported once, and only if its blocks were allocated; a
second report, or one of a request that vLLM has forgotten, ends the engine. What belongs to no state
(`allocated` when nothing was asked for) is an error of this package and raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvhandoff.core.chain import TokenChain
from kvhandoff.engine.api import KVRequest
from kvhandoff.vllm.leg import VllmLeg
from kvhandoff.vllm.shapes import Request


class LoadState(StrEnum):
    """Of a request that vLLM knows."""

    PLAIN = "plain"
    WANTED = "wanted"
    MISSED = "missed"
    ALLOCATED = "allocated"
    FENCING = "fencing"
    REPORTED = "reported"
    ENDED = "ended"


class LoadEvent(StrEnum):
    """What happens to it: the second and third come from the handoff side, the others from vLLM."""

    ALLOCATED = "allocated"
    LOADED = "loaded"
    MISSED = "missed"
    FENCED = "fenced"
    RAN = "ran"
    """It is in a step, and computes."""
    FINISHED = "finished"


class LoadAction(StrEnum):
    """What follows."""

    NONE = "none"
    LEND = "lend"
    """The awaited blocks are the handoff side's, until it says how the load went."""
    SKIP = "skip"
    """The handoff side hears that it isn't needed."""
    REPORT_LOADED = "report_loaded"
    REPORT_FAILED = "report_failed"
    REPORT_ENDED = "report_ended"
    ABANDON = "abandon"
    """The handoff side hears of the end, and keeps the blocks; vLLM's wait is ended."""
    RESUME = "resume"
    """The request computes the rest."""


_St, _Ev, _Do = LoadState, LoadEvent, LoadAction

TABLE: Mapping[tuple[LoadState, LoadEvent], tuple[LoadAction, LoadState]] = {
    # Nothing is loaded; what comes of a load comes late.
    (_St.PLAIN, _Ev.RAN): (_Do.NONE, _St.PLAIN),
    (_St.PLAIN, _Ev.LOADED): (_Do.NONE, _St.PLAIN),
    (_St.PLAIN, _Ev.MISSED): (_Do.NONE, _St.PLAIN),
    (_St.PLAIN, _Ev.FINISHED): (_Do.NONE, _St.ENDED),
    # vLLM waits for its blocks to be filled.
    (_St.WANTED, _Ev.ALLOCATED): (_Do.LEND, _St.ALLOCATED),
    # The prefix cache holds enough, or the prompt is computed anyway.
    (_St.WANTED, _Ev.RAN): (_Do.SKIP, _St.PLAIN),
    # Before there were blocks: it is not asked for any more.
    (_St.WANTED, _Ev.MISSED): (_Do.NONE, _St.MISSED),
    (_St.WANTED, _Ev.FINISHED): (_Do.NONE, _St.ENDED),
    # The miss came between the match and the allocation; the handoff side repeats it.
    (_St.MISSED, _Ev.ALLOCATED): (_Do.LEND, _St.ALLOCATED),
    (_St.MISSED, _Ev.RAN): (_Do.NONE, _St.PLAIN),
    (_St.MISSED, _Ev.MISSED): (_Do.NONE, _St.MISSED),  # repeated
    (_St.MISSED, _Ev.FINISHED): (_Do.NONE, _St.ENDED),
    (_St.ALLOCATED, _Ev.LOADED): (_Do.REPORT_LOADED, _St.REPORTED),
    (_St.ALLOCATED, _Ev.MISSED): (_Do.REPORT_FAILED, _St.REPORTED),  # vLLM gives it other blocks
    (_St.ALLOCATED, _Ev.FINISHED): (_Do.ABANDON, _St.ENDED),  # vLLM keeps the blocks until the report
    (_St.FENCING, _Ev.FENCED): (_Do.REPORT_FAILED, _St.REPORTED),
    (_St.FENCING, _Ev.MISSED): (_Do.NONE, _St.FENCING),  # repeated
    (_St.FENCING, _Ev.FINISHED): (_Do.REPORT_ENDED, _St.ENDED),
    (_St.REPORTED, _Ev.RAN): (_Do.RESUME, _St.PLAIN),
    (_St.REPORTED, _Ev.LOADED): (_Do.NONE, _St.REPORTED),  # late
    (_St.REPORTED, _Ev.MISSED): (_Do.NONE, _St.REPORTED),  # repeated
    (_St.REPORTED, _Ev.FENCED): (_Do.NONE, _St.REPORTED),
    # The report is on its way, or has been taken.
    (_St.REPORTED, _Ev.FINISHED): (_Do.NONE, _St.ENDED),
}
IN_PLACE: Mapping[tuple[LoadState, LoadEvent], tuple[LoadAction, LoadState]] = {
    # Nothing may land in the blocks any more first.
    (_St.ALLOCATED, _Ev.MISSED): (_Do.NONE, _St.FENCING),
}
"""Instead, where vLLM would compute a failed load's rest in the very blocks that it was to fill."""

_UNDER_WAY = frozenset({LoadState.WANTED, LoadState.ALLOCATED, LoadState.FENCING, LoadState.REPORTED})


@dataclass(slots=True)
class Tracked:
    """One request that vLLM has, from `on_new_request` to `request_finished`."""

    request: Request
    kv: KVRequest | None = None
    """None: a plain request."""
    leg: VllmLeg | None = None
    root: bytes = b""
    """What its token chain starts from."""
    ticket: str | None = None
    """As it came, of a request that obeys one."""
    refused: str | None = None
    """The code of the error that its answer carries: its ticket was not obeyed."""
    leader: Tracked | None = None
    """Of the sequences of one body (`n`), the first one loads the prompt; the others find it in the cache."""
    state: LoadState = LoadState.PLAIN

    local_tokens: int = 0
    """What vLLM's own cache had for it at the last look."""
    cached_blocks: int = 0
    blocks: list[int] = field(default_factory=list)
    """Loading: all blocks up to what the load can bring; then, of a growing offer, those of the last step."""
    awaited_tokens: int = 0
    """Loading: what it was allocated for, with the local ones."""
    loaded_tokens: int = 0
    """Of a load that came: how many leading tokens are in the blocks, verified."""
    fences: set[int] = field(default_factory=set)
    """FENCING: blocks that something may still land in."""

    offered_blocks: int = 0
    """Of a growing offer: handed over so far."""
    offers: bool = False
    """Whether it is still to make an offer, or to complete it."""
    preemptions: int = 0

    def want(self) -> None:
        """It is to load its prompt, or a beginning of it."""
        self.state = LoadState.WANTED

    def take(self, event: LoadEvent, *, in_place: bool = False) -> LoadAction:
        """Go to the next state. `in_place`: by `IN_PLACE` first. Raises ValueError for what can't happen."""
        row = (self.state, event)
        found = IN_PLACE.get(row) if in_place else None
        found = found or TABLE.get(row)
        if found is None:
            raise ValueError(f"request {self.request.request_id}: {event} in state {self.state}")
        action, self.state = found
        return action

    @property
    def chain(self) -> TokenChain | None:
        """The prompt's; None for a plain request."""
        return None if self.kv is None else self.kv.chain

    @property
    def targets(self) -> list[int]:
        """The blocks that a load is to fill."""
        return self.blocks[self.cached_blocks :]

    @property
    def lends(self) -> bool:
        """Whether vLLM waits for a report."""
        return self.state in (LoadState.ALLOCATED, LoadState.FENCING)

    @property
    def holds_load(self) -> bool:
        """Whether it has blocks for a load, and has not run since."""
        return self.lends or self.state is LoadState.REPORTED

    @property
    def load_under_way(self) -> bool:
        """Whether its prompt may still come from elsewhere, and is not in the prefix cache yet."""
        return self.state in _UNDER_WAY

    def external_tokens(self, local_tokens: int, block_size: int) -> int:
        """How many tokens a load could bring beyond `local_tokens` that the prefix cache has; 0 for too few.

        The prompt's last token is computed here in any case. What comes of a history are whole blocks.
        """
        kv = self.kv
        if kv is None or self.state is not LoadState.WANTED:
            return 0
        prompt = len(kv.prompt_token_ids)
        reach = prompt
        if kv.load_tokens is not None:
            reach = min(kv.load_tokens, prompt - 1) // block_size * block_size
        gain = min(reach, prompt - 1) - local_tokens
        return reach - local_tokens if gain >= max(kv.load_gain, 1) else 0
