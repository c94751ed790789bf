"""A request of two blocks through one prefill and one decode engine, to see whether they hand over."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

import aiohttp
import msgspec

from kvhandoff.core.errors import describe
from kvhandoff.core.ids import HandoffId, HandoffKey, new_handoff_id
from kvhandoff.core.records import LegRecord
from kvhandoff.router.answers import Answer, LegFailed, Prefilled, for_client, read_prefilled, whole
from kvhandoff.router.body import Fields
from kvhandoff.router.config import Timeouts
from kvhandoff.router.dialect import dialect_of
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Engine
from kvhandoff.router.legs import leg_headers
from kvhandoff.router.records import LegRef

_LEG_POLL_S = 0.02
"""Between two looks for the decode engine's account."""
_TOKEN_IDS = range(1, 128)
"""Every vocabulary has them; as many as two blocks hold make a prompt that nobody else has."""


class Untested(Exception):
    """Something else stood in the way, so that nothing is known of the pair."""


class Probe:
    """Sends test requests. Used on the event loop's thread only."""

    def __init__(self, session: aiohttp.ClientSession, timeouts: Timeouts) -> None:
        self._session = session
        self._timeouts = timeouts
        self._awaited: dict[HandoffKey, asyncio.Future[LegRecord]] = {}

    def take(self, legs: Iterable[LegRecord]) -> None:
        """Engines' accounts, of whatever requests."""
        if not self._awaited:
            return
        for leg in legs:
            awaited = self._awaited.get(HandoffKey(HandoffId(leg.handoff_id), leg.attempt))
            if awaited is not None and leg.leg == "decode" and not awaited.done():
                awaited.set_result(leg)

    async def test(self, p: Engine, d: Engine, deadline_s: float) -> str | None:
        """None: the KV of a prompt that `p` computed was used by `d`, as that engine says itself; else why
        not. Raises Untested, also after `deadline_s`."""
        key = HandoffKey(new_handoff_id(), 0)
        self._awaited[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                return await self._run(p, d, key)
        except TimeoutError as error:
            raise Untested(f"not done in {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError, LookupError) as error:
            raise Untested(describe(error)) from error
        except LegFailed as failure:
            raise Untested(str(failure)) from failure
        finally:
            del self._awaited[key]

    async def _run(self, p: Engine, d: Engine, key: HandoffKey) -> str | None:
        salt, fields, used = secrets.token_hex(16), _request(p, d), False
        life = p.identity
        try:
            prefilled, why = await self._prefill(p, key, salt, fields)
            if prefilled is None or prefilled.offer is None:
                return why or f"{p} offered nothing"
            await self._decode(d, key, salt, fields, prefilled)
            account = await self._account(d, key)
            used = account.transferred_tokens > 0
        finally:
            if not used and life is not None:
                await p.withdraw(LegRef(key, life))
        reasons = ", ".join(account.reasons) or "it names no reason"
        return None if used else f"{d} computed the prompt itself ({reasons})"

    async def _prefill(
        self, p: Engine, key: HandoffKey, salt: str, fields: Fields
    ) -> tuple[Prefilled | None, str | None]:
        """(what it has left, or why it can't be a prefill engine's answer)."""
        ticket = p.sign("prefill", key, cache_salt=salt)
        body = dialect_of(p.integration, Endpoint.COMPLETIONS).prefill(fields, key.handoff_id, salt, ticket)
        answer = await self._post(p, key, body)
        try:
            return read_prefilled(p, key, answer), None
        except LegFailed as failure:
            if failure.kind == "ticket_refused":
                raise
            return None, str(failure)

    async def _decode(
        self, d: Engine, key: HandoffKey, salt: str, fields: Fields, prefilled: Prefilled
    ) -> None:
        ticket = d.sign("decode", key, cache_salt=salt, offer=prefilled.offer)
        body = dialect_of(d.integration, Endpoint.COMPLETIONS).decode(fields, key.handoff_id, salt)
        await self._post(d, key, body.sealed(ticket, prefilled.prompt_token_ids))

    async def _post(self, engine: Engine, key: HandoffKey, body: bytes) -> Answer:
        """Its answer, which is a 200. Raises LegFailed, Untested, and what the network does."""
        url = engine.url + Endpoint.COMPLETIONS.path
        with engine.reserve():
            async with self._session.post(
                url, data=body, headers=leg_headers({}, key.handoff_id), allow_redirects=False
            ) as response:
                answer = await whole(response)
        if answer.status != 200:
            refused = for_client(engine, answer)
            raise Untested(f"{engine}: status {refused.status} {refused.body[:200]!r}")
        return answer

    async def _account(self, d: Engine, key: HandoffKey) -> LegRecord:
        awaited = self._awaited[key]
        while True:
            await d.poll()
            done, _ = await asyncio.wait({awaited}, timeout=_LEG_POLL_S)
            if done:
                return awaited.result()


def _request(p: Engine, d: Engine) -> Fields:
    """The client's body that the test stands for."""
    if p.state is None or d.state is None:
        raise LookupError("an engine has not reported its state yet")
    length = 2 * max(p.state.block_size, d.state.block_size)
    prompt = [secrets.choice(_TOKEN_IDS) for _ in range(length)]
    body = {"model": d.state.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
