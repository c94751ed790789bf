"""Plays scenes: each under every binding, in turning order, from idle to idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.deployment import MODEL, Deployment
from benchmarks.policy_trace import Scene
from benchmarks.report import in_turn
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import PATH_HEADER, RETURN_HEADER, PathChoice
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.stream import FirstContent

Binding = Literal["late", "early", "rebind", "auto"]
BINDINGS: tuple[Binding, ...] = get_args(Binding)
ROUTERS: Mapping[str, Sequence[str]] = {"default": (), "rebind": ("--binding", "rebind")}
"""Flags by name. What a request's path decides needs no router of its own."""
SAMPLE_S = 0.25
"""Between two looks at the decode engines' blocks."""


class Way(msgspec.Struct, frozen=True):
    """How a binding is asked for."""

    router: str
    path: PathChoice


WAYS: Mapping[Binding, Way] = {
    "late": Way("default", "pull"),
    "early": Way("default", "push"),
    "rebind": Way("rebind", "push"),
    "auto": Way("default", "auto"),
}
"""The path is forced, so that the first three differ by nothing but the binding; `auto` chooses both."""


@dataclass(frozen=True)
class Probe:
    """A measured request that was answered. Times are the client's, in seconds."""

    ttft_s: float
    """From before it is sent to the first content."""
    tpot_s: float
    """From the first content to the end, for each token after the first."""
    token_ids: tuple[int, ...]
    record: RequestRecord


@dataclass(frozen=True)
class Other:
    """A request that went to its decode engine directly."""

    tpot_s: float


@dataclass
class Play:
    """One scene under one binding."""

    scene: int
    probes: list[Probe]
    """In the order of the trace."""
    others: list[Other]
    failures: list[str]
    """What became of requests that got no whole answer."""
    imbalance: list[float] = field(default_factory=list)
    """Blocks in use on the fullest decode engine, by the mean of all; each time that any were."""
    written_bytes: int = 0
    """By the prefill engine, used or not."""


@dataclass(frozen=True)
class Seen:
    """One stream, as it came."""

    ttft_s: float
    tpot_s: float
    name: str
    """Of the response."""
    token_ids: tuple[int, ...]


def play_all(
    served: Deployment, scenes: Sequence[Scene], advance: Callable[[], None]
) -> dict[Binding, list[Play]]:
    """Every scene under every binding, one after the other."""
    plays: dict[Binding, list[Play]] = {binding: [] for binding in BINDINGS}
    for turn, scene in enumerate(scenes):
        for binding in in_turn(BINDINGS, turn):
            plays[binding].append(served.run(_play(served, scene, WAYS[binding])))
            advance()
    return plays


async def _play(served: Deployment, scene: Scene, way: Way) -> Play:
    client, before = Client(served), await written_bytes(served)
    answers = [arrival.answer_tokens for arrival in scene.arrivals]
    bodies = [body_of(arrival.prompt, arrival.answer_tokens) for arrival in scene.arrivals]
    targets = [decode_engines(served)[a.engine] if a.engine is not None else None for a in scene.arrivals]
    started = time.monotonic()

    async def send(index: int) -> Seen | str:
        await asyncio.sleep(max(0.0, started + scene.arrivals[index].at_s - time.monotonic()))
        target = targets[index]
        if target is not None:
            return await client.ask(target, bodies[index], {}, answers[index])
        router = served.routers[way.router]
        return await client.ask(router, bodies[index], headers_of(way.path), answers[index])

    imbalance: list[float] = []
    watching = asyncio.create_task(_watch(served, imbalance))
    try:
        seen = await asyncio.gather(*(send(index) for index in range(len(bodies))))
    finally:
        watching.cancel()
    play = Play(scene.index, [], [], [], imbalance)
    for arrival, what in zip(scene.arrivals, seen, strict=True):
        if isinstance(what, str):
            play.failures.append(what)
        elif arrival.engine is None:
            play.probes.append(await _probe(served, way.router, what))
        else:
            play.others.append(Other(what.tpot_s))
    await served.idle()
    play.written_bytes = await written_bytes(served) - before
    return play


async def _probe(served: Deployment, router: str, seen: Seen) -> Probe:
    record = await served.record(seen.name, router)
    return Probe(seen.ttft_s, seen.tpot_s, seen.token_ids, record)


def decode_engines(served: Deployment) -> list[str]:
    """Their URLs."""
    return [url for name, url in served.engines.items() if name != "prefill"]


def body_of(prompt: Sequence[int], answer_tokens: int) -> bytes:
    """Of a greedy request whose answer has exactly so many tokens, and says which."""
    sampling = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return msgspec.json.encode({"model": MODEL, "prompt": list(prompt), "stream": True, **sampling})


def headers_of(path: PathChoice) -> dict[str, str]:
    return {PATH_HEADER: path, RETURN_HEADER: "off"}


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_event = msgspec.json.Decoder(_Event)


def token_ids_of(stream: bytes) -> tuple[int, ...]:
    """All that a stream's events say. Raises DecodeError when one is none, e.g. an error in mid-stream."""
    data = [line[5:].strip() for line in stream.split(b"\n") if line.startswith(b"data:")]
    events = [_event.decode(each) for each in data if each != b"[DONE]"]
    return tuple(token for event in events for choice in event.choices for token in choice.token_ids)


@dataclass(frozen=True)
class Client:
    """Streams answers, and keeps the time."""

    served: Deployment

    async def ask(self, server: str, body: bytes, headers: dict[str, str], tokens: int) -> Seen | str:
        """A request to a router or an engine, for an answer of so many tokens (2 or more); words: what went
        wrong."""
        try:
            return await self._stream(server, body, headers, tokens)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            return f"{server}: {type(error).__name__}: {error}"

    async def _stream(self, server: str, body: bytes, headers: dict[str, str], tokens: int) -> Seen | str:
        scan, started, first, last = FirstContent(Endpoint.COMPLETIONS), time.monotonic(), None, 0.0
        pieces = []
        url, kind = f"{server}/v1/completions", {"Content-Type": "application/json"}
        async with self.served.session.post(url, data=body, headers=headers | kind) as answer:
            if answer.status != 200:
                return f"{server}: HTTP {answer.status}: {await answer.text()}"
            async for piece in answer.content.iter_any():
                last = time.monotonic()
                pieces.append(piece)
                if first is None and scan.feed(piece):
                    first = last
        token_ids = token_ids_of(b"".join(pieces))
        if first is None or scan.response_id is None or len(token_ids) != tokens:
            return f"{server}: an answer of {len(token_ids)} tokens, not {tokens}"
        return Seen(first - started, (last - first) / (tokens - 1), scan.response_id, token_ids)


async def _watch(served: Deployment, imbalance: list[float]) -> None:
    """Look at the decode engines' blocks now and then, until cancelled."""
    engines = decode_engines(served)
    while True:
        held = []
        for url in engines:
            blocks = await served.blocks(url)
            held.append(blocks.total - blocks.free - blocks.cached)
        if any(held):
            imbalance.append(max(held) * len(held) / sum(held))
        await asyncio.sleep(SAMPLE_S)


async def written_bytes(served: Deployment) -> int:
    """KV that the prefill engine has written to others since it was started."""
    async with served.session.get(f"{served.engines['prefill']}/metrics") as answer:
        text = await answer.text()
    name = "kvhandoff_engine_transfer_bytes_total"
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == {"part": "written"}
    ]
    return int(sum(sample.value for sample in samples))
