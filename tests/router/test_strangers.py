"""What answers where an engine was expected."""

from __future__ import annotations

import json

import aiohttp
import pytest

from kvhandoff.core.clock import monotonic
from kvhandoff.router.config import Timeouts
from kvhandoff.router.stranger import ROUTER, who_answers
from kvhandoff.router.upstream import serve_upstream
from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig
from kvhandoff.router.upstream_engine import UpstreamEngine
from tests.router.strangers import web_server


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, "nothing here", "a server that calls itself 'Plain/1.0'"),
        (200, "<html>", "a server that calls itself 'Plain/1.0'"),
        (200, json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]}), "a vLLM engine"),
        (200, json.dumps({"info": {"title": "kvhandoff router"}}), ROUTER),
        (200, json.dumps({"info": {"title": "pets"}, "data": [{"owned_by": "me"}]}), "a server that calls"),
    ],
)
async def test_who_answers(status: int, body: str, said: str) -> None:
    async with web_server(status, body) as url, aiohttp.ClientSession() as session:
        assert (await who_answers(url, session)).startswith(said)


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (
            404,
            "nothing",
            "a server that calls itself 'Plain/1.0' answers /health with status 404, a vLLM engine that "
            "serves with 200",
        ),
        (200, "<html>", "a server that calls itself 'Plain/1.0' answers /v1/models with no list of models ("),
        (200, "{}", "a server that calls itself 'Plain/1.0' answers /v1/models with no list of models ("),
    ],
)
async def test_a_web_server_is_no_vllm_engine(status: int, body: str, problem: str) -> None:
    async with web_server(status, body) as url, aiohttp.ClientSession() as session:
        address = UpstreamAddress.parse(url)
        engine = UpstreamEngine(address, "decode", session, Timeouts(), monotonic, None)
        await engine.poll()
        assert engine.problem is not None
        assert engine.problem.startswith(problem)


async def test_a_client_hears_where_it_is_told_what_is_wrong() -> None:
    async with web_server(404, "nothing") as url, aiohttp.ClientSession() as session:
        config = UpstreamConfig(connector="nixl", decode=(UpstreamAddress.parse(url),), port=0)
        server = await serve_upstream(config)
        try:
            body = {"model": "m", "prompt": "hi"}
            there = f"http://127.0.0.1:{server.port}"
            async with session.post(f"{there}/v1/completions", json=body) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "no_decode_engine")
            assert error["message"] == (
                "no decode engine has answered as one yet; GET /ready tells operators what is wrong with each"
            )
            async with session.get(f"{there}/ready") as answer:
                (engine,) = (await answer.json())["engines"]
            assert "'Plain/1.0' answers /health with status 404" in engine["problem"]
        finally:
            await server.close()
