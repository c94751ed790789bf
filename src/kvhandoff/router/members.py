"""Who belongs to the fleet: what a source of membership is, and how several make one set."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhandoff.router.address import EngineAddress
from kvhandoff.router.engine import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """One engine that is wanted."""

    role: Role
    address: EngineAddress
    drain: bool = False
    """It is to get no new legs."""


class MemberSource(Protocol):
    """Something that knows members: flags, a file, a name service, the engines themselves."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def problem(self) -> str | None:
        """Why it can't say who belongs to the fleet now, so that its last answer stands; None: it can."""
        ...

    def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """Its whole set, first as it is now, then each time that it changes. The first one may raise
        ConfigError: the router does not start."""
        ...


class FixedMembers:
    """The engines that the router was given by flags."""

    name = "flags"
    problem = None

    def __init__(self, prefill: Iterable[EngineAddress], decode: Iterable[EngineAddress]) -> None:
        self._members = (
            *(Member("prefill", address) for address in prefill),
            *(Member("decode", address) for address in decode),
        )

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """See `MemberSource`; they don't change."""
        yield self._members


def merge(sets: Iterable[Sequence[Member]]) -> list[Member]:
    """The members of all sources, each URL once, in order: what the first one says of it counts, but any may
    drain it."""
    merged: dict[str, Member] = {}
    for member in (member for members in sets for member in members):
        known = merged.get(member.address.url)
        if known is None:
            merged[member.address.url] = member
            continue
        if (known.role, known.address) != (member.role, member.address):
            log.warning(
                "%s is wanted as %s and as %s: the first one counts", known.address.url, known, member
            )
        if member.drain and not known.drain:
            merged[member.address.url] = Member(known.role, known.address, drain=True)
    return list(merged.values())
