"""A message's headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class Headers(Mapping[str, str]):
    """By name in any case. Of several with one name the mapping has the first; `getall` has all of them.

    Bytes that are no UTF-8 stand in texts as lone surrogates.
    """

    __slots__ = ("_first", "_pairs")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._pairs = pairs
        self._first: dict[str, str] = {}
        for name, value in reversed(pairs):
            self._first[_text(name).lower()] = _text(value)

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def getall(self, name: str, default: list[str] | None = None) -> list[str]:
        """Every value, in order. Raises KeyError when there is none, and no default."""
        wanted = name.lower()
        found = [_text(value) for given, value in self._pairs if _text(given).lower() == wanted]
        if not found and default is None:
            raise KeyError(name)
        return found or (default or [])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
