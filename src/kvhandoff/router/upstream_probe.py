"""Which connector a stock vLLM engine runs (field case 20): the legs of a push router make nothing but
timeouts on engines that pull, and the reverse, and neither shows before the first request.

No page of such an engine tells it: `/health`, `/v1/models` and `/metrics` are the same for all connectors,
and only development servers have `/server_info`. What tells is the `kv_transfer_params` of a prefill leg's
answer, where vLLM 0.32 names the `transfer_mode`, `pull` or `push`. So whoever comes up is sent such a leg,
of a few tokens, before it gets a request; decode engines too, whose connector answers it all the same.

It costs one short prompt, and its blocks for as long as the engine waits for a reader: 30 s by the default of
`kv_lease_duration`. Nobody comes for them: the engine logs that, and counts it in
`vllm:nixl_num_kv_expired_reqs`.

An engine that doesn't say, since it is older or too busy to answer in time, is used as if nobody had asked.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.ids import new_handoff_id
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Role
from kvhandoff.router.legs import leg_headers
from kvhandoff.router.side import read_error
from kvhandoff.router.upstream_bodies import probe_body
from kvhandoff.router.upstream_config import CONNECTOR_CLASSES, MODES, UpstreamAddress, UpstreamConnector

log = logging.getLogger(__name__)

PROBE_S = 10.0
"""For the answer; then the engine is used without. The router's start waits as long for a busy engine."""
AGAIN_S = 60.0
"""Until an engine is asked again that runs another connector, or has not answered."""


class Runs(msgspec.Struct, frozen=True):
    """What `kv_transfer_params` say of the engine that has answered them."""

    transfer_mode: str | None = None
    """None: its vLLM is older than the field."""
    remote_engine_id: str | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: Runs | None = None


_answer = msgspec.json.Decoder(_Answer)


def mismatch(
    connector: UpstreamConnector, address: UpstreamAddress, role: Role, runs: Runs | None
) -> str | None:
    """Why an engine can't serve a router with that connector; None: as far as it says, it can.

    `runs`: None when its answer had no `kv_transfer_params`.
    """
    wanted = CONNECTOR_CLASSES[connector]
    if runs is None:
        return (
            "it runs no connector that hands over (a prefill leg is answered without kv_transfer_params), "
            f"allowed with --connector {connector} is {wanted}"
        )
    mode = runs.transfer_mode
    if mode is not None and mode != MODES[connector]:
        named = next(
            (CONNECTOR_CLASSES[other] for other in MODES if MODES[other] == mode), "another connector"
        )
        return f"it runs {named} (transfer_mode {mode}), allowed with --connector {connector} is {wanted}"
    own = runs.remote_engine_id
    if connector == "nixl-push" and role == "prefill" and own not in (None, address.engine_id):
        return f"engine_id: got {address.engine_id!r}, allowed is what the engine calls itself, {own!r}"
    return None


class ConnectorCheck:
    """What one engine runs, asked when it comes up. Used on the event loop's thread only."""

    def __init__(
        self,
        address: UpstreamAddress,
        role: Role,
        connector: UpstreamConnector,
        session: aiohttp.ClientSession,
        clock: Clock,
    ) -> None:
        self._address = address
        self._role: Role = role
        self._connector: UpstreamConnector = connector
        self._session = session
        self._clock = clock
        self._asking = asyncio.Lock()
        self._problem: str | None = None
        self._ask_at: float | None = float("-inf")
        """None: it has answered as it should."""
        self.mode: str | None = None
        """`pull` or `push`, as it has said."""

    def forget(self) -> None:
        """The engine has gone: what comes up there next may run something else."""
        self._problem, self._ask_at, self.mode = None, float("-inf"), None

    async def problem(self, model: str) -> str | None:
        """Why the engine, which serves `model`, can't be used. Raises what the network does."""
        async with self._asking:
            if self._ask_at is not None and self._clock() >= self._ask_at:
                self._ask_at = self._clock() + AGAIN_S
                await self._ask(model)
            return self._problem

    async def _ask(self, model: str) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                runs = await self._probe(model)
        except TimeoutError:
            self._unknown("no answer in time")
        except _AsksForTicket:
            self._problem = (
                "it is an engine of kvhandoff's own, which obeys tickets only, allowed with --connector "
                f"{self._connector} is {CONNECTOR_CLASSES[self._connector]}; leave --connector out for it"
            )
        except _NoAnswer as error:
            self._unknown(str(error))
        else:
            self.mode = None if runs is None else runs.transfer_mode
            self._problem = mismatch(self._connector, self._address, self._role, runs)
            if self._problem is None:
                self._ask_at = None

    def _unknown(self, why: str) -> None:
        """What was known of it before still holds."""
        log.info("%s engine at %s: its connector is not known: %s", self._role, self._address.url, why)

    async def _probe(self, model: str) -> Runs | None:
        url = self._address.url + Endpoint.COMPLETIONS.path
        headers = leg_headers({}, new_handoff_id())
        async with self._session.post(
            url, data=probe_body(model), headers=headers, allow_redirects=False
        ) as answer:
            body = await answer.read()
        if answer.status != 200:
            error = read_error(body)
            if error.code == "bad_ticket":
                raise _AsksForTicket
            raise _NoAnswer(f"status {answer.status} {error.message}".rstrip())
        try:
            return _answer.decode(body).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _NoAnswer(f"no usable answer: {error}") from error


class _NoAnswer(Exception):
    """It did not answer the leg as such."""


class _AsksForTicket(Exception):
    """It is an engine of this project's."""
