"""Who may have what of a router with a file of tenants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from kvhandoff.router import watched
from tests.router.callers import KEYS, bearer, security
from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import (
    MODEL,
    WAIT_S,
    Leg,
    MockEngine,
    events,
    failing,
    held,
    soon,
    streamed,
    until,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer kvh_wrong"},
        {"Authorization": f"Basic {KEYS['acme']}"},
        {"Authorization": KEYS["acme"]},
        {"Authorization": f"Bearer {KEYS['acme']}x"},
        {"Authorization": f"Bearer {KEYS['acme']} {KEYS['acme']}"},
        {"x-api-key": KEYS["acme"]},
    ],
)
async def test_no_key_no_answer(cluster: Any, tmp_path: Path, given: dict[str, str]) -> None:
    async with cluster(security=security(tmp_path)) as c:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
            async with c.session.request(method, c.url + path, headers=given) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"].startswith("Bearer")
                error = (await response.json())["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
                assert "kvh_" not in await response.text()
        assert c.p.legs.empty()
        assert c.d.legs.empty()
        assert 'kvhandoff_router_refused_total{code="invalid_api_key"} 3.0' in await c.text("/metrics")


async def test_two_keys_in_one_request(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path)) as c:
        headers = [("Authorization", f"Bearer {KEYS[name]}") for name in ("acme", "ops")]
        async with c.session.get(c.url + "/v1/models", headers=headers) as response:
            assert response.status == 401


async def test_a_key_opens(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path)) as c:
        for scheme in ("Bearer", "bearer", "BEARER "):
            headers = {"Authorization": f"{scheme} {KEYS['acme']}"}
            status, answer = await c.post(c.body(), headers=headers)
            assert (status, answer["choices"][0]["text"]) == (200, "Hello")


async def test_where_engines_are_is_for_operators(cluster: Any, tmp_path: Path) -> None:
    async def said(c: Any, name: str) -> str:
        return str((await c.post(c.body(), headers=bearer(name)))[1]["error"]["message"])

    async with cluster(security=security(tmp_path), timeouts=NO_ACCOUNT) as c:
        c.d.script = failing(500)
        assert await said(c, "acme") == "the decode engine gave no usable answer"
        assert c.d.url in await said(c, "ops")

        await c.d.kill()
        none = f"no decode engine for {MODEL!r} takes requests now"
        assert (await said(c, "ops")).startswith(f"{none}; decode engine {c.d.engine_id} at {c.d.url}: ")
        assert await said(c, "acme") == none


async def test_a_stream_that_breaks_off_names_no_address_to_tenants(cluster: Any, tmp_path: Path) -> None:
    async def breaks_off(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def before(index: int) -> None:
            if index == 1:
                await engine.gate.wait()
                assert leg.request.transport is not None
                leg.request.transport.abort()

        return await streamed(engine, leg, [events(leg, "a", "b")[0], b""], before=before)

    async with cluster(security=security(tmp_path), timeouts=NO_ACCOUNT) as c:
        c.d.script = breaks_off
        url, body = c.url + "/v1/completions", c.body(stream=True)
        async with c.session.post(url, json=body, headers=bearer("acme")) as response:
            await soon(response.content.readany())
            c.d.gate.set()
            rest = await soon(response.content.read())
        assert b"the decode engine ended before its answer was complete" in rest
        assert c.d.url.encode() not in rest


async def test_no_orders_from_web_pages(cluster: Any) -> None:
    """A browser sends a form to any address for any page, the reader's own router included."""
    async with cluster() as c:
        web_page = {"Origin": "http://elsewhere.example", "Content-Type": "text/plain"}
        order = {"engine": c.d.engine_id}
        for path in ("/v1/engines/drain", "/v1/handoffs/x/rebind"):
            status, answer = await c.post(order, path=path, headers=web_page)
            assert (status, answer["error"]["code"]) == (403, "cross_origin")
        status, engine = await c.post(order, path="/v1/engines/drain")
        assert (status, engine["drained"]) == (200, True)


async def test_the_key_goes_no_further(cluster: Any, tmp_path: Path) -> None:
    """Field case 60: engines get nothing of a client's that could steer a transfer."""
    steering = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254"},
        "request_id": "another's",
        "vllm_xargs": {"kv_transfer_params": "x"},
    }
    headers = bearer("acme") | {
        "x-prefiller-host-port": "169.254.169.254:80",
        "X-Request-Id": "another's",
        "Cookie": "a=b",
        "x-api-key": "k",
        "traceparent": TRACEPARENT,
    }
    async with cluster(security=security(tmp_path)) as c:
        assert (await c.post(c.body(**steering), headers=headers))[0] == 200
        for engine in (c.p, c.d):
            leg = engine.legs.get_nowait()
            names = {name.lower() for name in leg.headers}
            assert not names & {"authorization", "x-prefiller-host-port", "cookie", "x-api-key"}
            assert leg.headers["traceparent"] == TRACEPARENT
            assert leg.headers["X-Request-Id"] == leg.ticket.key.handoff_id != "another's"
            assert set(leg.body["kv_transfer_params"]) <= {"ticket", "prompt_token_ids"}
            assert leg.body["vllm_xargs"] == {}
            assert "request_id" not in leg.body


