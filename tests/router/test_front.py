"""The endpoints: bad input, readiness, metrics, records."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.phases import Phase
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from tests.router.engines import (
    CLUSTER_KEY,
    WAIT_S,
    Leg,
    MockEngine,
    decode,
    failing,
    held,
    prefill,
    soon,
    until,
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("raw", "status", "param", "code", "message"),
    [
        (b"", 400, "body", None, "must be a JSON object (it is empty)"),
        (b"no json", 400, "body", None, "must be a JSON object"),
        (b"[]", 400, "body", None, "must be a JSON object"),
        (b'{"prompt":' + b"[" * 50_000, 400, "body", None, "be a JSON object (it is nested too deeply)"),
        (b"[" * 100_000, 400, "body", None, "must be a JSON object"),
        (b"{}", 400, "model", None, "model: it is missing, allowed is tiny"),
        (b'{"model":5}', 400, "model", None, "model: got 5, allowed is a string: tiny"),
        (b'{"model":null}', 400, "model", None, "model: got null, allowed is a string: tiny"),
        (b'{"model":[' + b"1," * 2000 + b"1]}", 400, "model", None, "model: got [1,1,1,"),
        (b'{"model":""}', 404, "model", "model_not_found", "model: got '', allowed is tiny"),
        (b'{"model":"gpt"}', 404, "model", "model_not_found", "model: got 'gpt', allowed is tiny"),
        (b'{"model":"' + b"x" * 2000 + b'"}', 404, "model", "model_not_found", "allowed is tiny"),
        (b'"' + b"x" * 200_000 + b'"', 413, "body", "body_too_large", "more than the allowed 100000 bytes"),
    ],
)
async def test_bad_bodies(
    cluster: Any, path: str, raw: bytes, status: int, param: str, code: str | None, message: str
) -> None:
    async with cluster(max_body_bytes=100_000) as c:
        async with c.session.post(c.url + path, data=raw) as response:
            body = await response.json()
            assert response.status == status
        error = body["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert message in error["message"]
        assert len(error["message"]) < 300
        assert set(error) == {"message", "type", "param", "code"}
        # It has a record too, and the service is as before.
        record = await c.record(response.headers["X-Request-Id"])
        assert (record["status"], record["path"]) == (status, None)
        assert (await c.post(c.body()))[0] == 200


@pytest.mark.parametrize("header", ["x-session-id", "traceparent", "x-request-id"])
async def test_headers_that_are_no_utf8(cluster: Any, header: str) -> None:
    async with cluster() as c:
        reader, writer = await asyncio.open_connection(*c.address)
        body = json.dumps(c.body()).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n" + header.encode() + b": \xe9\r\n\r\n" + body)
        answer = await soon(reader.read())
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        assert c.d.legs.qsize() == 1


async def test_body_without_a_length_is_bounded_too(cluster: Any) -> None:
    async def parts() -> Any:
        for _ in range(10):
            yield b"x" * 50_000

    async with (
        cluster(max_body_bytes=100_000) as c,
        c.session.post(c.url + "/v1/completions", data=parts()) as response,
    ):
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"


async def test_body_that_says_it_is_too_large_is_not_waited_for(cluster: Any) -> None:
    async with cluster(max_body_bytes=100_000) as c:
        reader, writer = await asyncio.open_connection(*c.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100001\r\n\r\n{")
        answer = await soon(reader.readuntil(b"}}"))
        assert b"413" in answer.split(b"\r\n")[0]
        writer.close()


async def test_body_that_does_not_come(cluster: Any) -> None:
    async with cluster(timeouts={"body_s": 0.05}) as c:
        reader, writer = await asyncio.open_connection(*c.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n{")
        answer = await soon(reader.readuntil(b"}}"))
        assert b"408" in answer.split(b"\r\n")[0]
        assert b"body_timeout" in answer
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("PUT", "/v1/chat/completions", 405, "method_not_supported"),
        ("POST", "/v1/models", 405, "method_not_supported"),
        ("POST", "/v1/models/tiny", 405, "method_not_supported"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/org/tiny", 404, "model_not_found"),
        ("POST", "/v1/handoffs/x", 405, "method_not_supported"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/internal/withdraw", 404, "unknown_url"),
        ("GET", "/internal/state", 404, "unknown_url"),
        ("GET", "/v1/handoffs/unknown", 404, "handoff_not_found"),
    ],
)
async def test_wrong_urls(cluster: Any, method: str, path: str, status: int, code: str) -> None:
    async with cluster() as c, c.session.request(method, c.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code
        assert ("Allow" in response.headers) is (status == 405)


async def test_health_and_ready(cluster: Any) -> None:
    async with cluster(decode=2, poll_interval_s=0.02) as c:
        assert await c.get("/health") == (200, {"status": "ok"})
        status, ready = await c.get("/ready")
        assert (status, ready["status"]) == (200, "ready")
        assert [engine["healthy"] for engine in ready["engines"]] == [True] * 3
        await c.d.kill()
        await c.decode[1].kill()
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[0] == 200:
                pass
        status, ready = await c.get("/ready")
        assert (status, ready["status"]) == (503, "no decode engine takes requests")
        assert "Cannot connect" in ready["engines"][1]["problem"]
        assert (await c.get("/health"))[0] == 200
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "no_decode_engine")
        await c.d.start()
        await c.decode[1].start()
        await c.healthy()
        assert (await c.post(c.body()))[0] == 200


async def test_no_engine_was_ever_there() -> None:
    config = RouterConfig(decode=("http://127.0.0.1:1",), cluster_key=CLUSTER_KEY, port=0)
    server = await serve(config)
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.port}"
            async with session.post(f"{url}/v1/completions", json={"model": "m", "prompt": "p"}) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_decode_engine"
            async with session.get(f"{url}/v1/models") as response:
                assert (await response.json())["data"] == []
            async with session.get(f"{url}/ready") as response:
                assert response.status == 503
    finally:
        await server.close()


async def test_port_in_use(cluster: Any) -> None:
    async with cluster() as c:
        port = c.address[1]
        config = RouterConfig(decode=(c.d.url,), cluster_key=CLUSTER_KEY, port=port)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1: can't listen .the port is in use"):
            await serve(config)
        assert (await c.post(c.body()))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["pull", "local"])
async def test_record(cluster: Any, stream: bool, path: str) -> None:
    """Field cases 49 and 64: the phases of both engines and of the router add up to the TTFT."""
    async with cluster() as c:
        body = c.chat_body(stream=stream)
        async with c.session.post(
            c.url + "/v1/chat/completions", json=body, headers={"x-kvhandoff-path": path}
        ) as response:
            await response.read()
        handoff_id = c.d.legs.get_nowait().ticket.key.handoff_id
        assert response.headers["X-Request-Id"] == handoff_id
        record = await c.record(f"chatcmpl-{handoff_id}")
        assert record == await c.record(handoff_id)
        assert record["incomplete"] is False
        assert (record["status"], record["path"], record["attempts"]) == (200, path, 1)
        assert record["ttft_s"] == pytest.approx(sum(record["phases"].values()), abs=1e-3)
        assert 0 < record["ttft_s"] <= record["total_s"]
        router = ["route", "prefill_network", "bind", "decode_network"]
        engines = ["prefill_queue", "prefill_compute", "prefill_offer", "decode_queue", "first_step"]
        if path == "local":
            router, engines = ["route", "decode_network"], ["decode_queue", "first_step"]
        order = [phase.value for phase in Phase]
        assert list(record["phases"]) == sorted(router + engines, key=order.index)
        assert all(seconds >= 0 for seconds in record["phases"].values())
        assert (record["first_byte_s"] is not None) is stream
        pulled = path == "pull"
        assert record["kv_source"] == ("transferred" if pulled else "local")
        assert (record["bytes"], record["blocks"], record["descriptors"]) == (
            (4096, 1, 1) if pulled else (0, 0, 0)
        )
        assert record["reused_tokens"] == {
            "prefill_cache": 1 if pulled else 0,
            "decode_cache": 0,
            "transferred": 3 if pulled else 0,
            "returned": 0,
        }
        assert record["computed_tokens"] == {"prefill": 3 if pulled else 0, "decode": 1 if pulled else 4}
        assert (record["prompt_tokens"], record["completion_tokens"]) == (4, 2)
        assert record["finish_reason"] == "stop"
        identities = {
            engine.role: {"engine_id": engine.engine_id, "epoch": engine.identity.epoch}
            for engine in c.engines
        }
        assert record["decode"] == identities["decode"]
        assert record["prefill"] == (identities["prefill"] if pulled else None)


async def test_record_waits_for_an_account_that_is_late(cluster: Any) -> None:
    """An engine may write its account down only after its last byte has arrived."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        response = await decode(engine, leg)
        held_back.append(engine.records.pop())
        return response

    held_back: list[Any] = []
    async with cluster() as c:
        c.d.script = script
        _, answer = await c.post(c.body())
        c.d.cursors.clear()
        asked = asyncio.create_task(c.record(answer["id"]))
        await until(lambda: c.d.cursors)
        c.d.records += held_back
        assert (await asked)["incomplete"] is False


