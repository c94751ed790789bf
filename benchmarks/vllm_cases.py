"""What `make bench-vllm` measures, and how one request is measured.

The client streams, so that its time to the first token ends with the first event that has content; whatever
else is known stands in the router's record. Of upstream's engines a record has no more than the router sees:
the legs' times. A conversation's first turn is not streamed, since only such an answer has what upstream's
bidirectional mode needs; it is not measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from benchmarks.path_runs import Prompts
from benchmarks.vllm_engines import MODEL
from benchmarks.vllm_pairs import KVHANDOFF, PairKind
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import PATH_HEADER, RETURN_HEADER, Path
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.stream import FirstContent

MAX_TOKENS = 4
"""Of a measured answer."""
ANSWER_TOKENS = range(16, 32)
"""Of a conversation's first turn, one after the other: histories end anywhere in a block. Upstream hands back
the last one partly filled, this connector full ones only."""
NEW_TOKENS = 100
"""Of a second turn, after the history."""
DEADLINE_S = 30.0
"""For a record to be complete."""
POLL_S = 0.02

NO_PREFILL_CACHE = ("--no-enable-prefix-caching",)
"""Else the prefill engine would have a conversation's first turn, and nothing to fetch."""


MODES: tuple[tuple[str, Path, Any, dict[str, Any]], ...] = (
    ("pull", "pull", "nixl", {}),
    ("push", "push", "nixl-push", {}),
    ("return", "pull", "nixl", {"bidirectional_kv_xfer": True}),
)
"""What is measured, by which path, and which connector of upstream's does it with which extra config."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of request, and the deployment that is started for it."""

    name: str
    path: Path
    kind: PairKind | None = None
    """None: one engine without a connector."""
    second_turn: bool = False
    rival: str | None = None
    """The case of upstream's that this one is compared with; it may be followed by ` tuned`."""


def cases(*, shipped: bool, tuned: bool) -> list[Case]:
    """All of them, each beside its rivals. Upstream's second turns are measured as shipped only when nothing
    is tuned: its decode engine spins as long as it keeps a turn."""
    found = [Case(name="monolithic", path="local")]
    for mode, path, connector, extra in MODES:
        again = mode == "return"
        for is_tuned in [False] * (shipped and not (again and tuned)) + [True] * tuned:
            name = f"upstream {mode}{' tuned' if is_tuned else ''}"
            kind = _kind(name, connector, tuned=is_tuned, extra=extra)
            found.append(Case(name=name, path=path, kind=kind, second_turn=again))
        name, kind = f"{KVHANDOFF} {mode}", _kind(f"{KVHANDOFF} {mode}", KVHANDOFF)
        found.append(Case(name=name, path=path, kind=kind, second_turn=again, rival=f"upstream {mode}"))
    return found


def _kind(name: str, connector: Any, **options: Any) -> PairKind:
    named = name.replace(" ", "-")
    return PairKind(name=named, connector=connector, prefill_arguments=NO_PREFILL_CACHE, **options)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured request."""

    ttft_s: float
    """From before it is sent to the first content, on the client's clock."""
    phases: Mapping[str, float]
    """Of the record; `beside.` those of a pushed prompt's prefill leg."""


class Client:
    """Asks one deployment."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, routed: bool) -> None:
        self._session = session
        self._url = url
        self._routed = routed

    async def measure(self, case: Case, prompts: Prompts, tokens: int, number: int = 0) -> Sample:
        """The case's request of this number, with `tokens`, or a second turn after a history of about as
        many. Raises RuntimeError when it was not served as the case says."""
        prompt, named = prompts.fresh(tokens), {}
        if case.second_turn:
            named = {"conversation_id": prompts.conversation()}
            length = ANSWER_TOKENS[number % len(ANSWER_TOKENS)]
            answered = await self._first_turn(case, _body(prompt, length) | named)
            prompt = [*prompt, *answered, *prompts.fresh(NEW_TOKENS)]
        body = _body(prompt, MAX_TOKENS) | named | {"stream": True}
        ttft_s, name = await self._stream(body, _headers(case))
        return Sample(ttft_s=ttft_s, phases=await self._phases(case, name) if self._routed else {})

    async def _first_turn(self, case: Case, body: dict[str, Any]) -> list[int]:
        """The answer's token ids."""
        asked = body | {"return_token_ids": True}
        async with self._session.post(self._completions, json=asked, headers=_headers(case)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{case.name}: HTTP {answer.status}: {await answer.text()}")
            read = await answer.json()
        token_ids: list[int] = read["choices"][0]["token_ids"]
        await self._record(read["id"])
        return token_ids

    async def _stream(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[float, str]:
        """(seconds to the first content, id of the response)."""
        scan, ttft_s = FirstContent(Endpoint.COMPLETIONS), None
        data = msgspec.json.encode(body)
        headers = headers | {"Content-Type": "application/json"}
        started = time.monotonic()
        async with self._session.post(self._completions, data=data, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {await answer.text()}")
            async for piece in answer.content.iter_any():
                if ttft_s is None and scan.feed(piece):
                    ttft_s = time.monotonic() - started
        if ttft_s is None or scan.response_id is None:
            raise RuntimeError(f"an answer without content: {scan.response_id}")
        return ttft_s, scan.response_id

    async def _phases(self, case: Case, name: str) -> dict[str, float]:
        record = await self._record(name)
        _require(case, record)
        return record.phases | {f"beside.{phase}": value for phase, value in record.prefill_phases.items()}

    async def _record(self, name: str) -> RequestRecord:
        """The record of a response: complete, where engines give their accounts. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with self._session.get(f"{self._url}/v1/handoffs/{name}") as answer:
                    record = msgspec.json.decode(await answer.read(), type=RequestRecord)
                if record.status is not None and (not record.incomplete or record.connector != "kvhandoff"):
                    return record
                await asyncio.sleep(POLL_S)

    @property
    def _completions(self) -> str:
        return f"{self._url}/v1/completions"


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "prompt": prompt, **sampling}


def _headers(case: Case) -> dict[str, str]:
    return {PATH_HEADER: case.path, RETURN_HEADER: "on" if case.second_turn else "off"}


def _require(case: Case, record: RequestRecord) -> None:
    """Raises RuntimeError when a request was not served as asked: it is no sample."""
    served = (record.status, record.path, record.attempts) == (200, case.path, 1)
    if record.connector == "kvhandoff":
        served = served and record.kv_source == "transferred"
        served = served and (record.reused_tokens.returned > 0) == case.second_turn
    else:
        served = served and (record.history is not None) == case.second_turn
    if not served:
        raise RuntimeError(f"{case.name} was asked for, and this came of it: {record}")
