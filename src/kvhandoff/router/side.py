"""An engine's pages for the router: where they are, its state report, and the tickets posted to them."""

from __future__ import annotations

import aiohttp
import msgspec

from kvhandoff.core.records import EngineState
from kvhandoff.router.address import SIDE_PORT, EngineAddress


class NoReport(Exception):
    """The engine answers, but not with its state."""


class AnothersPages(NoReport):
    """The pages and the server are of two engines, so each would refuse what is meant for the other."""


class SignedTicket(msgspec.Struct, frozen=True):
    """The body of `/internal/withdraw`, `/internal/yield` and `/internal/peers`."""

    ticket: str


class EngineError(msgspec.Struct, frozen=True):
    """What the error body of an engine says."""

    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: EngineError


class _Named(msgspec.Struct):
    engine_id: str


_error_answer = msgspec.json.Decoder(_ErrorAnswer)
_state = msgspec.json.Decoder(EngineState)
_named = msgspec.json.Decoder(_Named)


def read_error(body: bytes) -> EngineError:
    """The error in an answer's body; an empty one when it is no error body."""
    try:
        return _error_answer.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return EngineError()


class SidePages:
    """The pages of one engine. Its methods raise what the network does, beside what they say."""

    def __init__(self, address: EngineAddress, session: aiohttp.ClientSession) -> None:
        self._address = address
        self._session = session
        self._found: str | None = None
        """Where they are, since they answered there."""
        self._matched: str | None = None
        """The life (epoch) that has been compared with the engine that the server says it is."""

    @property
    def url(self) -> str:
        """Where they are, as far as is known."""
        return self._found or self._address.candidates()[0]

    async def state(self, cursor: int) -> EngineState:
        """The engine's state with the legs that ended after `cursor`. Raises NoReport and DecodeError.

        An engine whose pages are apart from its server is asked for the server's health too: one of them
        alone serves nobody. Raises AnothersPages when that server says that it is another engine.
        """
        found, body = await self._report(cursor)
        if found != self._address.url:
            status, _ = await self._get(f"{self._address.url}/health")
            if status != 200:
                raise NoReport(f"its server's health is refused with status {status}")
        state = _state.decode(body)
        if found != self._address.url and state.epoch != self._matched:
            await self._match(state.engine_id, found)
            self._matched = state.epoch
        self._found = found
        return state

    async def about(self) -> dict[str, str]:
        """What is in use there, for people; `state` has found it before. Raises NoReport and DecodeError."""
        status, body = await self._get(f"{self.url}/internal/about")
        if status != 200:
            raise NoReport(f"what it says of itself is refused with status {status}")
        return msgspec.json.decode(body, type=dict[str, str])

    async def post(self, action: str, signed: str) -> tuple[int, EngineError]:
        """POST a ticket to `/internal/{action}`: the status, and the error when it was not taken."""
        async with self._session.post(
            f"{self.url}/internal/{action}",
            data=msgspec.json.encode(SignedTicket(signed)),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            body = await response.read()
            return response.status, EngineError() if response.status < 300 else read_error(body)

    async def _match(self, engine_id: str, found: str) -> None:
        """Raises AnothersPages. vLLM's server has no such page, and can't be compared."""
        url = self._address.url
        status, body = await self._get(f"{url}/internal/state", after="0")
        if status != 200:
            return
        try:
            at_server = _named.decode(body).engine_id
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # it is no engine's page: this server says nothing of itself either
        if at_server != engine_id:
            raise AnothersPages(
                f"internal: got {found}, the pages of engine {engine_id}, but the server at {url} is engine "
                f"{at_server}, allowed are that one's pages, which it has itself: leave ,internal=URL out"
            )

    async def _report(self, cursor: int) -> tuple[str, bytes]:
        """(where it came from, the report's JSON)."""
        *others, last = (self._found,) if self._found else self._address.candidates()
        for base in (*others, last):
            try:
                status, body = await self._get(f"{base}/internal/state", after=str(cursor))
            except aiohttp.ClientConnectorError as error:
                if others and base is last:
                    raise NoReport(
                        f"it has no /internal/state, and nothing answers at {last}; where a vLLM engine's "
                        f"connector listens at another port than {SIDE_PORT}, add ,internal=URL"
                    ) from error
                raise
            if status == 200:
                return base, body
            if status != 404 or base is last:
                break
        self._found = None  # it may be found elsewhere the next time
        raise NoReport(f"its state report is refused with status {status}")

    async def _get(self, url: str, **query: str) -> tuple[int, bytes]:
        async with self._session.get(url, params=query, allow_redirects=False) as response:
            return response.status, await response.read()
