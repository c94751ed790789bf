"""The log as an operator's programs read it: JSON lines with fields, and no secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvhandoff.cli.logs import JsonFormatter
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.router.tenants import hash_of
from tests.collector import collector
from tests.router.callers import KEYS, SALTS, bearer, security
from tests.tinymodels import cached_tiny_model

PATIENCE_S = 180.0
"""For a process to start, while the machine is busy."""
CLUSTER_KEY = "a cluster key that nobody may read"
COLLECTORS_KEY = "otlp-collectors-key"
LIFE = Identity(EngineId("decode-0"), Epoch("e1"))


def written(message: str, *arguments: object, extra: dict[str, object] | None = None) -> dict[str, Any]:
    """What a line of the log is as JSON."""
    logger = logging.Logger("a.logger")
    record = logger.makeRecord("a.logger", logging.WARNING, "f", 1, message, arguments, None, extra=extra)
    record.created = 1_800_000_000.25
    text = JsonFormatter("router").format(record)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def test_what_every_line_has() -> None:
    assert written("%s\nof two lines", "a message") == {
        "time": "2027-01-15T08:00:00.250+00:00",
        "level": "warning",
        "process": "router",
        "logger": "a.logger",
        "message": "a message\nof two lines",
    }


def test_what_a_line_is_about() -> None:
    class Engine:
        identity = LIFE

    key = HandoffKey(HandoffId("h"), 2)
    line = written("%s: %s, %s", key, Reason.OFFER_EXPIRED, "late")
    assert line["message"] == "h#2: offer_expired, late"
    assert (line["handoff_id"], line["attempt"], line["reason"]) == ("h", 2, "offer_expired")
    for engine in (LIFE, Engine()):
        line = written("%s", engine)
        assert (line["engine"], line["epoch"]) == ("decode-0", "e1")


def test_fields() -> None:
    """They replace none of those that every line has, and anything can be written."""
    line = written(
        "m", extra={"path": "pull", "time": "x", "level": "y", "where": Path("/p"), "phases": {"a": 1.5}}
    )
    assert (line["path"], line["where"], line["phases"]) == ("pull", "/p", {"a": 1.5})
    assert (line["level"], line["time"][:4]) == ("warning", "2027")


def test_an_exception_is_one_line() -> None:
    try:
        raise ValueError("of something")
    except ValueError:
        record = logging.Logger("l").makeRecord("l", 40, "f", 1, "it failed", (), sys.exc_info())
    text = JsonFormatter("router").format(record)
    assert "\n" not in text
    assert json.loads(text)["exception"].endswith("ValueError: of something")


class Process:
    """One of the commands, and the lines of its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.raw: list[str] = []
        assert process.stderr is not None
        self._reading = asyncio.create_task(self._read(process.stderr))
        self.facts: dict[str, str] = {}

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.raw.append(line.decode().rstrip("\n"))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.raw]

    async def said(self, **fields: object) -> dict[str, Any]:
        """Wait for a line with these fields."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.lines:
                    if line.items() >= fields.items():
                        return line
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await self.process.wait() == 0
            await self._reading


@asynccontextmanager
async def started(*arguments: str, announces: bool = True) -> AsyncIterator[Process]:
    environment = os.environ | {
        "KVHANDOFF_CLUSTER_KEY": CLUSTER_KEY,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {COLLECTORS_KEY}",
        "COLUMNS": "200",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhandoff", *arguments, "--log-format", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    running = Process(process)
    try:
        if announces:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                running.facts = json.loads(await process.stdout.readline() or "{}")
            assert running.facts, running.raw
        yield running
        await running.end()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def engine(role: str) -> list[str]:
    model = str(cached_tiny_model("llama"))
    return [
        *("engine", "--role", role, "--engine-id", f"{role}-0", "--model", model, "--model-name", "tiny"),
        *("--kv-memory", "0.05", "--threads", "1"),
    ]


@pytest.mark.processes
async def test_a_deployments_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lowest level, with traces and tenants: every line is JSON, none has a secret."""
    async with collector(monkeypatch) as spans, AsyncExitStack() as stack:
        seeing = ["--log-level", "debug", "--traces", spans.url.removesuffix("/v1/traces")]
        prefill, decode = await asyncio.gather(
            *(stack.enter_async_context(started(*engine(role), *seeing)) for role in ("prefill", "decode"))
        )
        tenants = security(tmp_path).tenants
        router = await stack.enter_async_context(
            started(
                *(
                    "router",
                    "--port",
                    "0",
                    "--prefill",
                    prefill.facts["url"],
                    "--decode",
                    decode.facts["url"],
                ),
                *("--tenants", str(tenants), "--path", "pull", "--pair-tests", "off", *seeing),
            )
        )
        url = router.facts["url"] + "/v1/completions"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"model": "tiny", "prompt": "a client's own prompt " * 8, "max_tokens": 4, "stream": True}
        body["cache_salt"] = "a client's own salt"
        async with session.post(url, json=body, headers=bearer("acme")) as response:
            assert response.status == 200
            identifier = response.headers["X-Request-Id"]
            await response.read()
        async with session.post(url, json=body, headers={"Authorization": "Bearer kvh_wrong"}) as response:
            assert response.status == 401
        async with session.post(url, json={"model": "x"}, headers=bearer("acme")) as response:
            assert response.status == 404

        line = await router.said(handoff_id=identifier, status=200)
        legs = [
            await process.said(handoff_id=identifier, leg=leg)
            for process, leg in (
                (prefill, "prefill"),
                (decode, "decode"),
            )
        ]
        page = await session.get(router.facts["url"] + f"/v1/handoffs/{identifier}", headers=bearer("acme"))
        record = await page.json()
        await spans.request(2)

    expected = {
        "level": "info",
        "process": "router",
        "request_id": record["id"],
        "trace_id": record["trace_id"],
        "tenant": "acme",
        "model": "tiny",
        "endpoint": "/v1/completions",
        "path": "pull",
        "prefill_engine": "prefill-0",
        "decode_engine": "decode-0",
        "attempts": 1,
        "reasons": ["forced"],
        "ttft_s": round(record["ttft_s"], 6),
        "total_s": round(record["total_s"], 6),
    }
    assert {name: line.get(name) for name in expected} == expected
    assert re.fullmatch("[0-9a-f]{32}", line["trace_id"])
    assert [leg["engine"] for leg in legs] == ["prefill-0", "decode-0"]
    assert set(legs[1]["phases_s"]) <= set(record["phases"])
    assert (legs[1]["kv_source"], legs[1]["bytes"]) == ("transferred", record["bytes"])
    assert any(each.get("status") == 404 for each in router.lines)

    logged = "\n".join(line for process in (prefill, decode, router) for line in process.raw)
    secrets = {CLUSTER_KEY, COLLECTORS_KEY, "kvh_wrong", "a client's own salt", "a client's own prompt"}
    secrets |= {*KEYS.values(), *map(hash_of, KEYS.values()), *SALTS.values(), "Bearer"}
    secrets |= {secret.removeprefix("sha256:") for secret in secrets}
    assert [secret for secret in secrets if secret in logged] == []
    assert "ticket" not in logged
    shown = repr(spans.spans)
    assert [secret for secret in secrets if secret in shown] == []


@pytest.mark.processes
async def test_up_in_json() -> None:
    """Nothing is drawn between the lines, and what `up` says is in them."""
    model = ["--model", str(cached_tiny_model("llama")), "--kv-memory", "0.05", "--threads", "1"]
    async with started("up", "--prefill", "0", "--port", "0", *model, announces=False) as up:
        ready = await up.said(process="up", level="info")
        assert set(ready["engines"]) == {"decode-0"}
        async with aiohttp.ClientSession() as session, session.get(ready["url"] + "/health") as response:
            assert response.status == 200
    assert all(line["process"] in {"up", "router", "decode-0"} for line in up.lines)
