"""What an engine is, for the whole of its life."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhandoff.core.ids import EngineId, Epoch, Identity, new_epoch


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change during an engine's life."""

    engine_id: str
    role: Literal["prefill", "decode", "both"]
    model: str
    """Name under which the model is served."""
    model_fingerprint: str
    num_blocks: int
    processes: tuple[str, ...] = ()
    """All that move its blocks, by `liveness.this_process`; none: this one does."""
    integration: Literal["embedded", "vllm"] = "embedded"
    about: dict[str, str] = {}
    """What people want to know of it: versions, settings."""
    epoch: str = msgspec.field(default_factory=new_epoch)

    @property
    def identity(self) -> Identity:
        """This life of this engine."""
        return Identity(EngineId(self.engine_id), Epoch(self.epoch))
