"""Members that register themselves: engines post a signed registration now and then, and stay as long as
they do."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import ConfigError, RequestError, invalid
from kvhandoff.core.ids import Identity
from kvhandoff.core.urls import check_url
from kvhandoff.handoff.registration import MAX_LEASE_S, BadRegistration, RegistrationKey
from kvhandoff.router import wire
from kvhandoff.router.address import EngineAddress
from kvhandoff.router.members import Member
from kvhandoff.router.orders import read_order

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks for leases that have run out."""
_MAX_BYTES = 4096
_READ_S = 10.0
_MAX_LIVES = 10_000
"""Lives of engines whose last number is remembered; the oldest go first."""


class SignedRegistration(msgspec.Struct, frozen=True):
    """The body of `POST /internal/engines`."""

    registration: str


@dataclass(frozen=True, slots=True)
class _Entry:
    member: Member
    life: Identity
    """Of the engine."""
    until: float
    signed: object
    """What it was registered with."""


class Registrations:
    """The engines that are registered now."""

    name = "registrations"
    problem = None

    def __init__(self, cluster_key: bytes, clock: Clock, *, look_s: float = LOOK_S) -> None:
        self._key = RegistrationKey(cluster_key)
        self._clock = clock
        self._look_s = look_s
        self._entries: dict[str, _Entry] = {}
        """By URL."""
        self._numbers: OrderedDict[Identity, int] = OrderedDict()
        self._news = asyncio.Event()

    async def post(self, request: wire.Request) -> wire.Response:
        """`POST /internal/engines`. Answers `{}`; errors: 403 `bad_registration`, 400 for bad fields."""
        raw = await wire.read_body(request, _MAX_BYTES, _READ_S)
        self.register(read_order(raw, SignedRegistration).registration)
        return wire.json_response({})

    def register(self, signed: object) -> None:
        """Take an engine in, keep it for another lease, or let it go.

        At a URL the life that came last is the engine: one that has not been heard of replaces the one before
        it, whose messages may still be under way, and neither bring it back nor take the new one out. (Lives
        have no order of their own. Where a router that has just started hears of them the wrong way round,
        the living one is taken in again when the other's lease has run out.)

        Raises BadRegistration, and RequestError (400) for fields that can't be used.
        """
        said = self._key.open(signed)
        if not 0 <= said.lease_s <= MAX_LEASE_S:
            raise invalid("lease_s", said.lease_s, f"0 to {MAX_LEASE_S:g}")
        try:
            check_url("url", said.url)
            if said.internal is not None:
                check_url("internal", said.internal)
        except ConfigError as error:
            raise RequestError(str(error), param=str(error).partition(":")[0]) from error
        last = self._numbers.get(said.engine)
        if last is not None and said.number <= last:
            raise BadRegistration(f"its number is {said.number}, but {last} of {said.engine} was here before")
        self._numbers[said.engine] = said.number
        self._numbers.move_to_end(said.engine)
        if len(self._numbers) > _MAX_LIVES:
            self._numbers.popitem(last=False)

        url = said.url.rstrip("/")
        present = self._entries.get(url)
        is_present = present is not None and present.life == said.engine
        if said.lease_s == 0:
            if is_present:
                del self._entries[url]
                log.info("%s at %s leaves", said.engine, url)
        else:
            if present is not None and not is_present and last is not None:
                raise BadRegistration(f"{said.engine} has been replaced by {present.life}, now at {url}")
            address = EngineAddress(url, said.internal and said.internal.rstrip("/"))
            if not is_present:
                log.info("%s registers as a %s engine at %s", said.engine, said.role, url)
            member, until = Member(said.role, address), self._clock() + said.lease_s
            self._entries[url] = _Entry(member, said.engine, until, signed)
        self._news.set()

    def take_over(self, signed: Sequence[object]) -> None:
        """What a sibling was told."""
        for one in signed:
            try:
                self.register(one)
            except RequestError as error:
                log.warning("a sibling's registration can't be used: %s", error)

    def last(self) -> list[object]:
        """What the engines that are registered now were registered with, for a sibling."""
        return [entry.signed for entry in self._entries.values()]

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """See `MemberSource`; one whose lease has run out is no member any more."""
        last: tuple[Member, ...] | None = None
        while True:
            self._news.clear()
            self._expire()
            now = tuple(entry.member for entry in self._entries.values())
            if now != last:
                last = now
                yield now
            try:
                async with asyncio.timeout(self._look_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _expire(self) -> None:
        now = self._clock()
        for url, entry in list(self._entries.items()):
            if now >= entry.until:
                log.warning("%s has not registered again: it is drained", url)
                del self._entries[url]
