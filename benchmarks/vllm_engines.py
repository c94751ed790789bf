"""vLLM engines as a user would start them: one process group each, its output in a file.

They run from an environment of their own, since vLLM and the embedded engine want other versions of their
dependencies. Upstream's connectors also need the package that is imported as `nixl` there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from kvhandoff.core.errors import KVHandoffError
from kvhandoff.web import free_port

Result = TypeVar("Result")

MODEL = "benchmarked"
START_S = 400.0
"""For an engine to be healthy, on a machine that does something else too."""
STOP_S = 20.0
POLL_S = 0.25
LOGS = Path("build/bench/logs")
PYTHON_ENV = "KVHANDOFF_VLLM_PYTHON"
DEFAULT_PYTHON = ".venv-vllm/bin/python"
ROOT = Path(__file__).parents[1]
CALM = Path(__file__).parent / "calm"
"""Its sitecustomize has vLLM's processes sleep for a moment where they spin, waiting for each other."""


class EngineFailed(KVHandoffError):
    """An engine ended, or was not healthy in time. The message has the last lines of its output."""


def default_python() -> str:
    """The interpreter of the environment that vLLM is installed in."""
    return os.environ.get(PYTHON_ENV, DEFAULT_PYTHON)


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """What all engines of a run have in common."""

    python: str
    model_dir: Path
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    chunk: int = 512
    """Prompt tokens in a step."""
    max_num_seqs: int = 4
    threads: int = 1
    """OpenMP threads of each engine."""
    kv_gib: int = 1
    """Of each engine."""
    prefix_cache: bool = True
    calm: bool = False
    """See CALM. For engines of every kind alike."""

    def arguments(self) -> list[str]:
        """The command line of an engine, but for its port and its connector."""
        cache = "--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching"
        return [
            *("--model", str(self.model_dir), "--served-model-name", MODEL, "--dtype", self.dtype),
            *("--max-model-len", str(self.max_model_len), "--max-num-batched-tokens", str(self.chunk)),
            *("--max-num-seqs", str(self.max_num_seqs), "--enforce-eager", cache),
        ]

    def environment(self) -> dict[str, str]:
        """Of engines on a machine without a GPU. What the caller has set stays."""
        added = [os.environ.get("PYTHONPATH"), *([str(CALM)] if self.calm else []), str(ROOT)]
        path = os.pathsep.join(filter(None, added))
        chosen = {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path}
        usual = {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        return usual | os.environ | chosen

    def conditions(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "model": self.model_dir.name,
            "dtype": self.dtype,
            "chunk_tokens": self.chunk,
            "threads_of_each_engine": self.threads,
            "prefix_cache": self.prefix_cache,
            "kv_gib_of_each_engine": self.kv_gib,
            "calm": self.calm,
        }


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine to start."""

    name: str
    """Of its output's file."""
    transfer: Mapping[str, Any] | None
    """--kv-transfer-config; None: no connector."""
    environment: Mapping[str, str] = field(default_factory=dict)
    side_port: int = 0
    """Of the connector: kvhandoff's pages, or upstream's side channel."""
    arguments: Sequence[str] = ()
    """Beyond those of all engines; they win."""

    @property
    def log(self) -> Path:
        """Where its output goes; begun anew at each start."""
        return LOGS / f"{self.name}.log"


@dataclass(frozen=True)
class Running:
    """An engine that is healthy."""

    spec: EngineSpec
    url: str


def run_to_the_end(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a benchmark so that its engines end with it, also at SIGTERM: their process groups are their own.

    Raises SystemExit with the message of an engine that failed.
    """

    async def interruptible() -> Result:
        task = asyncio.ensure_future(main)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError as error:
        raise SystemExit(128 + signal.SIGTERM) from error
    except EngineFailed as error:
        raise SystemExit(str(error)) from error


@asynccontextmanager
async def engines(settings: VllmSettings, specs: Sequence[EngineSpec]) -> AsyncIterator[list[Running]]:
    """Start engines side by side, and end them. Raises EngineFailed."""
    LOGS.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  once, before anything runs
    async with AsyncExitStack() as stack:
        starting = [await stack.enter_async_context(_process(settings, spec)) for spec in specs]
        yield list(await asyncio.gather(*(process.healthy() for process in starting)))


@dataclass
class _Process:
    spec: EngineSpec
    url: str
    process: asyncio.subprocess.Process

    async def healthy(self) -> Running:
        """Wait until it serves."""
        try:
            async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
                while not await self._answers(session):  # noqa: ASYNC110  another process has no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise self._failed(f"was not healthy after {START_S:g} s") from error
        return Running(self.spec, self.url)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        if self.process.returncode is not None:
            raise self._failed(f"ended with exit code {self.process.returncode}")
        try:
            async with session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False  # it doesn't listen yet

    def _failed(self, what: str) -> EngineFailed:
        last = "\n".join(self.spec.log.read_text(errors="replace").splitlines()[-15:])
        return EngineFailed(f"{self.spec.name} {what}; all of its output is in {self.spec.log}:\n{last}")

    async def stop(self) -> None:
        """End it and whatever it has started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def _process(settings: VllmSettings, spec: EngineSpec) -> AsyncIterator[_Process]:
    port = free_port()
    transfer = [] if spec.transfer is None else ["--kv-transfer-config", json.dumps(spec.transfer)]
    command = [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server", *settings.arguments()),
        *("--host", "127.0.0.1", "--port", str(port), *transfer, *spec.arguments),
    ]
    with spec.log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=settings.environment() | dict(spec.environment),
                start_new_session=True,  # a group of its own, to be ended as a whole
            )
        except FileNotFoundError as error:
            raise EngineFailed(
                f"vllm-python: got {settings.python!r}, which was not found; allowed is the interpreter of "
                f"an environment with vLLM (--vllm-python, ${PYTHON_ENV})"
            ) from error
    running = _Process(spec, f"http://127.0.0.1:{port}", process)
    try:
        yield running
    finally:
        await running.stop()
