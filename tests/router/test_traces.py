"""The router's traces: one for each request, whatever becomes of it, and of the collector."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvhandoff import tracing
from kvhandoff.core.phases import Phase
from kvhandoff.router import traces
from tests.collector import Collector, collector
from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import WAIT_S, decode, failing, held, once, soon
from tests.router.test_leaving import leave

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENTED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
SERVER, CLIENT = 2, 3
"""Kinds of spans."""


@pytest.fixture
async def spans(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    async with collector(monkeypatch) as running:
        yield running


def check_phases(spans: Collector, record: dict[str, Any]) -> None:
    """Each phase of the record is one span, as long as the record says."""
    for name, seconds in (record["phases"] | record["prefill_phases"]).items():
        assert spans.one(name).seconds == pytest.approx(seconds, abs=1e-6), name
    names = [span.name for span in spans.spans if span.name in set(Phase)]
    assert sorted(names) == sorted(record["phases"] | record["prefill_phases"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["pull", "push", "local"])
async def test_one_trace_with_a_span_for_each_leg_and_phase(
    cluster: Any, spans: Collector, path: str, stream: bool
) -> None:
    """Field case 64: no opaque span. The mock engines give out none themselves."""
    async with cluster(traces=spans.url) as c:
        headers = {"x-kvhandoff-path": path}
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=stream), headers=headers
        ) as response:
            assert response.status == 200
            identifier = response.headers["X-Request-Id"]
            await response.read()
        await c.at_rest()
        record = await c.record(identifier)
        request = await spans.request()
        await spans.has(lambda: len(spans.named("prefill leg")) == (path != "local"))

    assert {span.trace_id for span in spans.spans} == {request.trace_id} == {record["trace_id"]}
    assert (request.parent_id, request.kind, request.failed) == ("", SERVER, False)
    legs = [("prefill leg", c.p)] if path != "local" else []
    legs.append(("local leg" if path == "local" else "decode leg", c.d))
    for name, engine in legs:
        leg, sent = spans.one(name), engine.legs.get_nowait()
        context, _, flags = sent.headers["traceparent"].rpartition("-")
        assert context == f"00-{request.trace_id}-{leg.span_id}"
        assert int(flags, 16) & 1  # sampled
        assert (leg.parent_id, leg.kind, leg.failed) == (request.span_id, CLIENT, False)
        assert leg.attributes["kvhandoff.engine"] == engine.engine_id
        assert leg.attributes["server.port"] == engine.port
        below = {span.name for span in spans.below(leg)}
        assert f"{engine.role}_network" in below
        assert below <= {phase.value for phase in Phase} - {"route", "retry", "bind"}
    check_phases(spans, record)
    own = {"route", "bind"} if path == "pull" else {"route"}
    assert {span.name for span in spans.below(request)} == own | {name for name, _ in legs}

    said = request.attributes
    assert said["gen_ai.request.model"] == record["model"]
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (4, 2)
    assert said["gen_ai.usage.cache_read.input_tokens"] == (0 if path == "local" else 1)
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["gen_ai.response.id"] == record["id"]
    assert said["gen_ai.response.time_to_first_chunk"] == pytest.approx(record["ttft_s"])
    assert said["http.response.status_code"] == 200
    assert (said["kvhandoff.path"], said["kvhandoff.reasons"]) == (path, record["reasons"])
    assert said["kvhandoff.bytes"] == record["bytes"]


async def test_phases_stand_where_they_happened(cluster: Any, spans: Collector) -> None:
    """On this process's clock, in order, inside the spans they are parts of."""
    async with cluster(traces=spans.url, path="pull") as c:
        _, answer = await c.post(c.body())
        await c.record(answer["id"])
        request = await spans.request()
    prefill, decode_leg = spans.one("prefill leg"), spans.one("decode leg")
    assert spans.one("route").start_ns == request.start_ns
    assert spans.one("prefill_network").start_ns == prefill.start_ns
    assert spans.one("prefill_network").end_ns == spans.one("prefill_queue").start_ns
    assert prefill.end_ns <= decode_leg.start_ns
    assert spans.one("bind").end_ns == pytest.approx(decode_leg.start_ns, abs=1000)
    assert spans.one("decode_network").start_ns == decode_leg.start_ns
    inside = [span for span in spans.spans if span is not request]
    assert all(request.start_ns <= span.start_ns <= span.end_ns for span in inside)
    assert all(span.end_ns <= request.end_ns for span in (prefill, decode_leg))


