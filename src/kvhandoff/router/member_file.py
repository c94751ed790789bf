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
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import check_url
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.engine import Role
from kvhandoff.router.members import Member, Sleep

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file. Its content is compared: a time of change may be coarse, and is not kept by
every way in which files get into containers."""


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
    try:
        fleet = msgspec.yaml.decode(raw, type=_Fleet)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        where = re.sub(r"^\$\.?", "", path.strip("`")) or "the file"
        raise ConfigError(f"{where}: {what[:1].lower()}{what[1:]}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
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
        self._seen: bytes | None = None
        self.problem: str | None = None
        """See `MemberSource`."""

    @property
    def name(self) -> str:
        """See `MemberSource`."""
        return f"file {self._path}"

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """See `MemberSource`."""
        first = True
        while True:
            try:
                changed = await self._changed()
            except ConfigError as error:
                if first:
                    raise ConfigError(f"fleet: {self._path}: {error}") from error
                self._note(str(error))
            else:
                if changed is not None:
                    self._note(None)
                    yield changed
            first = False
            await self._sleep(LOOK_S)

    async def _changed(self) -> tuple[Member, ...] | None:
        """The members, if the content is another one than at the last look. Raises ConfigError."""
        try:
            raw = await asyncio.to_thread(self._path.read_bytes)
        except OSError as error:
            self._seen = None
            raise ConfigError(f"can't be read ({error.strerror})") from error
        if raw == self._seen:
            return None
        self._seen = raw
        return read_members(raw)

    def _note(self, problem: str | None) -> None:
        if problem != self.problem:
            if problem is None:
                log.info("%s: taken again", self.name)
            else:
                log.warning("%s: refused, the last good one stays in force: %s", self.name, problem)
        self.problem = problem
