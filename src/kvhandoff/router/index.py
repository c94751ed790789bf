"""Where turns are found by the names of their conversations: in this process, or on a server for replicas.

An index is never trusted: what it names is used if that life of an engine is known here, by the address that
this router knows, and the engines compare token chains before a byte is used. So all that a lost, cold or
foreign index can cost is computing again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason

IN_MEMORY = "memory"
SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
"""Of a server's URL; those that end in `s` mean TLS."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A turn that a decode engine has answered, and keeps if it still can."""

    key: HandoffKey
    source: Identity
    """The life of the engine."""


class Answer(NamedTuple):
    """What an index knows."""

    turns: Sequence[Turn | None]
    """One for each name that was asked for; nothing at all when it couldn't be asked."""
    reason: Reason | None = None
    """Why there may be less than is kept."""


class Index(Protocol):
    """Turns by names of 16 bytes. Used on one event loop. Nothing is raised: what can't be had is a miss."""

    async def look_up(self, names: Sequence[bytes]) -> Answer:
        """All names at once, within the index's own deadline."""

    def remember(self, names: Sequence[bytes], turn: Turn) -> None:
        """Returns at once; of two turns under one name the later one is found."""

    def renew(self, name: bytes) -> None:
        """It has been used, which lengthens the lease of what it stands for. Returns at once."""

    async def start(self) -> None:
        """Get ready; a server that can't be reached now is asked again in the background."""

    async def close(self) -> None:
        """End the background work; what is not written yet is, if that takes no time."""


class LocalIndex:
    """In this process's memory; the least recently used names go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    async def look_up(self, names: Sequence[bytes]) -> Answer:
        return Answer([self._turns.get(name) for name in names])

    def remember(self, names: Sequence[bytes], turn: Turn) -> None:
        for name in names:
            self._turns[name] = turn
            self._turns.move_to_end(name)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def renew(self, name: bytes) -> None:
        if name in self._turns:
            self._turns.move_to_end(name)

    async def start(self) -> None:
        """It is ready."""

    async def close(self) -> None:
        """Nothing runs."""


def open_index(
    index: str,
    *,
    limit: int,
    ttl_s: float,
    deadline_s: float,
    connect_s: float,
    on_lost_turns: Callable[[int], None],
) -> Index:
    """The index that an operator has named, for `limit` names in memory or on a server (`ValkeyIndex`).

    Raises ConfigError when the server's client isn't installed, or doesn't take the URL.
    """
    if index == IN_MEMORY:
        return LocalIndex(limit)
    try:
        from kvhandoff.router.valkey_index import ValkeyIndex
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"index: {error}, allowed without its client is {IN_MEMORY}: pip install 'kvhandoff[valkey]'"
        ) from error
    try:
        return ValkeyIndex(
            index, ttl_s=ttl_s, deadline_s=deadline_s, connect_s=connect_s, on_lost_turns=on_lost_turns
        )
    except ValueError as error:
        raise ConfigError(f"index: its URL can't be used: {error}") from error


def check_index(index: str) -> None:
    """Raises ConfigError when it is neither `memory` nor a server's URL, or has parts that would have no
    effect. No message shows a password."""
    if index == IN_MEMORY:
        return
    try:
        usable = _is_servers(index, urlsplit(index))
    except ValueError:  # a port that is no number, a broken IPv6 address
        usable = False
    if not usable:
        raise ConfigError(
            f"index: got {_shown(index)!r}, allowed is {IN_MEMORY}, or a server's URL: valkey://HOST:PORT/DB "
            f"(also {', '.join(SCHEMES[1:-1])}; DB is 0 to {_MAX_DATABASE}) or unix:///PATH?db=DB"
        )


_MAX_DATABASE = 9999
"""Servers have 16 of them unless told otherwise."""
_DATABASE = re.compile(r"[0-9]{1,4}")


def _is_servers(index: str, url: SplitResult) -> bool:
    """Raises ValueError."""
    # urlsplit takes a scheme in any case, and with spaces; the client, and what it is told for TLS, does not.
    if url.scheme not in SCHEMES or not index.startswith(f"{url.scheme}:") or url.fragment:
        return False
    if url.scheme == "unix":
        name, _, database = url.query.partition("=")
        fits = not url.query or (name == "db" and _DATABASE.fullmatch(database) is not None)
        return bool(url.path) and url.hostname is None and url.port is None and fits
    fits = url.path in ("", "/") or _DATABASE.fullmatch(url.path[1:]) is not None
    return bool(url.hostname) and url.port != 0 and not url.query and fits


def _shown(index: str) -> str:
    """Without the user, the password, and the values of fields."""
    place, *more = re.split("([?#])", index, maxsplit=1)
    if any("@" in part for part in more):  # it may be what ends a password
        return "…"
    scheme, mark, _ = place.partition("://")
    before, at, rest = place.rpartition("@")
    if at:
        place = f"{scheme}://…@{rest}" if mark and len(before) > len(scheme) else f"…@{rest}"
    return f"{place}{more[0]}…" if more and more[1] else place