async def test_the_clients_trace_goes_on(cluster: Any, spans: Collector) -> None:
    async with cluster(traces=spans.url, path="pull") as c:
        _, answer = await c.post(c.body(), headers=PARENTED)
        assert (await c.record(answer["id"]))["trace_id"] == TRACE
        request = await spans.request()
        assert (request.trace_id, request.parent_id, request.state) == (TRACE, PARENT, "vendor=x")
        for engine in (c.p, c.d):
            headers = engine.legs.get_nowait().headers
            assert headers["traceparent"].startswith(f"00-{TRACE}-")
            assert PARENT not in headers["traceparent"]
            assert headers["tracestate"] == "vendor=x"


async def test_a_state_that_engines_could_not_read_stops_here(cluster: Any, spans: Collector) -> None:
    long = ",".join(f"k{i}={'v' * 256}" for i in range(30))  # W3C allows as much
    async with cluster(traces=spans.url, path="pull") as c:
        status, _ = await c.post(c.body(), headers=PARENTED | {"tracestate": long})
        assert status == 200
        for engine in (c.p, c.d):
            headers = engine.legs.get_nowait().headers
            assert headers["traceparent"].startswith(f"00-{TRACE}-")
            assert "tracestate" not in headers


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "x",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01",
        "00-" + "f" * 5000,
    ],
)
async def test_a_malformed_context_begins_a_new_trace(cluster: Any, spans: Collector, malformed: str) -> None:
    async with cluster(traces=spans.url, path="pull") as c:
        status, answer = await c.post(c.body(), headers={"traceparent": malformed, "tracestate": "vendor=x"})
        assert status == 200
        await c.record(answer["id"])
        request = await spans.request()
        assert request.parent_id == ""
        assert request.trace_id != TRACE
        for engine in (c.p, c.d):
            headers = engine.legs.get_nowait().headers
            assert headers["traceparent"].startswith(f"00-{request.trace_id}-")
            assert "tracestate" not in headers  # of no trace that we are part of


