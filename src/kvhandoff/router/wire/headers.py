"""A message's headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

_Default = TypeVar("_Default")


class Headers(Mapping[str, str]):
    """By name in any case. Of several with one name the mapping has the first; `getall` has all of them.

    Bytes that are no UTF-8 stand in texts as lone surrogates.
    """

    __slots__ = ("_first", "_pairs")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._pairs = [(_text(name).lower(), _text(value)) for name, value in pairs]
        self._first = dict(reversed(self._pairs))

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str | _Default) -> str | _Default: ...
    def get(self, name: str, /, default: object = None) -> object:
        """The first value; the mapping's own `get` raises and catches for each name that isn't there."""
        return self._first.get(name.lower(), default)

    def getall(self, name: str, default: list[str] | None = None) -> list[str]:
        """Every value, in order. Raises KeyError when there is none, and no default."""
        wanted = name.lower()
        found = [value for given, value in self._pairs if given == wanted]
        if not found and default is None:
            raise KeyError(name)
        return found or (default or [])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
