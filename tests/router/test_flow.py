"""The usual flows: pull and local, JSON and stream, and what each leg is sent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from kvhandoff.core.ids import HandoffKey
from tests.router.conftest import LONG_PROMPT
from tests.router.engines import (
    DONE,
    MODEL,
    PROMPT_TOKENS,
    WAIT_S,
    Leg,
    MockEngine,
    decode,
    events,
    failing,
    once,
    soon,
    streamed,
    until,
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_pull(cluster: Any, path: str) -> None:
    async with cluster() as c:
        body = c.chat_body(max_tokens=8) if "chat" in path else c.body()
        status, answer = await c.post(body, path=path)
        p, d = c.p.legs.get_nowait(), c.d.legs.get_nowait()
        handoff_id = p.ticket.key.handoff_id
        assert status == 200
        assert answer["id"] == f"{'chatcmpl' if 'chat' in path else 'cmpl'}-{handoff_id}"
        assert (p.path, d.path) == (path, path)
        assert p.ticket.leg == "prefill"
        assert p.ticket.audience == c.p.identity
        assert d.ticket.leg == "decode"
        assert d.ticket.audience == c.d.identity
        assert d.ticket.key == p.ticket.key == HandoffKey(handoff_id, 0)
        assert d.ticket.offer.key == p.ticket.key
        assert d.ticket.offer.source == c.p.identity
        assert d.ticket.on_miss == "recompute"
        assert d.body["kv_transfer_params"]["prompt_token_ids"] == PROMPT_TOKENS
        assert p.headers["X-Request-Id"] == d.headers["X-Request-Id"] == handoff_id
        assert p.body["max_tokens"] == 1
        assert p.body["stream"] is False
        assert d.body["max_tokens"] == 8
        assert c.p.withdrawn.empty()


async def test_local(cluster: Any) -> None:
    async with cluster(path="local") as c:
        status, answer = await c.post(c.body(cache_salt="s"))
        leg = c.d.legs.get_nowait()
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        assert leg.ticket.leg == "local"
        assert leg.ticket.offer is None
        assert leg.ticket.cache_salt == "s"
        assert set(leg.body["kv_transfer_params"]) == {"ticket"}
        assert c.p.legs.empty()
        record = await c.record(answer["id"])
        assert (record["path"], record["requested_path"], record["kv_source"]) == ("local", "local", "local")
        assert record["reasons"] == ["forced"]
        assert record["prefill"] is None


async def test_salt_is_in_both_tickets(cluster: Any) -> None:
    async with cluster() as c:
        await c.post(c.body(cache_salt="tenant-a"))
        assert c.p.legs.get_nowait().ticket.cache_salt == "tenant-a"
        assert c.d.legs.get_nowait().ticket.cache_salt == "tenant-a"


@pytest.mark.parametrize(
    ("header", "path", "reasons"),
    [("local", "local", ["forced"]), ("pull", "pull", ["forced"]), ("auto", "pull", [])],
)
async def test_header_forces_the_path(cluster: Any, header: str, path: str, reasons: list[str]) -> None:
    async with cluster() as c:
        _, answer = await c.post(c.body(), headers={"x-kvhandoff-path": header})
        record = await c.record(answer["id"])
        assert (record["requested_path"], record["path"], record["reasons"]) == (header, path, reasons)


async def test_bad_path_header(cluster: Any) -> None:
    async with cluster() as c:
        status, answer = await c.post(c.body(), headers={"x-kvhandoff-path": "shove"})
        assert status == 400
        wanted = "x-kvhandoff-path: got 'shove', allowed is auto, pull, push, local"
        assert answer["error"]["message"] == wanted
        assert answer["error"]["param"] == "x-kvhandoff-path"
        assert c.p.legs.empty()
        assert c.d.legs.empty()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "short"}, "short_prompt"),
        ({"prompt": [1, 2, 3]}, "short_prompt"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_auto_stays_local(cluster: Any, fields: dict[str, Any], reason: str) -> None:
    async with cluster() as c:
        _, answer = await c.post(c.body(**fields))
        record = await c.record(answer["id"])
        assert (record["path"], record["reasons"]) == ("local", [reason])
        assert c.p.legs.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_go_without_a_ticket(cluster: Any, stream: bool) -> None:
    """The engine serves each prompt alone, under ids of its own; the record is found by the answer's."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        assert "kv_transfer_params" not in leg.body
        if not stream:
            return web.json_response({"id": "cmpl-theirs", "choices": []})
        return await streamed(engine, leg, [b'data: {"id":"cmpl-theirs","choices":[{"text":"a"}]}\n\n', DONE])

    async with cluster() as c:
        c.d.script = script
        body = c.body(prompt=[LONG_PROMPT, LONG_PROMPT], stream=stream, kv_transfer_params={"x": 1})
        async with c.session.post(c.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            assert b"cmpl-theirs" in await response.read()
        assert c.d.legs.get_nowait().body["prompt"] == [LONG_PROMPT, LONG_PROMPT]
        record = await c.record("cmpl-theirs")
        assert (record["path"], record["reasons"], record["incomplete"]) == (
            "local",
            ["several_prompts"],
            True,
        )
        assert record["decode"]["engine_id"] == c.d.engine_id


@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_nothing_offered(cluster: Any, on_miss: str) -> None:
    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": {"offer": None, "prompt_token_ids": PROMPT_TOKENS}})

    async with cluster(on_miss=on_miss, timeouts={"record_s": 0.05}) as c:
        c.p.script = script
        status, answer = await c.post(c.body())
        record = await c.record(c.p.legs.get_nowait().ticket.key.handoff_id)
        assert record["reasons"] == ["offer_unknown"]
        if on_miss == "error":
            assert (status, answer["error"]["code"]) == (503, "offer_unknown")
            assert c.d.legs.empty()
            return
        leg = c.d.legs.get_nowait()
        assert status == 200
        assert leg.ticket.leg == "decode"
        assert leg.ticket.offer is None
        assert leg.body["kv_transfer_params"]["prompt_token_ids"] == PROMPT_TOKENS


async def test_client_params_and_headers_never_reach_an_engine(cluster: Any) -> None:
    """Field case 60."""
    theirs = {"remote_host": "169.254.169.254", "remote_block_ids": [1, 2], "ticket": "x.y"}
    headers = {
        "x-prefiller-host-port": "169.254.169.254:80",
        "Authorization": "Bearer secret",
        "X-Request-Id": "mine",
        "X-data-parallel-rank": "1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with cluster() as c:
        raw = c.body(kv_transfer_params=theirs, request_id="mine")
        for path in ("pull", "local"):
            status, _ = await c.post(raw, headers=headers | {"x-kvhandoff-path": path})
            assert status == 200
        for leg in (c.p.legs.get_nowait(), c.d.legs.get_nowait(), c.d.legs.get_nowait()):
            assert set(leg.body["kv_transfer_params"]) <= {"ticket", "prompt_token_ids"}
            assert "request_id" not in leg.body
            got = {name.lower() for name in leg.headers}
            assert not got & {
                "x-prefiller-host-port",
                "authorization",
                "x-data-parallel-rank",
                "x-kvhandoff-path",
            }
            assert leg.headers["traceparent"] == headers["traceparent"]
            assert leg.headers["X-Request-Id"] == leg.ticket.key.handoff_id


async def test_stream_is_passed_on_event_by_event(cluster: Any) -> None:
    """Field case 36: each event is at the client before the engine makes the next one."""
    taken: asyncio.Queue[None] = asyncio.Queue()

    async def before(index: int) -> None:
        if index:
            await taken.get()

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        pieces = [*events(leg, None, *"abcdef"), DONE]
        return await streamed(engine, leg, pieces, before=before)

    async with cluster() as c:
        c.d.script = script
        body = c.chat_body(stream=True)
        async with c.session.post(c.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            leg = c.d.legs.get_nowait()
            for wanted in [*events(leg, None, *"abcdef"), DONE]:
                assert await soon(response.content.readany()) == wanted
                taken.put_nowait(None)
            assert await soon(response.content.read()) == b""
        assert leg.body["stream"] is True


async def test_stream_split_at_odd_bytes_is_passed_on_byte_for_byte(cluster: Any) -> None:
    """Field case 35: split inside `data:`, inside a character of 3 bytes, and around [DONE]."""
    taken: asyncio.Queue[None] = asyncio.Queue()
    size = 7

    async def before(index: int) -> None:
        if index:
            await taken.get()

    def whole(leg: Leg) -> bytes:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n'
        return b"".join([*events(leg, None, "日本語", "…"), usage, DONE])

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        raw = whole(leg)
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        return await streamed(engine, leg, pieces, before=before)

    async with cluster() as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/chat/completions", json=c.chat_body(stream=True)) as response:
            wanted = whole(c.d.legs.get_nowait())
            got = b""
            while piece := await soon(response.content.readany()):
                assert len(piece) <= size
                got += piece
                taken.put_nowait(None)
        assert got == wanted
        record = await c.record(response.headers["X-Request-Id"])
        assert record["ttft_s"] > record["first_byte_s"]


async def test_stream_may_take_longer_than_its_first_byte(cluster: Any) -> None:
    first_byte_s = 1.0

    async def before(index: int) -> None:
        if index == 1:
            passed = time.monotonic() + first_byte_s
            await until(lambda: time.monotonic() > passed)

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return await streamed(engine, leg, [*events(leg, "a", "b"), DONE], before=before)

    async with cluster(timeouts={"first_byte_s": first_byte_s}) as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body(stream=True)) as response:
            assert (await response.read()).endswith(DONE)


async def test_json_answers_are_passed_on_byte_for_byte(cluster: Any) -> None:
    """Usage is the decode engine's, untouched (field case 37), and so is everything else."""
    raw = b'{ "id":"cmpl-x",  "usage":{"prompt_tokens_details":{"cached_tokens":1}},"f":1.50}'

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return web.Response(body=raw, headers={"Content-Type": "application/json; charset=utf-8"})

    async with cluster() as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", json=c.body()) as response:
            assert await response.read() == raw
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"


async def test_bodies_keep_the_client_bytes(cluster: Any) -> None:
    """Numbers and nested values are not re-typed."""
    raw = (
        b'{"model":"tiny","prompt":"' + b"x" * 40 + b'","temperature":0.70,"logit_bias":{"5":1e2},'
        b'"big":12345678901234567890123,"nested":{"b":[1.0,{"a":null}]}}'
    )
    got: list[bytes] = []

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        got.append(await leg.request.read())
        return await decode(engine, leg)

    async with cluster() as c:
        c.d.script = script
        async with c.session.post(c.url + "/v1/completions", data=raw) as response:
            assert response.status == 200
        body, params = got[0].split(b',"kv_transfer_params":')
        assert body + b"}" == raw
        assert b"prompt_token_ids" in params


async def test_a_large_body_passes(cluster: Any) -> None:
    prompt = "word " * 1_000_000
    async with cluster() as c:
        status, _ = await c.post(c.body(prompt=prompt))
        assert status == 200
        assert c.d.legs.get_nowait().body["prompt"] == prompt


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_refusals_are_the_client_s(cluster: Any, status: int, role: str) -> None:
    """A 4xx is passed on as it is, no attempt follows, and an offer does not stay behind."""
    async with cluster(prefill=2, decode=2, max_attempts=3) as c:
        for engine in c.prefill if role == "prefill" else c.decode:
            engine.script = failing(status, "context_length_exceeded")
        got, answer = await c.post(c.body())
        assert got == status
        assert answer["error"]["code"] == "context_length_exceeded"
        asked = [engine.legs.qsize() for engine in c.engines]
        assert sum(asked[:2]) == 1
        assert sum(asked[2:]) == (0 if role == "prefill" else 1)
        if role == "decode":
            source = next(engine for engine in c.prefill if engine.legs.qsize())
            ticket = await soon(source.withdrawn.get())
            assert ticket.key == source.legs.get_nowait().ticket.key
        await c.at_rest()
        assert all(engine.withdrawn.empty() for engine in c.prefill)


async def test_miss_shown_as_error(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With on_miss=error the decode engine's refusal is the answer: no attempt turns it into a recompute."""
    async with cluster(on_miss="error") as c:
        c.d.script = once(failing(503, "offer_expired"))
        status, answer = await c.post(c.body())
        assert (status, answer["error"]["code"]) == (503, "offer_expired")
        # The engine's own words name engines and their addresses.
        assert (
            answer["error"]["message"]
            == "the prompt's KV can't be used (offer_expired), and on_miss is error"
        )
        assert answer["error"]["type"] == "kv_miss"
        assert f"{c.d.engine_id} says no" in caplog.text
        assert c.d.legs.get_nowait().ticket.on_miss == "error"
        assert c.d.legs.empty()


async def test_model_list(cluster: Any) -> None:
    async with cluster() as c:
        status, models = await c.get("/v1/models")
        assert status == 200
        assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [(MODEL, 4096)]
        assert models["object"] == "list"
        assert await c.get(f"/v1/models/{MODEL}") == (200, models["data"][0])
        status, answer = await c.get("/v1/models/other")
        assert (status, answer["error"]["param"]) == (404, "model")
        assert answer["error"]["message"] == f"model: got 'other', allowed is {MODEL}"


@pytest.mark.parametrize("page", ["/v1%2Fmodels", "/v1/models%2F", "/v1/engines%2Fdrain", "/v1/%6Dodels"])
async def test_an_encoded_path_is_no_other_one(cluster: Any, page: str) -> None:
    async with cluster() as c:
        url = URL(c.url + page, encoded=True)
        async with c.session.get(url) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "unknown_url")
        assert error["message"] == f"no such endpoint: GET {page}"


@pytest.mark.parametrize("header", ["x-kvhandoff-path", "x-kvhandoff-return"])
async def test_a_wish_that_is_there_twice(cluster: Any, header: str) -> None:
    async with cluster() as c:
        given: Any = CIMultiDict([(header, "pull"), ("x-session-id", "s"), (header, "off")])
        status, answer = await c.post(c.body(), headers=given)
        assert (status, answer["error"]["param"]) == (400, header)
        assert answer["error"]["message"] == f"{header}: got 'pull' and 'off', allowed is one"
        assert c.p.legs.qsize() == c.d.legs.qsize() == 0


async def test_model_with_a_slash_in_its_name(cluster: Any) -> None:
    async with cluster(poll_interval_s=0.02) as c:
        c.d.model = "org/name"
        async with asyncio.timeout(WAIT_S):
            while (await c.get("/v1/models/org/name"))[0] == 404:
                pass
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            status, model = await c.get(path)
            assert (status, model["id"]) == (200, "org/name")
