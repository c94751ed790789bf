"""vLLM engines for the tests of this folder: a pair for each model, started when it is first asked for.

Where vLLM can't be had, all of them are skipped, and the last lines of the run say so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.vllm.engines import ROLES, VllmEngine
from tests.vllm.environment import Environment, find
from tests.vllm.models import MODELS, Model
from tests.vllm.pair import Pair

ENVIRONMENT = find()

LEASES = {"offer_lease_s": 8.0, "claim_lease_s": 6.0, "retain_lease_s": 60.0}
"""Long enough for two legs on a busy machine, short enough to wait for their end."""

PATIENCE = {"handshake_s": 12.0, "claim_s": 12.0, "rendezvous_s": 12.0, "progress_s": 12.0}
"""For a machine that stands still for a moment, which is no fault of the handoff."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs engines where there are none."""
    if ENVIRONMENT.python is None:
        for item in items:
            if "engines" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=f"no vLLM: {ENVIRONMENT.why_not}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say it where nobody overlooks it."""
    if ENVIRONMENT.python is None:
        terminalreporter.write_line(f"vLLM tests skipped: {ENVIRONMENT.why_not}", yellow=True)


@asynccontextmanager
async def running_pair(environment: Environment, model: Model, logs: Path) -> AsyncIterator[Pair]:
    """A prefill and a decode engine, warm; both are started at once."""
    key = f"cluster key of the vLLM tests, {os.getpid()}".encode()
    timeout = aiohttp.ClientTimeout(total=120.0)
    # No connection is used twice: vLLM closes idle ones after 5 s, perhaps as the next request is on its way.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        p, d = (
            VllmEngine(
                role,
                environment,
                model.directory(),
                key,
                logs / f"{role}.log",
                session,
                extra_config={**LEASES, **PATIENCE},
                arguments=(*model.arguments, *getattr(model, role)),
            )
            for role in ROLES
        )
        pair = Pair(p, d, session, key, prefix_cache=model.prefix_cache)
        try:
            p.launch()
            d.launch()
            await asyncio.gather(p.ready(), d.ready())
            # The first steps compile kernels; no lease should have to cover that.
            await asyncio.gather(*(pair.alone(pair.tokens(100), 2, engine) for engine in pair.engines))
            yield pair
        finally:
            await asyncio.gather(p.stop(), d.stop())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """The pair of one model; tests are grouped by it, so that two engines run at a time."""
    logs = tmp_path_factory.mktemp(request.param)
    async with running_pair(ENVIRONMENT, MODELS[request.param], logs) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def pair(engines: Pair) -> AsyncIterator[Pair]:
    """The pair, both engines up; when the test is over they still are, and hold nothing."""
    for engine in engines.engines:
        if not await engine.serves():  # a test before this one has failed
            await engine.stop()
            await engine.start()
    before = [await engine.identity() for engine in engines.engines]
    engines.restarted = False
    yield engines
    assert engines.restarted or before == [await engine.identity() for engine in engines.engines]
    await engines.settled()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failed test shows the end of its engines' logs."""
    report = yield
    if report.failed:
        pair = getattr(item, "funcargs", {}).get("engines")
        if isinstance(pair, Pair):
            for engine in pair.engines:
                report.sections.append((f"log of the {engine.role} engine", engine.tail()))
    return report