async def test_pages(cluster: Any, tmp_path: Path) -> None:
    """What is whose: nobody's, a tenant's, an operator's."""

    async def statuses(c: Any, path: str, method: str = "GET") -> list[int]:
        answers = []
        for headers in ({}, bearer("acme"), bearer("ops")):
            async with c.session.request(method, c.url + path, headers=headers) as response:
                answers.append(response.status)
        return answers

    async with cluster(security=security(tmp_path, open_pages=())) as c:
        assert await statuses(c, "/health") == [200, 200, 200]
        assert await statuses(c, "/v1/models") == [401, 200, 200]
        assert await statuses(c, "/v1/handoffs") == [401, 200, 200]
        assert await statuses(c, "/ready") == [401, 403, 200]
        assert await statuses(c, "/metrics") == [401, 403, 200]
        assert await statuses(c, "/v1/handoffs/x/rebind", "POST") == [401, 403, 404]
        assert await statuses(c, "/nowhere") == [401, 404, 404]
        assert await statuses(c, "/v1/completions") == [401, 405, 405]
        _, answer = await c.get("/metrics", headers=bearer("acme"))
        assert answer["error"]["code"] == "operator_only"
    async with cluster(security=security(tmp_path, open_pages=("metrics",))) as c:
        assert await statuses(c, "/ready") == [401, 403, 200]
        assert await statuses(c, "/metrics") == [200, 200, 200]


async def test_models_of_a_tenant(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path, {"models": ["small", MODEL]})) as c:
        assert [m["id"] for m in (await c.get("/v1/models", headers=bearer("acme")))[1]["data"]] == [MODEL]
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 200
        status, answer = await c.post(c.body(model="small"), headers=bearer("acme"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    async with cluster(security=security(tmp_path, {"models": ["small"]})) as c:
        assert (await c.get("/v1/models", headers=bearer("acme")))[1]["data"] == []
        for model in (MODEL, "nonsense"):
            status, answer = await c.post(c.body(model=model), headers=bearer("acme"))
            assert (status, answer["error"]["code"]) == (403, "model_not_allowed")
            assert answer["error"]["message"].endswith("allowed for acme is small")
            assert (await c.get(f"/v1/models/{model}", headers=bearer("acme")))[0] == 403
        assert c.p.legs.empty()
        assert c.d.legs.empty()
        assert (await c.post(c.body(), headers=bearer("beta")))[0] == 200


async def test_records_are_their_tenant_s(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path)) as c:
        _, answer = await c.post(c.body(), headers=bearer("acme"))
        path = f"/v1/handoffs/{answer['id']}"
        for name in ("acme", "ops"):
            status, record = await c.get(path, headers=bearer(name))
            assert (status, record["tenant"], record["status"]) == (200, "acme", 200)
        status, refused = await c.get(path, headers=bearer("beta"))
        missing = await c.get("/v1/handoffs/nothing", headers=bearer("beta"))
        assert (status, refused["error"]["code"]) == (404, "handoff_not_found")
        assert missing[0] == 404

        c.d.script = held
        request = c.start(c.body(), headers=bearer("acme"))
        await soon(c.d.legs.get())
        await soon(c.d.legs.get())
        for name, seen in (("acme", ["acme"]), ("beta", []), ("ops", ["acme"])):
            _, listed = await c.get("/v1/handoffs", headers=bearer(name))
            assert [record["tenant"] for record in listed["running"]] == seen
        c.d.gate.set()
        assert (await soon(request))[0] == 200


async def test_requests_at_a_time(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path, {"max_concurrency": 1}), timeouts=NO_ACCOUNT) as c:
        c.d.script = held
        first = c.start(c.body(), headers=bearer("acme"))
        await soon(c.d.legs.get())
        second = c.session.post(c.url + "/v1/completions", json=c.body(), headers=bearer("acme"))
        async with asyncio.timeout(WAIT_S), second as response:  # admitted, it would wait for the gate
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert response.headers["X-Request-Id"]
            error = (await response.json())["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"].startswith("max_concurrency: got 1 requests under way, allowed for acme is 1")
        other = c.start(c.body(), headers=bearer("beta"))
        await soon(c.d.legs.get())
        first.cancel()
        await soon(c.d.cancelled.get())
        await c.rested(c.p)
        again = c.start(c.body(), headers=bearer("acme"))
        await soon(c.d.legs.get())  # a client that left makes room
        c.d.gate.set()
        assert [(await soon(request))[0] for request in (other, again)] == [200, 200]


