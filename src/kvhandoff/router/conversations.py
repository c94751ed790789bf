"""Which decode engine keeps what of which conversation: metadata only, bounded, and no more than a hint.

A conversation is found again by what the client calls it, or else by its messages: a turn is remembered under
a fingerprint of the messages that it was asked with, and a later turn of an unchanged client repeats these at
its beginning. The longest beginning that is known wins, so that an edited or branched conversation finds the
last turn that it still shares. Names hold the cache salt, so that no tenant meets another's (field case 61);
and whatever is found, engines compare token chains before a byte is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import msgspec

from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router.body import Fields, read_text
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")

HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")
"""Headers by which clients name a conversation (case doesn't matter)."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a turn's conversation is called."""

    explicit: bytes | None
    """From the client's own name for it."""
    messages: tuple[bytes, ...] = ()
    """Fingerprints of a chat's messages: of the first one, of the first two, … of all."""

    def __bool__(self) -> bool:
        """Whether a later turn could find this one."""
        return self.explicit is not None or bool(self.messages)

    def of_this_turn(self) -> Iterable[bytes]:
        """What it is remembered under."""
        yield from self.messages[-1:]
        if self.explicit is not None:
            yield self.explicit

    def of_former_turns(self) -> Iterable[bytes]:
        """What a former turn may be found under, the one that shares most first. A client may give several
        conversations one name (`prompt_cache_key`), or each request another, so its messages say more."""
        yield from reversed(self.messages[:-1])
        if self.explicit is not None:
            yield self.explicit


def names_of(fields: Fields, headers: Mapping[str, str], summary: RequestSummary) -> Names:
    """The names of a request's conversation."""
    given = [read_text(fields, "conversation_id")]
    given += [headers.get(name, "") for name in HEADERS]
    given.append(read_text(fields, "prompt_cache_key"))
    name = next(filter(None, given), None)
    root = msgspec.json.encode((summary.cache_salt, summary.model))
    # A header's bytes that are no UTF-8 stand in its text as lone surrogates.
    explicit = None if name is None else _digest(b"named", root, name.encode(errors="surrogatepass"))
    return Names(explicit, tuple(_fingerprints(root, fields, summary.endpoint)))


def _fingerprints(root: bytes, fields: Fields, endpoint: Endpoint) -> Iterable[bytes]:
    if endpoint is Endpoint.COMPLETIONS:
        return  # a prompt doesn't say where its turns begin
    try:
        messages = msgspec.json.decode(fields.get(endpoint.input_field, b"[]"), type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the engine refuses it, or a response's input is one text
    fingerprint = _digest(b"messages", root)
    for message in messages:
        fingerprint = _digest(fingerprint, bytes(message))
        yield fingerprint


def _digest(*parts: bytes) -> bytes:
    """Each part but the last is JSON, or of a fixed length: none runs into the next."""
    return blake2b(b"".join(parts), digest_size=16).digest()


class Conversations:
    """The last turns, by the names of their conversations."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[bytes, HandoffKey] = OrderedDict()
        self._histories: OrderedDict[HandoffKey, HistoryRef] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, names: Names, history: HistoryRef) -> None:
        """A turn has ended; `history.n_tokens` may be an upper bound until the engine's account is in."""
        _put(self._histories, history.key, history, self._limit)
        for name in names.of_this_turn():
            _put(self._turns, name, history.key, self._limit)

    def find(self, names: Names, alive: Callable[[Identity], bool]) -> HistoryRef | None:
        """What is kept of the turn that shares most with this one. Entries of ended lives are dropped."""
        for name in names.of_former_turns():
            key = self._turns.get(name)
            history = None if key is None else self._histories.get(key)
            if key is None:
                continue
            if history is None or not alive(history.source):
                del self._turns[name]
                self._histories.pop(key, None)
                continue
            self._turns.move_to_end(name)
            self._histories.move_to_end(key)
            return history
        return None

    def account(self, leg: LegRecord) -> None:
        """An engine's account of a turn says how much it has kept."""
        key = HandoffKey(HandoffId(leg.handoff_id), leg.attempt)
        history = self._histories.get(key)
        teller = Identity(EngineId(leg.engine_id), Epoch(leg.epoch))
        if leg.leg == "prefill" or history is None or history.source != teller:
            return
        if leg.retained_tokens:
            self._histories[key] = msgspec.structs.replace(history, n_tokens=leg.retained_tokens)
        else:
            del self._histories[key]


def _put(entries: OrderedDict[_Name, _Value], name: _Name, value: _Value, limit: int) -> None:
    entries[name] = value
    entries.move_to_end(name)
    while len(entries) > limit:
        entries.popitem(last=False)
