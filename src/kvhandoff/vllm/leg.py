"""A request with a ticket on a vLLM engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvhandoff.core.reasons import Reason
from kvhandoff.engine.api import KVRequest
from kvhandoff.engine.legs import KVLeg


@dataclass(slots=True, kw_only=True)
class VllmKVRequest(KVRequest):
    """The KV side of a request of vLLM's."""

    prompt_logprobs: bool = False
    """vLLM then computes the whole prompt, whatever is in a cache."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """See `KVRequest`."""
        return self.prompt_logprobs


class VllmLeg(KVLeg):
    """Nobody inside the engine can end a request of vLLM's: whoever sent it closes the connection. Until then
    it is made to run on its own, so that nothing waits for KV that will not come (rule 3)."""

    def yields(self) -> bool:
        """See `KVLeg`."""
        if self.load is None or self.load.answered is not None:
            return False
        self._give_up_load(Reason.REBOUND, "another engine answers")
        return True

    def withdrawn(self) -> None:
        """See `KVLeg`."""
        if self.load is not None and self.load.answered is None:
            self._give_up_load(Reason.CLIENT_ABORTED, "withdrawn")

    def _give_up_load(self, reason: Reason, detail: str) -> None:
        """vLLM hears of it before the blocks that this frees come back; again if it is allocating now."""
        self._run_without(reason, detail)
        self.drop_load(done=False)
        self._awaited.on_missed(reason)

    def _run_without(self, reason: Reason, detail: str) -> None:
        """Also before it has blocks: vLLM then asks for no load at all."""
        self._host.core.load_failed(self._own.request_id, reason)
