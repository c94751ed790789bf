"""One trace over the router and both engines, whose phases are the record's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.phases import Phase
from kvhandoff.router import traces
from tests.cluster import MODEL, Cluster, cluster
from tests.collector import Collector, Span, collector
from tests.gates import StepGate

ROUTER, ENGINE = "kvhandoff-router", "kvhandoff-engine"
PROMPT = [3 + n % 200 for n in range(150)]
URL = "POST /v1/completions"
OFF_BY = 2e-6
"""A span's ends are whole nanoseconds, and a phase is a difference of readings."""


@asynccontextmanager
async def traced(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, *, engines: bool = True
) -> AsyncIterator[tuple[Cluster, Collector]]:
    async with (
        collector(monkeypatch) as spans,
        cluster(
            tiny,
            router_options={"traces": spans.url},
            **({"traces": spans.url} if engines else {}),
        ) as deployment,
    ):
        yield deployment, spans


def by_phase(spans: Collector) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans.spans:
        if span.name in set(Phase):
            found.setdefault(span.name, []).append(span)
    return found


async def ask(
    deployment: Cluster, spans: Collector, path: str, *, count: int, stream: bool = False, **fields: Any
) -> tuple[dict[str, Any], Span]:
    """The record and the router's span of one request; `count`: spans of the engines that it has."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": stream} | fields
    async with deployment.session.post(
        deployment.url + "/v1/completions", json=body, headers={"x-kvhandoff-path": path}
    ) as response:
        assert response.status == 200
        identifier = response.headers["X-Request-Id"]
        await response.read()
    record = await deployment.record(identifier)
    request = await spans.request()
    await spans.has(lambda: len(spans.named(URL, ENGINE)) == count)
    return record, request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["pull", "push", "local"])
async def test_one_trace_over_router_and_engines(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Field case 64: every gap has a name, on the engine that it was at, and they add up."""
    legs = {"prefill leg": "prefill-0", "decode leg": "decode-0"}
    if path == "local":
        legs = {"local leg": "decode-0"}
    async with traced(tiny, monkeypatch) as (deployment, spans):
        record, request = await ask(deployment, spans, path, count=len(legs), stream=stream)

    assert record["path"] == path
    assert record["kv_source"] == ("local" if path == "local" else "transferred")
    assert {span.trace_id for span in spans.spans} == {request.trace_id} == {record["trace_id"]}
    assert request.parent_id == ""
    engines = {}
    for name, engine in legs.items():
        leg = spans.one(name)
        assert leg.parent_id == request.span_id
        (served,) = [span for span in spans.below(leg) if span.service == ENGINE]
        assert (served.name, served.failed) == (URL, False)
        said = served.attributes
        assert (said["kvhandoff.engine"], said["kvhandoff.leg"] + " leg") == (engine, name)
        assert said["kvhandoff.handoff_id"] == record["handoff_id"]
        engines[engine] = served
        inside = spans.below(served)
        assert {span.service for span in inside} == {ENGINE}
        assert all(served.start_ns <= span.start_ns for span in inside)
        assert all(span.end_ns <= served.end_ns for span in inside)

    # Each phase of the record is one span, made by whoever has measured it.
    found = by_phase(spans)
    phases = record["phases"] | record["prefill_phases"]
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(phases, 1)
    for name, seconds in phases.items():
        assert found[name][0].seconds == pytest.approx(seconds, abs=OFF_BY), name
    total = sum(found[name][0].seconds for name in record["phases"])
    assert total == pytest.approx(record["ttft_s"], abs=len(phases) * OFF_BY)
    parents = {name: each[0].parent_id for name, each in found.items()}
    assert parents["route"] == request.span_id
    assert parents["first_step"] == engines["decode-0"].span_id
    assert parents["decode_network"] == spans.one("local leg" if path == "local" else "decode leg").span_id
    if path != "local":
        assert parents["prefill_compute"] == engines["prefill-0"].span_id
        assert request.attributes["kvhandoff.bytes"] == record["bytes"] > 0
    if path == "pull":
        assert parents["wire"] == engines["decode-0"].span_id
    if path == "push":
        assert parents["await_prefill"] == engines["decode-0"].span_id
    usage = request.attributes
    assert (usage["gen_ai.usage.input_tokens"], usage["gen_ai.usage.output_tokens"]) == (len(PROMPT), 4)


async def test_phases_of_engines_without_traces_come_from_the_router(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM's, whose connector sees no headers."""
    async with traced(tiny, monkeypatch, engines=False) as (deployment, spans):
        record, _ = await ask(deployment, spans, "pull", count=0)
    found = by_phase(spans)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(record["phases"], 1)
    assert {span.service for each in found.values() for span in each} == {ROUTER}
    assert found["prefill_compute"][0].parent_id == spans.one("prefill leg").span_id
    assert found["wire"][0].parent_id == spans.one("decode leg").span_id


async def test_a_return_stands_below_the_prefill_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(tiny, monkeypatch) as (deployment, spans):
        first, _ = await ask(deployment, spans, "local", count=1, conversation_id="c")
        spans.spans.clear()
        longer = [*PROMPT, *range(10, 60)]
        record, request = await ask(deployment, spans, "pull", count=2, conversation_id="c", prompt=longer)
    assert record["history"] == first["decode"]
    assert record["reused_tokens"]["returned"] > 0
    served = next(s for s in spans.below(spans.one("prefill leg")) if s.service == ENGINE)
    assert spans.one("return").parent_id == served.span_id
    assert spans.one("return").seconds == pytest.approx(record["phases"]["return"], abs=OFF_BY)
    assert request.attributes["kvhandoff.returned_tokens"] == record["reused_tokens"]["returned"]


async def test_aborted_requests_end_their_spans(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the router and on the engine, as failed and with a cause."""
    monkeypatch.setattr(traces, "SETTLE_S", 0.05)
    async with traced(tiny, monkeypatch) as (deployment, spans):
        with StepGate(deployment.decode[0]) as gate:
            gate.close()
            asked = asyncio.create_task(deployment.post({"prompt": PROMPT, "max_tokens": 4}, path="local"))
            await spans.has(lambda: gate.holds)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            request = await spans.request()
            await spans.has(lambda: spans.named(URL, ENGINE))
        await deployment.settled()
    assert (request.failed, request.attributes["error.type"]) == (True, "client_aborted")
    served = spans.one(URL, ENGINE)
    assert served.failed
    assert served.attributes["gen_ai.response.finish_reasons"] == ["abort"]


async def test_an_engines_refusal(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a router: a trace of the engine's own. A mistake of the client is no failure."""
    async with traced(tiny, monkeypatch) as (deployment, spans):
        engine = deployment.decode[0].url
        status, _ = await deployment.post({"prompt": PROMPT, "max_tokens": -1}, url=engine)
        assert status == 400
        await spans.has(lambda: spans.named(URL, ENGINE))
        served = spans.one(URL, ENGINE)
        assert (served.parent_id, served.failed) == ("", False)
        assert served.attributes["http.response.status_code"] == 400
        spans.spans.clear()
        status, _ = await deployment.post({"prompt": PROMPT, "max_tokens": 2}, url=engine)
        assert status == 200
        await spans.has(lambda: spans.named(URL, ENGINE))
        served = spans.one(URL, ENGINE)
        assert {span.name for span in spans.below(served)} >= {"decode_queue", "recompute", "first_step"}
        async with deployment.session.get(engine + "/metrics") as page:
            assert 'kvhandoff_engine_spans_total{result="exported"}' in await page.text()
