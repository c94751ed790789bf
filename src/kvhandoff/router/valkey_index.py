"""The index of several replicas, on a Valkey or Redis server.

A look-up of all a conversation's names, or a turn's remembering, is a part of one round trip, and turns are
written in the order in which they came (`valkey_link.py`). A request whose look-up is late is one without a
history. While the server can't be reached, look-ups are answered at once; turns are dropped and counted.

A value is a version byte and msgpack. Nothing is unpickled, and what can't be read is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvhandoff.core.reasons import Reason
from kvhandoff.router.index import Answer, Turn
from kvhandoff.router.valkey_link import Missing, ValkeyLink

PREFIX = b"kvhandoff:turn:"
"""Of all keys; a name follows, which is of one cluster only (`names.py`)."""

_VERSION = b"\x01"
_MAX_VALUE_BYTES = 1024
"""A longer value is nobody's turn."""
_turn = msgspec.msgpack.Decoder(Turn)

_MISSES = {Missing.LOST: Reason.INDEX_FAILED, Missing.LATE: Reason.INDEX_TIMEOUT}


def encode(turn: Turn) -> bytes:
    """A turn as a value."""
    return _VERSION + msgspec.msgpack.encode(turn)


def decode(value: bytes) -> Turn | None:
    """The turn of a value; None: it is none of this version."""
    if value[:1] != _VERSION or len(value) > _MAX_VALUE_BYTES:
        return None
    try:
        return _turn.decode(memoryview(value)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class ValkeyIndex:
    """Turns on the server at `url`.

    `ttl_s`: an entry is kept so long after it was written or used. `on_lost_turns` is told how many turns
    could not be remembered. For the rest, and for what is raised, see `ValkeyLink`.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float,
        deadline_s: float,
        connect_s: float,
        on_lost_turns: Callable[[int], None],
        retry_s: float = 1.0,
    ) -> None:
        self._link = ValkeyLink("index", url, deadline_s=deadline_s, connect_s=connect_s, retry_s=retry_s)
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._on_lost_turns = on_lost_turns

    async def look_up(self, names: Sequence[bytes]) -> Answer:
        values = await self._link.ask("MGET", *(PREFIX + name for name in names))
        if isinstance(values, Missing):
            return Answer((), _MISSES[values])
        if not isinstance(values, list) or len(values) != len(names):
            return Answer((), Reason.INDEX_FOREIGN)
        turns = [decode(value) if isinstance(value, bytes) else None for value in values]
        foreign = sum(value is not None for value in values) > sum(turn is not None for turn in turns)
        return Answer(turns, Reason.INDEX_FOREIGN if foreign else None)

    def remember(self, names: Sequence[bytes], turn: Turn) -> None:
        value = encode(turn)

        def lost() -> None:
            self._on_lost_turns(1)

        # The turn counts once, with the first of its names.
        for first, name in enumerate(names):
            on_lost = lost if first == 0 else None
            self._link.tell("SET", PREFIX + name, value, "PX", self._ttl_ms, on_lost=on_lost)

    def renew(self, name: bytes) -> None:
        self._link.tell("PEXPIRE", PREFIX + name, self._ttl_ms)

    async def start(self) -> None:
        """Returns when the first attempt to connect has ended."""
        await self._link.start()

    async def close(self) -> None:
        """What waits is written if the server takes it within `deadline_s`."""
        await self._link.close()
