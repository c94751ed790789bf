"""`GET /openapi.json` says of the router what the router does: schemathesis asks for what it promises, and
for what it forbids."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvhandoff.core.errors import invalid
from kvhandoff.router import wire
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.openapi import with_description
from kvhandoff.router.upstream import serve_upstream
from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig
from tests.router.callers import KEYS, bearer, security
from tests.router.engines import MODEL, Leg, Script
from tests.router.vllm_engines import MockVllmEngine

EXAMPLES = int(os.environ.get("KVHANDOFF_FUZZ_EXAMPLES", "10"))
"""Random ones for each page, beside some hundreds of systematic ones. More of them by hand."""
DEADLINE_S = 120.0 + EXAMPLES


def refusing(script: Script) -> Script:
    """As any engine: a request without a usable input is refused."""

    async def refuse(engine: Any, leg: Leg) -> web.StreamResponse:
        endpoint = next(each for each in Endpoint if each.path == leg.path)
        given = leg.body.get(endpoint.input_field)
        if endpoint is Endpoint.CHAT:
            fits = isinstance(given, list) and given != [] and all(isinstance(each, dict) for each in given)
        else:
            fits = isinstance(given, str | list) and given not in ("", [])
            fits = fits and (isinstance(given, str) or _items_fit(given, endpoint))
        if not fits:
            error = invalid(endpoint.input_field, given, "an input")
            return web.json_response(error.body(), status=error.status)
        if not isinstance(leg.body.get("stream"), bool | None):
            error = invalid("stream", leg.body["stream"], "true, false or null")
            return web.json_response(error.body(), status=error.status)
        return await script(engine, leg)

    return refuse


def _items_fit(given: list[Any], endpoint: Endpoint) -> bool:
    if endpoint is Endpoint.RESPONSES:
        return all(isinstance(each, dict) for each in given)
    texts = all(isinstance(each, str) for each in given)
    return texts or _token_ids(given) or all(isinstance(each, list) and _token_ids(each) for each in given)


def _token_ids(given: list[Any]) -> bool:
    """JSON's 1.0 is a whole number, as JSON Schema has it."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in given)
    return given != [] and numbers and all(each >= 0 and each == int(each) for each in given)


class RefusingEngine(MockVllmEngine):
    def __init__(self, *name: Any) -> None:
        super().__init__(*name)
        self.script = refusing(self.script)


async def fuzz(c: Any, path: Path, key: str) -> tuple[int | None, str]:
    """(exit code, what it printed) of schemathesis with the router's own document, in which names that lead
    somewhere stand where any text would do. It asks with `key`, and sometimes without."""
    authorization = f"Bearer {key}"
    status, described = await c.get("/openapi.json")
    assert status == 200
    _, answer = await c.post(c.body(), headers={"Authorization": authorization})
    for operations in described["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    known = answer["id"] if "Its name" not in parameter["description"] else MODEL
                    parameter["schema"] = {"enum": [known, "unknown"]}
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "model" in body.get("schema", {}).get("properties", {}):
                body["schema"]["properties"]["model"] = {"enum": [MODEL, "other"]}
    # One that drains, so that there is another one to answer.
    order = described["components"]["schemas"].get("DrainOrder")
    if order is not None:
        order["properties"]["engine"] = {"enum": [c.decode[1].engine_id, c.decode[1].url]}
    file = path / "openapi.json"
    file.write_text(json.dumps(described))
    arguments = [
        *("--no-color", "run", str(file), "--url", c.url, "--phases", "examples,coverage,fuzzing"),
        *("--max-examples", str(EXAMPLES), "--generation-deterministic"),
        *("--checks", "all", "--continue-on-failure", "--no-shrink", "--warnings", "off"),
        *("--header", f"Authorization: {authorization}"),
    ]
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        *arguments,
        cwd=path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, printed.decode()


async def test_fuzzed(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No 500, whatever is sent; answers and errors are what the document says; what it forbids is refused."""
    keys = security(tmp_path, open_pages=())
    async with cluster(decode=2, make=RefusingEngine, registration=True, security=keys) as c:
        code, printed = await fuzz(c, tmp_path, KEYS["ops"])
        assert code == 0, printed
        assert (await c.post(c.body(), headers=bearer("ops")))[0] == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


PAGES = {
    "/v1/chat/completions": ["post"],
    "/v1/completions": ["post"],
    "/v1/responses": ["post"],
    "/v1/models": ["get"],
    "/v1/models/{id}": ["get"],
    "/v1/handoffs": ["get"],
    "/v1/handoffs/{id}": ["get"],
    "/v1/handoffs/{id}/rebind": ["post"],
    "/v1/engines/drain": ["post"],
    "/health": ["get"],
    "/ready": ["get"],
    "/metrics": ["get"],
    "/openapi.json": ["get"],
}


@pytest.mark.parametrize("registration", [False, True])
async def test_it_has_the_pages_of_its_router(cluster: Any, registration: bool) -> None:
    async with cluster(registration=registration) as c:
        status, described = await c.get("/openapi.json")
        assert (status, described["openapi"]) == (200, "3.1.0")
        wanted = PAGES | ({"/internal/engines": ["post"]} if registration else {})
        assert {path: list(page) for path, page in described["paths"].items()} == wanted
        assert "securitySchemes" not in described["components"]
        assert not any("security" in page for pages in described["paths"].values() for page in pages.values())


async def test_it_says_where_a_key_is_needed(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path), registration=True) as c:
        _, described = await c.get("/openapi.json")  # for anybody: what it says is no secret
        keyed = {
            path
            for path, pages in described["paths"].items()
            for page in pages.values()
            if page.get("security") == [{"key": []}] and "401" in page["responses"]
        }
        assert set(described["paths"]) - keyed == {"/health", "/openapi.json", "/internal/engines"}
        assert "429" in described["paths"]["/v1/completions"]["post"]["responses"]
        assert "operator" in described["paths"]["/metrics"]["get"]["responses"]["403"]["description"]


async def test_in_front_of_upstreams_engines() -> None:
    decode = UpstreamAddress.parse("http://127.0.0.1:1")
    server = await serve_upstream(UpstreamConfig(connector="nixl", decode=(decode,), port=0))
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{server.port}/openapi.json") as answer,
        ):
            described = await answer.json()
        assert "/v1/chat/completions" in described["paths"]
    finally:
        await server.close()


def test_a_page_without_a_description() -> None:
    async def page(request: wire.Request) -> wire.Response:
        return wire.Response()

    with pytest.raises(KeyError, match="/v1/else"):
        with_description([wire.get("/v1/else", page)], keys=False)