async def test_what_the_client_does_not_sample_is_not_sent(cluster: Any, spans: Collector) -> None:
    """And the engines are told so; the id is the client's all the same."""
    async with cluster(traces=spans.url, path="pull") as c:
        _, answer = await c.post(c.body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert (await c.record(answer["id"]))["trace_id"] == TRACE
        _, sampled = await c.post(c.body())
        await c.record(sampled["id"])
        request = await spans.request()
        headers = [engine.legs.get_nowait().headers["traceparent"] for engine in (c.p, c.d)]
    assert all(header.startswith(f"00-{TRACE}-") and header.endswith("-00") for header in headers)
    assert {span.trace_id for span in spans.spans} == {request.trace_id}
    assert request.trace_id != TRACE


async def test_the_sampler_is_that_of_the_environment(
    cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
    async with cluster(traces=spans.url, path="pull") as c:
        await c.record((await c.post(c.body()))[1]["id"])
        await c.record((await c.post(c.body(), headers=PARENTED))[1]["id"])
        await spans.has(lambda: spans.named("POST /v1/completions"))
    assert {span.trace_id for span in spans.spans} == {TRACE}
    assert {span.service for span in spans.spans} == {"front-door"}


async def test_failed_legs_and_requests(
    cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(traces=spans.url, path="pull", timeouts=NO_ACCOUNT) as c:
        c.d.script = once(failing(500))
        status, answer = await c.post(c.body())
        assert status == 200
        record = await c.record(answer["id"])
        assert record["attempts"] == 2
        request = await spans.request()
        assert not request.failed  # the client has its answer
        assert [leg.failed for leg in spans.named("decode leg")] == [True, False]
        assert [leg.attributes["kvhandoff.attempt"] for leg in spans.named("decode leg")] == [0, 1]
        assert spans.named("decode leg")[0].attributes["error.type"] == "broken"
        assert spans.one("retry").seconds == pytest.approx(record["phases"]["retry"], abs=1e-6)

        monkeypatch.setattr(traces, "SETTLE_S", 0.01)  # there is no account to wait for
        c.d.script = failing(500)
        status, answer = await c.post(c.body())
        assert status == 502
        request = await spans.request(2)
        assert request.failed
        assert request.attributes["error.type"] == "decode_failed"
        assert request.attributes["http.response.status_code"] == 502
        assert "decode_failed" in request.attributes["kvhandoff.reasons"]

        c.d.script = decode
        status, answer = await c.post({"model": "nobody's", "prompt": "x"})
        assert status == 404
        request = await spans.request(3)  # the client's mistake is no failure of the server
        assert (request.failed, request.attributes["http.response.status_code"]) == (False, 404)


async def test_a_client_that_leaves(cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine has no account to give: the span is given out all the same, a little later."""
    monkeypatch.setattr(traces, "SETTLE_S", 0.01)
    async with cluster(traces=spans.url, path="pull") as c:
        c.d.script = held
        asked = c.start(c.body())
        await soon(c.d.legs.get())
        await leave(asked)
        request = await spans.request()
    assert request.failed
    assert request.attributes["error.type"] == "client_aborted"
    assert request.attributes["http.response.status_code"] == 499
    assert request.attributes["kvhandoff.incomplete"] is True
    leg = spans.one("decode leg")
    assert (leg.failed, leg.attributes["error.type"]) == (True, "cancelled")


async def test_what_is_open_at_the_end_is_given_out(cluster: Any, spans: Collector) -> None:
    """The router ends before the engines' accounts are in."""
    async with cluster(traces=spans.url, path="pull") as c:
        assert (await c.post(c.body()))[0] == 200
    assert (await spans.request()).attributes["kvhandoff.incomplete"] is True


async def lost(c: Any) -> float:
    page: str = await c.text("/metrics")
    for line in page.splitlines():
        if line.startswith('kvhandoff_router_spans_total{result="lost"}'):
            return float(line.split()[1])
    return 0.0


async def counted(c: Any, at_least: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await lost(c) < at_least:  # noqa: ASYNC110  another thread's counter
            await asyncio.sleep(0.01)


async def test_a_dead_collector_does_no_harm(
    cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are answered; spans are counted as lost, and the log says it once, without the URL's key."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.3")  # it tries twice
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    async with cluster(traces="http://127.0.0.1:9/v1/traces?key=secret", path="pull") as c:
        for lost_before in (0, 12):
            status, answer = await c.post(c.body())
            assert status == 200
            await c.record(answer["id"])
            await counted(c, lost_before + 12)
    said = [record.getMessage() for record in caplog.records if "traces:" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("traces: spans are lost: ")
    assert "refused" in said[0]
    assert "secret" not in caplog.text


async def test_a_collector_that_refuses_and_comes_back(
    cluster: Any, spans: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spans.status = 400
    async with cluster(traces=spans.url, path="pull") as c:
        await c.record((await c.post(c.body()))[1]["id"])
        await counted(c, 3)
        spans.status = 200
        await c.record((await c.post(c.body()))[1]["id"])
        await spans.request()
        await spans.has(lambda: "takes spans again" in caplog.text)
        assert 'kvhandoff_router_spans_total{result="exported"}' in await c.text("/metrics")
    assert caplog.text.count("traces: spans are lost") == 1


async def test_a_slow_collector_holds_up_nothing(
    cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit the queue is lost, and counted; nor does the end of the router wait for it."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    spans.gate.clear()
    async with cluster(traces=spans.url, path="pull") as c:
        for _ in range(3):
            status, answer = await c.post(c.body())
            assert status == 200
            await c.record(answer["id"])
        ended = 3 * (1 + 2 + 9)  # requests, legs, phases
        assert await lost(c) == ended - 4
        await spans.has(lambda: spans.batches == 1)
    assert spans.spans == []


async def test_the_queue_empties(cluster: Any, spans: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been sent makes room for what comes: nothing is lost by a collector that keeps up."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "12")  # the spans of one request
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "12")
    async with cluster(traces=spans.url, path="pull") as c:
        for sent in (1, 2, 3):
            await c.record((await c.post(c.body()))[1]["id"])
            await spans.has(lambda sent=sent: len(spans.spans) == sent * 12)  # type: ignore[misc]
            async with asyncio.timeout(WAIT_S):
                while f'spans_total{{result="exported"}} {sent * 12}.0' not in await c.text("/metrics"):
                    pass  # the answer is not back yet
        assert await lost(c) == 0


async def test_without_traces_the_clients_context_passes_through(cluster: Any) -> None:
    async with cluster(path="pull") as c:
        _, answer = await c.post(c.body(), headers=PARENTED)
        assert (await c.record(answer["id"]))["trace_id"] == ""
        for engine in (c.p, c.d):
            headers = engine.legs.get_nowait().headers
            assert {name: headers[name] for name in PARENTED} == PARENTED


def test_without_traces_nothing_of_opentelemetry_is_loaded() -> None:
    program = """
import asyncio, sys
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
import kvhandoff.cli.router, kvhandoff.cli.engine, kvhandoff.cli.up, kvhandoff.router.upstream

async def main():
    config = RouterConfig(decode=("http://127.0.0.1:9",), cluster_key=b"k", port=0)
    await (await serve(config)).close()

asyncio.run(main())
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
