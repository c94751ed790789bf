"""Names of engines, of their lives, and of handoffs."""

from __future__ import annotations

import os
import re
import secrets
from typing import NewType

import msgspec

from kvhandoff.core.errors import ConfigError

EngineId = NewType("EngineId", str)
Epoch = NewType("Epoch", str)
HandoffId = NewType("HandoffId", str)


class Identity(msgspec.Struct, frozen=True, order=True):
    """One life of one engine process. A restarted engine keeps its id and has another epoch."""

    engine_id: EngineId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.epoch}"


class HandoffKey(msgspec.Struct, frozen=True, order=True):
    """One attempt of one handoff; attempts count from 0."""

    handoff_id: HandoffId
    attempt: int

    def __str__(self) -> str:
        return f"{self.handoff_id}#{self.attempt}"


_NOT_IN_ENGINE_IDS = re.compile(r"[^A-Za-z0-9._:-]")


def check_engine_id(name: str, value: str) -> None:
    """Raises ConfigError for an id that would not stand out in lines of the log or in a URL. `name`: the
    setting, for the message."""
    if not value or _NOT_IN_ENGINE_IDS.search(value):
        allowed = "letters (a to z), digits, '.', '_', ':' and '-'"
        raise ConfigError(f"{name}: got {value!r}, allowed are {allowed}")


def engine_id_of(*parts: object) -> str:
    """An engine id made of what tells the engine from others; characters that no id has are replaced."""
    return _NOT_IN_ENGINE_IDS.sub("-", "-".join(map(str, parts)))


def new_epoch() -> Epoch:
    """A random id of this life of the process (64 bits)."""
    return Epoch(secrets.token_hex(8))


def new_handoff_id() -> HandoffId:
    """A random handoff id (96 bits). It is also the id of the response, behind `cmpl-` or `chatcmpl-`."""
    return HandoffId(os.urandom(12).hex())


def completion_id(handoff_id: str, *, chat: bool) -> str:
    """The `id` an OpenAI response carries for this handoff, the way vLLM builds it from X-Request-Id."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{handoff_id}"


def handoff_id_of(completion: str) -> HandoffId:
    """The handoff id inside a response's `id`; a bare handoff id is returned as it is."""
    return HandoffId(re.sub(r"^(chatcmpl-|cmpl-|resp_)", "", completion))
