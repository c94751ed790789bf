"""What a conversation is called: by the client, and by its messages.

A turn is remembered under a fingerprint of the messages that it was asked with, and a later turn of an
unchanged client repeats these at its beginning. What clients change between turns while the prompt's tokens
stay the same is left out of a fingerprint: the order of keys and the spaces of JSON, its escapes, empty and
absent fields, a text alone or as the only part of a content, marks for caches, ids, and the reasoning of
earlier answers, which templates strip. A fingerprint that takes two conversations for one costs a claim that
is answered with what they have in common; so it may leave out too much, but not too little.

Names hold the authenticated tenant, the cache salt and the model, so that no tenant meets another's (field
case 61), under a key of the cluster's: who reads an index learns nothing of the messages from their names,
and can't make one up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from kvhandoff.core.errors import RequestError
from kvhandoff.router.body import Fields, shown_json
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary

HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")
"""Headers by which clients name a conversation (case doesn't matter)."""

MOST_NAMES = 512
"""Beginnings of a conversation that are looked up: those that lack the fewest of its last messages. A turn
adds a few messages, so that this is far beyond the last one; and it bounds what one body may ask for."""


class Names(msgspec.Struct, frozen=True):
    """What a turn's conversation is called; each name has 16 bytes.

    The last message is no part of a former turn's names. It may be long, and is not read before the request
    has been answered, when the turn is remembered.
    """

    explicit: bytes | None
    """From the client's own name for it."""
    root: bytes = b""
    """What the tenant's names begin from."""
    former: tuple[bytes, ...] = ()
    """Fingerprints of a chat's messages but the last one: of the first, of the first two, …"""
    last: msgspec.Raw | bytes | None = None
    """The last message."""

    def __bool__(self) -> bool:
        """Whether a later turn could find this one."""
        return self.explicit is not None or self.last is not None

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Fingerprints of the messages: of the first one, of the first two, … of all. None, where the last
        one can't be read."""
        if self.last is None:
            return ()
        last = _fingerprints(self.former[-1] if self.former else _first(self.root), [self.last])
        return (*self.former, *last) if last else ()

    def of_this_turn(self) -> Iterable[bytes]:
        """What it is remembered under."""
        yield from self.messages[-1:]
        if self.explicit is not None:
            yield self.explicit

    def of_former_turns(self) -> Iterable[bytes]:
        """What a former turn may be found under, the one that shares most first. A client may give several
        conversations one name (`prompt_cache_key`), or each request another, so its messages say more."""
        yield from self.former[: -1 - MOST_NAMES : -1]
        if self.explicit is not None:
            yield self.explicit


def key_of_names(cluster_key: bytes) -> bytes:
    """The key of all names of a cluster's conversations; 32 bytes."""
    return blake2b(cluster_key, digest_size=32, person=b"conversations").digest()


def names_of(
    fields: Fields,
    headers: Mapping[str, str],
    summary: RequestSummary,
    *,
    tenant: str = "",
    key: bytes = b"",
) -> Names:
    """The names of a request's conversation.

    `tenant`: who has been authenticated, "" where nobody is. `key`: `key_of_names` where names leave the
    process. Messages that can't be read give no name; RequestError is raised for a client's own name that is
    no text.
    """
    root = _root(tenant, summary.cache_salt, summary.model, key)
    name = given_name(fields, headers)
    explicit = None if name is None else _digest(b"named", root, name)
    messages = _read_messages(fields, summary.endpoint)
    if not messages:
        return Names(explicit)
    before = messages[:-1]
    former = _fingerprints(_first(root), before) if before else ()
    if len(former) < len(before):
        return Names(explicit)  # the engine refuses it
    return Names(explicit, root, former, messages[-1])


def given_name(fields: Fields, headers: Mapping[str, str]) -> bytes | None:
    """What the client itself calls the conversation: the most particular of its names. Raises RequestError
    for one that is no text: the client would take its turns for one conversation."""
    given = [_name(fields, "conversation_id")]
    given += [headers.get(name, "") for name in HEADERS]
    given.append(_name(fields, "prompt_cache_key"))
    # A header's bytes that are no UTF-8 stand in its text as lone surrogates.
    return next((name.encode(errors="surrogatepass") for name in given if name), None)


def check_names(fields: Fields) -> None:
    """Raises RequestError for a name that is no text, whether it would be used or not."""
    for field in ("conversation_id", "prompt_cache_key"):
        _name(fields, field)


def _name(fields: Fields, field: str) -> str:
    raw = fields.get(field)
    if raw is None or bytes(raw) == b"null":
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"{field}: got {shown_json(raw)}, allowed is a string or null"
        raise RequestError(why, param=field) from error


@lru_cache(maxsize=1024)
def _root(tenant: str, cache_salt: str, model: str, key: bytes) -> bytes:
    """What all names of a tenant's conversations with a model begin from."""
    belongs = msgspec.json.encode((tenant, cache_salt, model))
    return blake2b(belongs, digest_size=16, key=key).digest()


@lru_cache(maxsize=1024)
def _first(root: bytes) -> bytes:
    """What the first message's fingerprint begins from."""
    return _digest(b"messages", root)


def _fingerprints(fingerprint: bytes, messages: Sequence[msgspec.Raw | bytes]) -> tuple[bytes, ...]:
    """Of the messages that follow those of `fingerprint`; up to one that can't be read."""
    made = []
    try:
        for raw in messages:
            # One that is long is taken by its bytes: reading it would hold up the loop.
            seen = bytes(raw) if len(raw) > _LONG else _read(raw)
            if seen is not None:
                fingerprint = _digest(fingerprint, seen)
            made.append(fingerprint)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the engine refuses it
    return tuple(made)


_LONG = 65536
"""Bytes of a message's JSON."""
_messages = msgspec.json.Decoder(list[msgspec.Raw] | str)


def _read_messages(fields: Fields, endpoint: Endpoint) -> Sequence[msgspec.Raw | bytes]:
    """Unread; none where it can't be told which there are."""
    if endpoint is Endpoint.COMPLETIONS:
        return []  # a prompt doesn't say where its turns begin
    try:
        messages = _messages.decode(fields.get(endpoint.input_field, b"[]"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # the engine refuses it
    if not isinstance(messages, str):
        return messages
    if endpoint is not Endpoint.RESPONSES:
        return []
    return [msgspec.json.encode({"role": "user", "content": messages})]


_UNSEEN = frozenset({"id", "status", "cache_control", "annotations", "reasoning", "reasoning_content"})
"""Fields of a message that don't reach the prompt, or reach that of some turns only."""
_EMPTY: tuple[object, ...] = (None, "", [])


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """What most messages are."""

    role: str
    content: str


_plain = msgspec.json.Decoder(_Plain)


def _read(raw: msgspec.Raw | bytes) -> bytes | None:
    """The JSON of what matters of a message; None: nothing of it does."""
    try:
        plain = _plain.decode(raw)
    except msgspec.ValidationError:
        return _seen(msgspec.json.decode(raw))
    if not plain.role or not plain.content:
        return _seen(msgspec.structs.asdict(plain))
    return msgspec.json.encode({"role": plain.role}) + plain.content.encode()


def _seen(message: object) -> bytes | None:
    """The same of one that is read."""
    if isinstance(message, dict):
        kind = message.get("type")
        if kind == "reasoning":
            return None  # an item of its own, which clients drop from older turns
        kept = {name: value for name, value in message.items() if name not in _UNSEEN}
        if kind == "message":
            del kept["type"]  # what an item is that doesn't say
        if isinstance(kept.get("content"), list):
            kept["content"] = _content(kept["content"])
        message = {name: value for name, value in kept.items() if value not in _EMPTY}
        text = message.pop("content", None)
        if isinstance(text, str):
            return msgspec.json.encode(message, order="deterministic") + text.encode()
        message["content"] = text
    return msgspec.json.encode(message, order="deterministic")


def _content(parts: list[Any]) -> object:
    """A content in parts; one that is no more than a text is that text."""
    match parts:
        case [{"type": "text" | "input_text" | "output_text", "text": str(text)}]:
            return text
    return [_without_marks(part) if isinstance(part, dict) else part for part in parts]


def _without_marks(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _UNSEEN}


def _digest(*parts: bytes) -> bytes:
    """Each part but the last is of a fixed length: none runs into the next."""
    return blake2b(b"".join(parts), digest_size=16).digest()
