"""How it is found out that an engine has died, and of what, on servers and outputs made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from benchmarks.stale_systems import DECODE_LEG, StepFailed, Upstream
from benchmarks.vllm_deaths import cause_of_death, is_dead
from benchmarks.vllm_engines import EngineSpec, Running
from benchmarks.vllm_pairs import Pair, PairKind

from benchmarks import vllm_deaths
from kvhandoff.web import free_port

WORKER = "(Worker pid=22) ERROR 11-30 02:02:28 [executor.py:1063] "
CORE = "(EngineCore pid=11) ERROR 11-30 02:02:28 [core.py:1512] "
OUTPUT = f"""\
(APIServer pid=1) INFO 11-30 02:02:19 [loggers.py:335] Engine 000: Running: 0 reqs
{WORKER}WorkerProc hit an exception.
{WORKER}Traceback (most recent call last):
{WORKER}  File "/site-packages/vllm/worker.py", line 75, in start_load_kv
{WORKER}    self._read_blocks_for_req(req_id, meta)
{WORKER}    ^^^^^^^^^^^^^^^^^^^^^^^^^^
(APIServer pid=1) INFO 11-30 02:02:28 [loggers.py:335] Engine 000: Running: 1 reqs
{WORKER}  File "/site-packages/vllm/base_worker.py", line 3453, in _trim
INFO:     127.0.0.1:40286 - "GET /health HTTP/1.1" 200 OK
{WORKER}    assert few <= many
{WORKER}           ^^^^^^^^^^^
{WORKER}AssertionError
{CORE}Traceback (most recent call last):
{CORE}  File "/site-packages/vllm/core.py", line 1496, in run
{CORE}    engine_core.run_busy_loop()
{CORE}RuntimeError: Worker failed with error ''
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def test_the_first_exception_is_the_cause(log: Path) -> None:
    log.write_text(OUTPUT)
    assert cause_of_death(log, 0) == "AssertionError at base_worker.py:3453: assert few <= many"


def test_what_stands_in_the_output_of_before_is_not_it(log: Path) -> None:
    log.write_text(OUTPUT)
    before = OUTPUT.encode().index(f"{CORE}Traceback".encode())
    expected = "RuntimeError: Worker failed with error '' at core.py:1496: engine_core.run_busy_loop()"
    assert cause_of_death(log, before) == expected


def test_an_exception_of_a_process_without_a_name(log: Path) -> None:
    log.write_text(
        'Traceback (most recent call last):\n  File "/a/b.py", line 7, in f\n    g()\nKeyError: 3\n'
    )
    assert cause_of_death(log, 0) == "KeyError: 3 at b.py:7: g()"


def test_an_output_that_breaks_off(log: Path) -> None:
    log.write_text('Traceback (most recent call last):\n  File "/a/b.py", line 7, in f')
    assert cause_of_death(log, 0) == "an exception at b.py:7: "


def test_a_death_without_an_exception(log: Path) -> None:
    log.write_text("INFO: loaded\nKilled\n\n")
    assert cause_of_death(log, 0) == "no exception in its output, which ends with: Killed"
    assert cause_of_death(log, log.stat().st_size).endswith("ends with: nothing")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[tuple[Running, aiohttp.ClientSession]]:
    """Answers whatever it is asked with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield Running(EngineSpec(name="e", transfer=None), str(server.make_url("")).rstrip("/")), session


@pytest.mark.parametrize(("status", "dead"), [(200, False), (503, True)])
async def test_health(status: int, dead: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/health"
        return web.Response(status=status)

    async with engine(answer) as (running, session):
        assert await is_dead(running, session) is dead


async def test_nobody_listens() -> None:
    gone = Running(EngineSpec(name="e", transfer=None), f"http://127.0.0.1:{free_port()}")
    async with aiohttp.ClientSession() as session:
        assert await is_dead(gone, session)


async def test_an_engine_that_hangs_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_deaths, "HEALTH_S", 0.05)
    released = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with engine(wait) as (running, session):
        assert not await is_dead(running, session)
        released.set()


def upstream(prefill: Running, decode: Running, session: aiohttp.ClientSession) -> Upstream:
    return Upstream(Pair(PairKind(name="upstream", connector="nixl"), prefill, decode, ""), session, 8)


async def test_a_death_is_that_of_the_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.vllm_engines.LOGS", tmp_path)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    async with engine(healthy) as (lives, session):
        (tmp_path / "e.log").write_text("")
        (tmp_path / "d.log").write_text("Traceback (most recent call last):\nOSError: of before\n")
        ended = Running(EngineSpec(name="d", transfer=None), f"http://127.0.0.1:{free_port()}")
        system = upstream(lives, ended, session)
        system.begin()
        with (tmp_path / "d.log").open("a") as output:
            output.write(OUTPUT)
        assert await system.death() == (
            "the decode engine died: AssertionError at base_worker.py:3453: assert few <= many"
        )
        assert await upstream(lives, lives, session).death() is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "EngineCore encountered an issue"}}', "EngineCore encountered an issue"),
        (b"Internal Server Error", "Internal Server Error"),
        (b'["no error"]', r'\["no error"\]'),
    ],
)
async def test_an_error_has_its_status_and_its_step(body: bytes, message: str) -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=500, body=body)

    async with engine(fail) as (running, session):
        with pytest.raises(StepFailed, match=f"^{DECODE_LEG}: {message}$") as failed:
            await upstream(running, running, session).decode("p", {})
    assert failed.value.status == 500


async def test_a_connection_that_ends_has_no_status() -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with engine(hang_up) as (running, session):
        with pytest.raises(StepFailed, match=r"^the decode leg: ") as failed:
            await upstream(running, running, session).decode("p", {})
    assert failed.value.status is None


async def test_a_prefill_leg_without_a_reference_is_an_error() -> None:
    async def plain(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": " apple"}], "kv_transfer_params": None})

    async with engine(plain) as (running, session):
        system = upstream(running, running, session)
        with pytest.raises(StepFailed, match="the prefill leg: answered without a reference"):
            await system.prefill("p")
        assert await system.alone("p") == " apple"
        assert system.step == "the decode engine alone"
