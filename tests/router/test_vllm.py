"""The router in front of vLLM engines: what their legs are sent, and what comes of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvhandoff.handoff.tickets import TicketGate, TicketKey
from tests.router.conftest import LONG_PROMPT
from tests.router.engines import PROMPT_TOKENS, Leg, MockEngine, soon
from tests.router.vllm_engines import MockVllmEngine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture
def vllm(cluster: Any) -> Any:
    """`async with vllm(...) as c`: a cluster of vLLM engines."""

    @asynccontextmanager
    async def start(**options: Any) -> Any:
        async with cluster(make=MockVllmEngine, **options) as c:
            yield c

    return start


def response_body(c: Any, **fields: Any) -> dict[str, Any]:
    return {"model": c.body()["model"], "input": LONG_PROMPT, "max_output_tokens": 8} | fields


def body_for(c: Any, path: str, **fields: Any) -> dict[str, Any]:
    make = {CHAT: c.chat_body, COMPLETIONS: c.body, RESPONSES: lambda **f: response_body(c, **f)}[path]
    return make(**fields)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-"), (RESPONSES, "resp_")]
)
@pytest.mark.parametrize("forced", ["pull", "push", "local"])
async def test_paths(vllm: Any, path: str, prefix: str, forced: str) -> None:
    """Each engine obeys its ticket, which is found under the response's id."""
    async with vllm(path=forced) as c:
        status, answer = await c.post(body_for(c, path), path=path)
        d = await soon(c.d.legs.get())
        assert (status, d.path) == (200, path)
        assert answer["id"] == prefix + d.ticket.key.handoff_id
        assert d.ticket.leg == ("local" if forced == "local" else "decode")
        if forced != "local":
            p = await soon(c.p.legs.get())
            assert p.path == path
            assert (p.ticket.leg, p.ticket.key) == ("prefill", d.ticket.key)
            assert p.headers["X-Request-Id"] == d.headers["X-Request-Id"] == d.ticket.key.handoff_id
        record = await c.record(answer["id"])
        assert (record["path"], record["id"], record["status"]) == (forced, answer["id"], 200)


@pytest.mark.parametrize(
    ("path", "forwarded"), [(CHAT, PROMPT_TOKENS), (COMPLETIONS, None), (RESPONSES, None)]
)
async def test_token_ids_only_where_vllm_takes_them(vllm: Any, path: str, forwarded: Any) -> None:
    async with vllm(path="pull") as c:
        await c.post(body_for(c, path), path=path)
        assert c.d.legs.get_nowait().body["kv_transfer_params"].get("prompt_token_ids") == forwarded


