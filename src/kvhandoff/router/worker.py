"""One of several router processes that share a port: what it is, and how it asks its siblings.

The system gives each new connection to any worker, so a record, a request under way, an order or a
registration is at one of them. Each has a side door, a Unix socket in a folder that only this user may enter,
with the same pages. What a page has to say or do for all of them, the worker that is asked does, and asks the
others at their doors, who ask nobody further:

    found    here, or at the first sibling that has it        records, re-binding
    told     here, and then every sibling                     draining, registrations
    merged   here, with what the siblings say at once         metrics, readiness, requests under way

A request to a sibling is the client's own, with the client's own key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from yarl import URL

from kvhandoff.core.errors import RequestError, describe, unavailable
from kvhandoff.router import wire

log = logging.getLogger(__name__)

ASK_S = 10.0
"""A sibling that has not answered by then counts as one that can't."""
MERGE_S = 0.8
"""The same where its word only adds to what this worker knows: a readiness probe of Kubernetes waits 1 s
itself, unless told otherwise."""
_MAX_BODY_BYTES = 4096
"""Of orders and registrations."""
_READ_S = 10.0
_PAGES = (200, 503)
"""Statuses of pages that say what they are asked; `/ready` says with the second that it is not."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of how many processes this is."""

    index: int = 0
    count: int = 1
    doors: Path | None = None
    """The folder of the side doors; None: it is the only one."""

    def door(self, index: int | None = None) -> Path | None:
        """The Unix socket of this worker, or of another."""
        return None if self.doors is None else side_door(self.doors, self.index if index is None else index)


def side_door(doors: Path, index: int) -> Path:
    """The Unix socket of a worker."""
    return doors / f"{index}.sock"


@dataclass(frozen=True, slots=True)
class Said:
    """A sibling's answer."""

    status: int
    content_type: str
    body: bytes

    def response(self) -> wire.Response:
        """The same, for the client."""
        return wire.Response(status=self.status, body=self.body, headers={"Content-Type": self.content_type})


class Siblings:
    """The other workers. Used on the event loop's thread only."""

    def __init__(self, me: Worker) -> None:
        self._me = me
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        """While the context lasts they can be asked."""
        async with AsyncExitStack() as stack:
            for index in range(self._me.count):
                door = self._me.door(index)
                if index != self._me.index and door is not None:
                    session = aiohttp.ClientSession(
                        connector=aiohttp.UnixConnector(str(door), limit=0), auto_decompress=False
                    )
                    self._sessions[index] = await stack.enter_async_context(session)
            yield

    def found(self, handler: wire.Handler) -> wire.Handler:
        """`handler`, and where it answers 404 the first sibling that doesn't."""

        async def ask(request: wire.Request) -> wire.Response | wire.StreamResponse:
            try:
                return await handler(request)
            except RequestError as error:
                if error.status != 404 or request.from_sibling:
                    raise
                answers = await self._ask(request)
                for said in answers:
                    if said is not None and said.status != 404:
                        return said.response()
                if None in answers:
                    raise self._unreachable(answers) from error
                raise

        return self._if_any(handler, ask)

    def told(self, handler: wire.Handler) -> wire.Handler:
        """`handler`, and then the same at every sibling. One that can't be told, or doesn't do it, makes it
        an error (503), so that whoever asks asks again."""

        async def ask(request: wire.Request) -> wire.Response | wire.StreamResponse:
            response = await handler(request)
            if not request.from_sibling:
                answers = [said if said and said.status < 400 else None for said in await self._ask(request)]
                if None in answers:
                    raise self._unreachable(answers)
            return response

        return self._if_any(handler, ask)

    def merged(self, handler: wire.Handler, merge: Callable[[Sequence[bytes | None]], bytes]) -> wire.Handler:
        """`handler`, its body merged with those of the siblings; its own comes first, None is one of a
        sibling that can't answer, or not within MERGE_S."""

        async def ask(request: wire.Request) -> wire.Response | wire.StreamResponse:
            response = await handler(request)
            if isinstance(response, wire.Response) and not request.from_sibling:
                answers = await self._ask(request, MERGE_S)
                said = [x.body if x is not None and x.status in _PAGES else None for x in answers]
                response.body = merge([response.body, *said])
            return response

        return self._if_any(handler, ask)

    def _unreachable(self, answers: Sequence[Said | None]) -> RequestError:
        silent = f"{list(answers).count(None)} of {self._me.count} workers"
        return unavailable(f"{silent} can't be asked now; try again", code="worker_unreachable")

    async def first(self, page: str) -> bytes | None:
        """What a sibling says at one of its own pages; None: there is none that can."""
        for index in self._sessions:
            if not self._is_there(index):
                continue  # all of them are being started
            said = await self._said(index, "GET", page, {}, b"")
            if said is not None and said.status == 200:
                return said.body
        return None

    def _is_there(self, index: int) -> bool:
        door = self._me.door(index)
        return door is not None and door.exists()

    def _if_any(self, alone: wire.Handler, together: wire.Handler) -> wire.Handler:
        return together if self._me.count > 1 else alone

    async def _ask(self, request: wire.Request, within_s: float = ASK_S) -> list[Said | None]:
        """All of them at once; None: it can't answer, or not so soon."""
        body = await wire.read_body(request, _MAX_BODY_BYTES, _READ_S) if request.method == "POST" else b""
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        return await asyncio.gather(
            *(
                self._said(index, request.method, request.path, headers, body, within_s)
                for index in self._sessions
            )
        )

    async def _said(
        self,
        index: int,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        within_s: float = ASK_S,
    ) -> Said | None:
        url = URL.build(scheme="http", host="worker", path=path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._sessions[index].request(
                method, url, data=body or None, headers=headers, allow_redirects=False, timeout=timeout
            ) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                return Said(answer.status, kind, await answer.read())
        except (aiohttp.ClientError, OSError) as error:
            log.warning("worker %d did not answer %s: %s", index, path, describe(error))
            return None
