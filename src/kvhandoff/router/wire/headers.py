"""A message's headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar, overload

from kvhandoff.core.errors import RequestError, excerpt

_Default = TypeVar("_Default")


class Headers(Mapping[str, str]):
    """By name in any case. Of several with one name the mapping has the first; `getall` has all of them.

    Bytes that are no UTF-8 stand in texts as lone surrogates.
    """

    __slots__ = ("_first", "_pairs")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """`pairs`: with names in lower case. Most of them are never asked for, and stay bytes."""
        self._pairs = pairs
        self._first = dict(reversed(pairs))

    def __getitem__(self, name: str) -> str:
        return _text(self._first[_raw(name)])

    def __iter__(self) -> Iterator[str]:
        return map(_text, self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _raw(name) in self._first

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str | _Default) -> str | _Default: ...
    def get(self, name: str, /, default: object = None) -> object:
        """The first value; the mapping's own `get` raises and catches for each name that isn't there."""
        found = self._first.get(_raw(name))
        return default if found is None else _text(found)

    def single(self, name: str) -> str | None:
        """The value of a header that may be there once. Raises RequestError (400) when there are more."""
        found = self._first.get(_raw(name))
        if found is None:
            return None
        if len(self._first) < len(self._pairs):
            values = self.getall(name)
            if len(values) > 1:
                given = " and ".join(map(excerpt, values[:4]))
                raise RequestError(f"{name}: got {given}, allowed is one", param=name)
        return _text(found)

    def getall(self, name: str, default: list[str] | None = None) -> list[str]:
        """Every value, in order. Raises KeyError when there is none, and no default."""
        wanted = _raw(name)
        found = [_text(value) for given, value in self._pairs if given == wanted]
        if not found and default is None:
            raise KeyError(name)
        return found or (default or [])


@lru_cache(maxsize=256)
def _raw(name: str) -> bytes:
    return name.lower().encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