async def test_record_of_a_dead_engine_is_incomplete(cluster: Any) -> None:
    """The account died with the engine; the record says so, and does not wait for it."""
    async with cluster(timeouts={"record_s": 1000.0}) as c:
        _, answer = await c.post(c.body())
        await c.p.kill()
        record = await soon(c.record(answer["id"]))
        assert record["incomplete"] is True
        assert record["kv_source"] == "transferred"
        assert record["ttft_s"] == pytest.approx(sum(record["phases"].values()), abs=1e-3)
        # The same for an engine that has another life by now.
        _, answer = await c.post(c.body())
        await c.d.restart()
        record = await soon(c.record(answer["id"]))
        assert (record["incomplete"], record["ttft_s"]) == (True, None)


async def test_record_of_a_running_request(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = held
        request = c.start(c.body())
        leg = await soon(c.d.legs.get())
        record = await c.record(leg.ticket.key.handoff_id)
        assert (record["status"], record["incomplete"], record["path"]) == (None, True, "pull")
        c.d.gate.set()
        assert (await request)[0] == 200


async def test_old_records_go(cluster: Any) -> None:
    async with cluster(max_records=2) as c:
        ids = [(await c.post(c.body()))[1]["id"] for _ in range(3)]
        assert (await c.get(f"/v1/handoffs/{ids[0]}"))[0] == 404
        assert (await c.get(f"/v1/handoffs/{ids[1]}"))[0] == 200


async def test_metrics(cluster: Any) -> None:
    """Field case 63: choices, declines and failures are told apart."""
    async with cluster() as c:
        for path in ("pull", "local"):
            _, answer = await c.post(c.body(), headers={"x-kvhandoff-path": path})
            await c.record(answer["id"])
        c.p.script = failing(500)
        # Forced too: what a loaded machine has taught the cost model may make it push.
        await c.post(c.chat_body(), path="/v1/chat/completions", headers={"x-kvhandoff-path": "pull"})
        await c.post({"model": "unknown"})
        page = await c.text("/metrics")
        for line in [
            'kvhandoff_router_requests_total{endpoint="completions",path="pull",status="200"} 1.0',
            'kvhandoff_router_requests_total{endpoint="completions",path="local",status="200"} 1.0',
            'kvhandoff_router_requests_total{endpoint="chat_completions",path="local",status="200"} 1.0',
            'kvhandoff_router_requests_total{endpoint="completions",path="none",status="404"} 1.0',
            'kvhandoff_router_reasons_total{kind="choice",reason="forced"} 3.0',
            'kvhandoff_router_reasons_total{kind="failure",reason="prefill_failed"} 1.0',
            'kvhandoff_router_ttft_seconds_count{path="pull"} 1.0',
            'kvhandoff_router_phase_seconds_count{phase="prefill_compute"} 1.0',
            'kvhandoff_router_phase_seconds_count{phase="first_step"} 2.0',
            f'kvhandoff_router_engine_healthy{{engine="{c.p.url}",role="prefill"}} 1.0',
            "kvhandoff_router_in_flight 0.0",
        ]:
            assert line in page


async def test_metrics_of_transfers(cluster: Any) -> None:
    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        response = await decode(engine, leg)
        engine.records[-1].early_bytes = 4000
        return response

    async def returning(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        response = await prefill(engine, leg)
        engine.records[-1].transferred_tokens, engine.records[-1].bytes = 2, 2048
        return response

    async with cluster(decode=2) as c:
        c.p.script, c.d.script = returning, script
        _, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "push"})
        await c.record(answer["id"])
        page = await c.text("/metrics")
        for engine in c.decode:  # it is the other's turn
            engine.script = failing(500) if engine.legs.empty() else decode
        _, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "push"})
        await c.record(answer["id"])
        later = await c.text("/metrics")
        for line in [
            'kvhandoff_router_requests_total{endpoint="completions",path="push",status="200"} 1.0',
            'kvhandoff_router_ttft_seconds_count{path="push"} 1.0',
            "kvhandoff_router_rebinds_total 0.0",
            "kvhandoff_router_returned_tokens_total 2.0",
            'kvhandoff_router_moved_bytes_total{part="early"} 4000.0',
            'kvhandoff_router_moved_bytes_total{part="late"} 96.0',
            'kvhandoff_router_moved_bytes_total{part="return"} 2048.0',
        ]:
            assert line in page
        assert "kvhandoff_router_rebinds_total 1.0" in later
        assert 'kvhandoff_router_reasons_total{kind="choice",reason="rebound"} 1.0' in later