@pytest.mark.parametrize("given", [{"error": "bad_ticket"}, None])
async def test_what_an_engine_tells_the_router_is_not_the_client_s(vllm: Any, given: Any) -> None:
    """The rest of the answer is passed on as it is."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": given, "text": "“kv_transfer_params”", "n": 1e3})

    async with vllm(path="local") as c:
        c.d.script = script
        status, answer = await c.post(c.body())
        assert status == 200
        assert answer == {"kv_transfer_params": None, "text": "“kv_transfer_params”", "n": 1e3}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("salt", [None, "", "tenant-a"])
async def test_salt_is_the_ticket_s(vllm: Any, path: str, salt: str | None) -> None:
    """An engine salts its prefix cache with the body's and obeys only a ticket with the same; it refuses an
    empty one, which stands for none."""
    async with vllm(path="pull") as c:
        given = {} if salt is None else {"cache_salt": salt}
        status, _ = await c.post(body_for(c, path, **given), path=path)
        assert status == 200
        for engine in (c.p, c.d):
            leg = engine.legs.get_nowait()
            assert leg.ticket.cache_salt == (salt or "")
            assert leg.body.get("cache_salt") == (salt or None)


async def test_a_salt_of_another_type_is_the_engine_s_to_refuse(vllm: Any) -> None:
    async with vllm(path="pull") as c:
        status, answer = await c.post(c.body(cache_salt=5))
        assert (status, answer["error"]["param"]) == (400, "cache_salt")


async def test_a_response_s_legs(vllm: Any) -> None:
    async with vllm(path="pull") as c:
        fields = {"stream": True, "store": True, "request_id": "mine", "text": {"format": {"type": "text"}}}
        async with c.session.post(c.url + RESPONSES, json=response_body(c, **fields)) as response:
            raw = await response.read()
        p, d = c.p.legs.get_nowait(), c.d.legs.get_nowait()
        assert p.body["max_output_tokens"] == 1
        assert "max_tokens" not in p.body
        assert (p.body["stream"], p.body["store"]) == (False, False)
        assert "text" not in p.body
        assert p.body["request_id"] == d.body["request_id"] == f"resp_{d.ticket.key.handoff_id}"
        assert (d.body["stream"], d.body["store"], d.body["max_output_tokens"]) == (True, False, 8)
        assert d.body["text"] == fields["text"]
        assert raw.count(b"event: ") == 4
        record = await c.record(d.body["request_id"])
        assert record["status"] == 200
        assert record["ttft_s"] > 0
        assert sum(record["phases"].values()) == pytest.approx(record["ttft_s"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("background", True), ("conversation", {"id": "c"})],
)
async def test_responses_are_not_stored(vllm: Any, field: str, value: Any) -> None:
    async with vllm() as c:
        status, answer = await c.post(response_body(c, **{field: value}), path=RESPONSES)
        assert (status, answer["error"]["param"]) == (400, field)
        assert "allowed is null" in answer["error"]["message"]
        assert c.p.legs.empty()
        assert c.d.legs.empty()


async def test_embedded_engines_have_no_responses(cluster: Any) -> None:
    async with cluster() as c:
        status, answer = await c.post(response_body(c), path=RESPONSES)
        assert (status, answer["error"]["code"]) == (501, "unsupported_endpoint")
        assert "/v1/chat/completions" in answer["error"]["message"]


async def test_a_refused_ticket_shows_in_the_answer(vllm: Any) -> None:
    """The prefill engine has restarted since its last report: its new life obeys no ticket for the old."""
    async with vllm(path="pull") as c:
        await c.p.restart()
        status, answer = await c.post(c.body())
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        record = await c.record(answer["id"])
        assert (record["path"], record["attempts"], record["reasons"]) == (
            "pull",
            2,
            ["forced", "epoch_changed"],
        )
        refused, obeyed = c.p.legs.get_nowait(), c.p.legs.get_nowait()
        assert refused.ticket is None
        assert obeyed.ticket.audience == c.p.identity
        assert c.p.withdrawn.empty()  # the refused leg made no offer


async def test_a_decode_engine_that_ignores_its_ticket(vllm: Any) -> None:
    """The answer is right, since a plain request computes its prompt; the record lacks the engine's part."""
    async with vllm(path="pull", timeouts={"record_s": 0.05}) as c:
        c.d.gatekeeper = TicketGate(TicketKey(b"another"), c.d.identity)
        status, answer = await c.post(c.body())
        assert (status, answer["choices"][0]["text"]) == (200, "Hello")
        record = await c.record(answer["id"])
        assert (record["incomplete"], record["kv_source"]) == (True, None)


async def test_a_turn_is_kept_and_found(vllm: Any) -> None:
    messages = [{"role": "user", "content": LONG_PROMPT}]
    async with vllm(path="push") as c:
        await c.post(c.chat_body(messages=messages), path=CHAT)
        first = c.d.legs.get_nowait()
        assert first.ticket.retain == "renewable"
        messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and?"}]
        c.p.legs.get_nowait()
        status, answer = await c.post(c.chat_body(messages=messages), path=CHAT)
        assert (status, (await c.record(answer["id"]))["history"]["engine_id"]) == (200, c.d.engine_id)
        second = c.p.legs.get_nowait()
        assert second.ticket.history.key == first.ticket.key
