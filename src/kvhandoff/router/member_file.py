"""Members from a YAML file, which may be replaced while the router runs.

prefill:
  - url: http://10.0.0.1:8000
    internal: http://10.0.0.1:14600   # a vLLM engine's kv_port, where it is not the usual one
decode:
  - url: http://10.0.0.2:8000
    drain: true                       # no new legs
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from kvhandoff.core.clock import Sleep
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import check_url
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.engine import Role
from kvhandoff.router.members import Member
from kvhandoff.router.watched import Watched
from kvhandoff.router.yaml_file import read_yaml


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    internal: str | None = None
    drain: bool = False


class _Fleet(msgspec.Struct, forbid_unknown_fields=True):
    decode: list[_Entry]
    """Required, so that a file that is half written is refused rather than obeyed."""
    prefill: list[_Entry] = []


def read_members(raw: bytes) -> tuple[Member, ...]:
    """The members in a file's content. Raises ConfigError naming the field."""
    fleet = read_yaml(raw, _Fleet)
    return (
        *_members("prefill", fleet.prefill, set()),
        *_members("decode", fleet.decode, _urls(fleet.prefill)),
    )


def _urls(entries: list[_Entry]) -> set[str]:
    return {entry.url.rstrip("/") for entry in entries}


def _members(role: Role, entries: list[_Entry], seen: set[str]) -> list[Member]:
    members = []
    for number, entry in enumerate(entries):
        where = f"{role}[{number}]"
        check_url(f"{where}.url", entry.url)
        if entry.internal is not None:
            check_url(f"{where}.internal", entry.internal)
        url, internal = entry.url.rstrip("/"), entry.internal and entry.internal.rstrip("/")
        if url in seen:
            raise ConfigError(f"{where}.url: got {url} more than once, allowed is once")
        seen.add(url)
        members.append(Member(role, EngineAddress(url, internal), entry.drain))
    return members


class FileMembers:
    """Follows one file. A bad one is refused: the last good one stays in force."""

    def __init__(self, path: Path, *, sleep: Sleep = asyncio.sleep) -> None:
        self._path = path
        self._sleep = sleep
        self._file: Watched[tuple[Member, ...]] | None = None
        """From the first reading on."""

    @property
    def name(self) -> str:
        """See `MemberSource`."""
        return f"file {self._path}"

    @property
    def problem(self) -> str | None:
        """See `MemberSource`."""
        return self._file.problem if self._file is not None else None

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """See `MemberSource`."""

        def open_file() -> Watched[tuple[Member, ...]]:
            return Watched("fleet", [self._path], self._load, sleep=self._sleep)

        self._file = await asyncio.to_thread(open_file)
        yield self._file.value
        async for members in self._file.changes():
            yield members

    def _load(self, contents: Sequence[bytes]) -> tuple[Member, ...]:
        try:
            return read_members(*contents)
        except ConfigError as error:
            raise ConfigError(f"fleet: {self._path}: {error}") from error
