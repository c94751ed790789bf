"""An engine's own part in a fleet: it tells routers that it is there, as long as it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import aiohttp
import msgspec

from kvhandoff.core.errors import ConfigError, describe
from kvhandoff.core.ids import Identity
from kvhandoff.core.urls import check_url
from kvhandoff.handoff.registration import Registration, RegistrationKey

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""What an engine asks for. Three registrations in a row have to fail before a router drains it."""
EVERY_S = LEASE_S / 3
RETRY_S = 1.0
"""After one that failed: a router that has just started should not wait long."""
ANSWER_S = 2.0
"""A router's answer; then it has failed."""

_WILDCARDS = ("0.0.0.0", "::")


def check_registration(
    routers: Sequence[str], role: str, url: str | None, host: str = "", *, url_name: str = "register_url"
) -> None:
    """Raises ConfigError for what can't work, before a model is loaded. `host`: where the server listens, if
    `url` may be made of it; `url_name`: the setting of `url`, for the message."""
    for router in routers:
        check_url("register", router)
    if url is not None:
        check_url(url_name, url)
        if not routers:
            raise ConfigError(f"{url_name}: got {url!r} without register, allowed is with register only")
    if routers and role == "both":
        raise ConfigError(
            "register: got the role both, allowed is prefill or decode; name the engine to the router"
        )
    if routers and url is None and host in _WILDCARDS:
        raise ConfigError(
            f"register: got the host {host}, which no router can reach; set the URL ({url_name})"
        )


class Registrar:
    """Keeps one life of an engine registered with some routers. `async with` it while the engine serves."""

    def __init__(
        self,
        routers: Sequence[str],
        cluster_key: bytes,
        engine: Identity,
        role: Literal["prefill", "decode"],
        url: str,
        *,
        internal: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`url`: where routers reach the engine's server; `internal`: its pages for routers, if elsewhere."""
        self._routers = [router.rstrip("/") for router in routers]
        self._key = RegistrationKey(cluster_key)
        self._engine = engine
        self._role = role
        self._url = url
        self._internal = internal
        self._sleep = sleep
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        self._tasks = [asyncio.create_task(self._stay(router)) for router in self._routers]

    async def __aexit__(self, *_: object) -> None:
        """Tell them that it leaves; one that can't be told drains it when the lease runs out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._register(router, 0.0) for router in self._routers))
        await self._session.close()

    async def _stay(self, router: str) -> None:
        known: str | None = "not registered yet"
        while True:
            problem = await self._register(router, LEASE_S)
            if problem is None and known is not None:
                log.info("registered with %s as a %s engine at %s", router, self._role, self._url)
            elif problem is not None and problem != known:
                log.warning("not registered with %s: %s", router, problem)
            known = problem
            await self._sleep(EVERY_S if problem is None else RETRY_S)

    async def _register(self, router: str, lease_s: float) -> str | None:
        """Why it was not taken, or None."""
        self._number += 1
        signed = self._key.sign(
            Registration(
                engine=self._engine,
                number=self._number,
                role=self._role,
                url=self._url,
                internal=self._internal,
                lease_s=lease_s,
            )
        )
        try:
            async with self._session.post(
                f"{router}/internal/engines",
                data=msgspec.json.encode({"registration": signed}),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                body = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            return describe(error)
        return None if response.status == 200 else f"status {response.status} {body[:200]}"