async def test_tokens_per_minute(cluster: Any, tmp_path: Path) -> None:
    """What may be used is set aside, and what was not used is put back when the engines have told."""
    async with cluster(security=security(tmp_path, {"tokens_per_minute": 60})) as c:
        _, answer = await c.post(c.body(), headers=bearer("acme"))  # 43 + 8 at most
        status, refused = await c.post(c.body(), headers=bearer("acme"))
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "a request of up to 51 tokens, allowed for acme is 60; try again in " in str(refused)
        assert (await c.post(c.body(), headers=bearer("beta")))[0] == 200
        await c.get(f"/v1/handoffs/{answer['id']}", headers=bearer("acme"))  # their accounts: 4 + 2
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 200
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 429


async def test_what_is_refused_costs_nothing(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path, {"tokens_per_minute": 60})) as c:
        for _ in range(5):
            assert (await c.post(c.body(model="x"), headers=bearer("acme")))[0] == 404
            assert (await c.post(c.body(cache_salt=5), headers=bearer("acme")))[0] == 400
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 200


async def test_what_nobody_accounts_for_stays_spent(cluster: Any, tmp_path: Path) -> None:
    """Several prompts go without a ticket, so that no engine tells what they took."""
    async with cluster(security=security(tmp_path, {"tokens_per_minute": 60})) as c:
        c.d.script = plain
        status, answer = await c.post(c.body(prompt=["a", "b"], max_tokens=30), headers=bearer("acme"))
        assert status == 200
        await c.get(f"/v1/handoffs/{answer['id']}", headers=bearer("acme"))
        status, refused = await c.post(c.body(prompt="a", max_tokens=30), headers=bearer("acme"))
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")


async def plain(engine: Any, leg: Any) -> aiohttp.web.Response:
    return aiohttp.web.json_response({"id": "cmpl-plain", "choices": [{"index": 0, "text": "Hello"}]})


async def test_a_new_file_is_taken_up(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.01)

    async def answers(status: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/v1/models", headers=bearer("acme")))[0] != status:
                pass

    async with cluster(security=security(tmp_path)) as c:
        await answers(200)
        security(tmp_path, {"keys": []})
        await answers(401)
        security(tmp_path)
        await answers(200)


async def test_what_is_used_outlives_a_new_file(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.01)
    async with cluster(security=security(tmp_path, {"tokens_per_minute": 60})) as c:
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 200
        security(tmp_path, {"tokens_per_minute": 61}, open_pages=())
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/ready"))[0] != 401:
                pass
        status, refused = await c.post(c.body(), headers=bearer("acme"))  # 51 of 61 are spent
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "allowed for acme is 61; try again in " in refused["error"]["message"]


async def test_openai_client(cluster: Any, tmp_path: Path) -> None:
    """Unmodified, each refusal is the exception that its users expect."""
    limits = {"models": [MODEL], "tokens_per_minute": 10}
    async with cluster(security=security(tmp_path, limits)) as c:

        async def ask(key: str, model: str = MODEL) -> Any:
            client = openai.AsyncOpenAI(api_key=key, base_url=f"{c.url}/v1", max_retries=0)
            async with client:
                return await client.completions.create(model=model, prompt="hi", max_tokens=8)

        assert (await ask(KEYS["acme"])).choices[0].text == "Hello"
        with pytest.raises(openai.AuthenticationError) as unknown:
            await ask("kvh_wrong")
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await ask(KEYS["acme"], "large")
        assert denied.value.code == "model_not_allowed"
        with pytest.raises(openai.RateLimitError) as limited:
            await ask(KEYS["acme"])
        assert limited.value.code == "rate_limit_exceeded"
        assert int(limited.value.response.headers["Retry-After"]) > 0


async def test_a_client_s_leaving_reaches_both_engines(cluster: Any, tmp_path: Path) -> None:
    """Field case 30, pushed: both legs are closed, and the tenant has its place again."""
    async with cluster(security=security(tmp_path, {"max_concurrency": 1}), timeouts=NO_ACCOUNT) as c:
        c.p.script = c.d.script = held
        headers = bearer("acme") | {"x-kvhandoff-path": "push"}
        request = c.start(c.body(stream=True), headers=headers)
        legs = [await soon(c.p.legs.get()), await soon(c.d.legs.get())]
        request.cancel()
        assert [await soon(engine.cancelled.get()) for engine in (c.p, c.d)] == legs
        await until(lambda: not c.p.withdrawn.empty())
        await c.at_rest()
        c.p.gate.set()
        c.d.gate.set()
        assert (await c.post(c.body(), headers=bearer("acme")))[0] == 200
