"""Members behind a name that resolves to many addresses, such as a headless service's: each is an engine."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from kvhandoff.core.clock import Sleep
from kvhandoff.core.errors import describe
from kvhandoff.router.address import EngineAddress, EngineName
from kvhandoff.router.engine import Role
from kvhandoff.router.members import Member

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""The IP addresses behind (host, port). Raises OSError."""

EVERY_S = 5.0
"""Between two look-ups: the shortest time to live that name services of clusters use by default."""
ANSWER_S = 5.0
"""One look-up; then the last answer stands."""


async def resolve(host: str, port: int) -> set[str]:
    """What the system's resolver says. Raises OSError."""
    loop = asyncio.get_running_loop()
    return {str(address[0]) for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)}


class NamedMembers:
    """Follows one name. Where it does not resolve, the last answer stands."""

    def __init__(
        self, role: Role, name: EngineName, *, resolve: Resolve = resolve, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._role = role
        self._name = name
        self._resolve = resolve
        self._sleep = sleep
        self.problem: str | None = None
        """See `MemberSource`."""

    @property
    def name(self) -> str:
        """See `MemberSource`."""
        return f"{self._role} {self._name}"

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        """See `MemberSource`. A name that does not resolve at first stands for no engine until it does."""
        last: tuple[Member, ...] | None = None
        while True:
            found = await self._look_up()
            if found is None and last is None:
                found = ()
            if found is not None and found != last:
                last = found
                yield found
            await self._sleep(EVERY_S)

    async def _look_up(self) -> tuple[Member, ...] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                hosts = await self._resolve(self._name.host, self._name.port)
        except TimeoutError:
            self._failed(f"no answer in {ANSWER_S:g} s")
            return None
        except OSError as error:
            self._failed(describe(error))
            return None
        urls = sorted(self._name.url(host) for host in hosts)
        if not urls:
            self._failed("it resolves to no address")
            return None
        if self.problem is not None:
            log.info("%s: resolves again", self.name)
        self.problem = None
        return tuple(Member(self._role, EngineAddress(url)) for url in urls)

    def _failed(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s: %s; its last answer stands", self.name, problem)
        self.problem = problem
