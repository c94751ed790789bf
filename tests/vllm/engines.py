"""Stock vLLM engines as processes, with the connector loaded by its plain name: to ask, freeze and kill.

The settings are those of a small CPU: one thread each, a pool of a few dozen blocks, prompts computed in
many chunks. An engine is a process group (API server, engine core, workers), frozen or killed as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from benchmarks.vllm_engines import CALM

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.records import BlockCounts, EngineState, LegRecord
from kvhandoff.web import free_port
from tests.vllm.environment import Environment

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

MODEL = "tiny"
"""Name under which all models are served."""
START_S = 400.0
"""Importing vLLM and compiling its first kernels takes most of a minute on two cores, more on busy ones."""
DEADLINE = 30.0
CHUNK = 64
"""Tokens of one step: prompts of a few hundred tokens are computed in several."""
BLOCK = 32
"""Tokens of one block: the fewest that vLLM's CPU attention takes."""
MAX_LEN = 1024

_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else engines on one machine share the same core
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(CALM),  # where processes wait, they sleep
}
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "UCX_TLS", "LANG")


@dataclass
class VllmEngine:
    """One engine through the lives of its process. Started again, it keeps its addresses, and so its name."""

    role: Role
    environment: Environment
    model_dir: Path
    cluster_key: bytes = field(repr=False)
    log: Path
    session: aiohttp.ClientSession = field(repr=False)
    num_blocks: int = 96
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`: what the connector's settings may say."""
    arguments: Sequence[str] = ()
    """Further arguments of `vllm serve`."""
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        """Where completions go."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def side_url(self) -> str:
        """Where the connector answers the router."""
        return f"http://127.0.0.1:{self.side_port}"

    def launch(self) -> None:
        """Start the processes; `ready` waits until they serve."""
        assert self._process is None, f"the {self.role} engine runs"
        transfer = {
            "kv_connector": "KVHandoffConnector",
            "kv_role": "kv_both",
            "kv_port": self.side_port,
            "kv_connector_extra_config": {
                "role": self.role,
                "control_port": self.control_port,
                **self.extra_config,
            },
        }
        command = [
            sys.executable, str(Path(__file__).with_name("lifeline.py")),
            str(self.environment.vllm), "serve", str(self.model_dir),
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL,
            "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LEN),
            "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(self.num_blocks),
            "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8",
            "--disable-uvicorn-access-log", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--kv-transfer-config", json.dumps(transfer),
            *self.arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            log.write(f"\n=== {' '.join(command[2:])}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Wait until both servers answer. Fails at once when the process ends."""

        async def serving() -> bool:
            assert self.alive, f"the {self.role} engine ended before it served:\n{self.tail()}"
            return await self.serves()

        await eventually(serving, START_S, self._log_tail, every=0.2)

    async def start(self) -> None:
        """Start it and wait until it serves."""
        self.launch()
        await self.ready()

    async def kill(self) -> None:
        """As kill -9 does to each of its processes; returns when all of them are gone."""
        assert self._process is not None, f"the {self.role} engine does not run"
        self._signal(signal.SIGKILL)
        self._process.wait(DEADLINE)
        await self._gone(DEADLINE)

    async def stop(self) -> None:
        """End it, however it is: first as an operator would, then by force."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            await self._gone(DEADLINE)
        except AssertionError:
            self._signal(signal.SIGKILL)
            await self._gone(DEADLINE)
            raise

    def freeze(self) -> None:
        """Stop its processes where they are: its connections stay up, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether the API server runs; it ends when its engine core does."""
        return self._process is not None and self._process.poll() is None

    async def serves(self) -> bool:
        """Whether both of its servers answer."""
        pages = (f"{self.url}/health", f"{self.side_url}/internal/state")
        return self.alive and all([await self._answers(page) for page in pages])

    async def state(self, after: int = 0) -> EngineState:
        """What the connector tells the router."""
        async with self.session.get(f"{self.side_url}/internal/state", params={"after": after}) as answer:
            assert answer.status == 200, await answer.text()
            return msgspec.json.decode(await answer.read(), type=EngineState)

    async def identity(self) -> Identity:
        """This life of it."""
        state = await self.state()
        return Identity(EngineId(state.engine_id), Epoch(state.epoch))

    async def blocks(self) -> BlockCounts:
        """Its pool."""
        async with self.session.get(f"{self.side_url}/debug/kv") as answer:
            return msgspec.json.decode(await answer.read(), type=BlockCounts)

    async def record(self, handoff_id: str, attempt: int = 0) -> LegRecord:
        """Its account of a leg that has been answered."""
        found: list[LegRecord] = []

        async def written() -> bool:
            name = (handoff_id, attempt)
            found[:] = [r for r in (await self.state()).records if (r.handoff_id, r.attempt) == name]
            return bool(found)

        await eventually(written)
        return found[0]

    async def at_rest(self) -> bool:
        """No request, and every block free or cached, or kept for a conversation's next turn."""
        state = await self.state()
        blocks = state.blocks
        idle = state.running == state.waiting == state.loading == 0
        return idle and blocks.free + blocks.cached + blocks.retained == blocks.total

    def tail(self, lines: int = 60) -> str:
        """The errors that its log names, then its end: what vLLM prints last is seldom the cause."""
        log = self.log.read_text(errors="replace").splitlines()
        errors = dict.fromkeys(line for line in log[:-lines] if "Error: " in line)
        return "\n".join([*list(errors)[:10], *log[-lines:]])

    async def _log_tail(self) -> str:
        return self.tail()

    async def _answers(self, url: str) -> bool:
        try:
            async with self.session.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        # The group outlives its leader while a worker runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _gone(self, within: float) -> None:
        process = self._process
        assert process is not None

        async def gone() -> bool:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return True
            return False

        await eventually(gone, within, self._log_tail)
        assert process.stdin is not None
        process.stdin.close()
        self._process = None

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return {**kept, **_CPU_ENVIRONMENT, "KVHANDOFF_CLUSTER_KEY": self.cluster_key.decode()}


async def _nothing() -> str:
    return ""


async def eventually(
    condition: Callable[[], Awaitable[bool]],
    within: float = DEADLINE,
    describe: Callable[[], Awaitable[str]] = _nothing,
    every: float = 0.01,
) -> None:
    """Wait for a condition of other processes; fails after `within` seconds, saying what `describe` says."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            while not await condition():  # noqa: ASYNC110  other processes' conditions have no event
                await asyncio.sleep(every)
            return
    raise AssertionError(f"not within {within} s: {await describe()}")