async def test_load_is_reserved_at_the_decision(cluster: Any) -> None:
    """A burst that comes between two state reports is spread all the same."""
    async with cluster(prefill=2, decode=2) as c:
        for engine in c.engines:
            engine.script = held
        requests = [c.start(c.body()) for _ in range(10)]
        await until(lambda: sum(engine.legs.qsize() for engine in c.prefill) == 10)
        assert [engine.legs.qsize() for engine in c.prefill] == [5, 5]
        for engine in c.prefill:
            engine.gate.set()
        await until(lambda: sum(engine.legs.qsize() for engine in c.decode) == 10)
        assert [engine.legs.qsize() for engine in c.decode] == [5, 5]
        for engine in c.decode:
            engine.gate.set()
        assert [status for status, _ in await soon(asyncio.gather(*requests))] == [200] * 10
        await c.at_rest()


async def test_logs_hold_no_secrets(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with cluster() as c:
            c.p.script = failing(500)
            await c.post(c.body(prompt="private " * 10), headers={"Authorization": "Bearer private"})
            await c.d.kill()
            await c.post(c.body(prompt="private " * 10))
            tickets = [json.dumps(leg.body["kv_transfer_params"]) for leg in list(c.p.legs._queue)]
        text = "\n".join(message for message in caplog.messages)
        assert "prefill engine" in text
        assert "private" not in text
        assert CLUSTER_KEY.decode() not in text
        assert not any(json.loads(ticket)["ticket"] in text for ticket in tickets)


def test_starts_without_torch() -> None:
    """The router's machine needs no model code."""
    program = (
        "import sys, kvhandoff.router.app\n"
        "found = {'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
