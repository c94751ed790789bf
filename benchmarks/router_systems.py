"""The routers of the router's benchmark, as processes on cores of their own: started, asked, and measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.router_load import Load, Measured
from benchmarks.router_mocks import MODEL
from kvhandoff.core.errors import KVHandoffError
from kvhandoff.router.tenants import hash_of, new_key
from kvhandoff.web import free_port

LOGS = Path("build/bench/logs")
ROUTER_ENV = "KVHANDOFF_VLLM_ROUTER"
DEFAULT_ROUTER = Path(".venv-vllm-router/bin/vllm-router")
IMPOSSIBLE = Path(".venv-vllm-router/.impossible")
START_S = 60.0
STOP_S = 10.0
LOAD_S = 600.0
_LOOK_S = 0.05


class SystemFailed(KVHandoffError):
    """A process ended, or did not serve in time."""


@dataclass(frozen=True)
class Cores:
    """Which cores have what."""

    router: tuple[int, ...]
    rest: tuple[int, ...]
    """Mock engines and load generator."""

    @staticmethod
    def split(workers: int = 1) -> Cores:
        """The last `workers` cores for the router, the others for the rest; all for both where there are not
        enough. Raises SystemFailed on a machine with one core."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemFailed("one core: the router needs one for itself")
        own = cores[-workers:] if len(cores) > workers else cores
        return Cores(tuple(own), tuple(c for c in cores if c not in own) or tuple(cores))


@dataclass
class System:
    """A router that runs, or the decode engine without one."""

    name: str
    port: int
    key: str
    cores: Cores
    process: psutil.Process | None = None
    first: int = field(default=0)
    """Number of the next request."""

    def run(self, load: Load) -> Measured:
        """Load it, by a generator in a process of its own. Raises SystemFailed when an answer is wrong."""
        load.port, load.key, load.first = self.port, self.key, self.first
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.router_load"],
            input=msgspec.json.encode(load),
            capture_output=True,
            timeout=LOAD_S,
            check=False,
            preexec_fn=_pinned(self.cores.rest),
        )
        if done.returncode != 0:
            raise SystemFailed(f"{self.name}: {done.stderr.decode().strip().splitlines()[-1:]}")
        measured = msgspec.json.decode(done.stdout, type=Measured)
        self.first += measured.requests
        return measured

    def run_metered(self, load: Load) -> tuple[Measured, float]:
        """`run`, and the CPU seconds that it took here."""
        before = self.cpu_s()
        measured = self.run(load)
        return measured, self.cpu_s() - before

    def cpu_s(self) -> float:
        """CPU seconds used so far, by all of its processes."""
        return sum(times.user + times.system for times in (p.cpu_times() for p in self._processes()))

    def rss(self) -> int:
        """Bytes in memory now, by all of its processes."""
        return sum(p.memory_info().rss for p in self._processes())

    def _processes(self) -> Sequence[psutil.Process]:
        if self.process is None:
            return ()
        return (self.process, *self.process.children(recursive=True))


@contextmanager
def mocks(cores: Cores) -> Iterator[dict[str, str]]:
    """Both mock engines: URLs by role."""
    command = [sys.executable, "-m", "benchmarks.router_mocks"]
    with _process("mocks", command, cores.rest) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemFailed(f"the mock engines did not start; see {LOGS / 'router-mocks.log'}")
        yield json.loads(line)


def set_pace(urls: Mapping[str, str], milliseconds: float) -> None:
    """Between two events of a decode engine's stream; 0: none."""
    request = urllib.request.Request(f"{urls['decode']}/pace", data=str(milliseconds).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


@contextmanager
def kvhandoff(urls: Mapping[str, str], cores: Cores, *options: str) -> Iterator[System]:
    """This router with everything on: tenants with limits, metrics, records, index, path `auto`. The decode
    engine is bound late, so that both legs run one after the other, as vllm-router's do."""
    key = new_key()
    LOGS.mkdir(parents=True, exist_ok=True)
    tenants = LOGS / "router-tenants.json"
    tenant = {
        "name": "bench",
        "keys": [hash_of(key)],
        "salt": "0123456789abcdef",
        "role": "operator",
        "max_concurrency": 100_000,
        "tokens_per_minute": 1_000_000_000_000,
    }
    tenants.write_text(json.dumps({"tenants": [tenant]}))
    command = [
        *(sys.executable, "-m", "kvhandoff", "router", "--port", "0", "--log-level", "warning"),
        *("--prefill", urls["prefill"], "--decode", urls["decode"], "--pair-tests", "off"),
        *("--binding", "late", "--tenants", str(tenants), *options),
    ]
    environment = {**os.environ, "KVHANDOFF_CLUSTER_KEY": "key of the benchmark"}
    with _process("kvhandoff", command, cores.router, environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemFailed(f"the router did not start; see {LOGS / 'router-kvhandoff.log'}")
        port = int(json.loads(line)["url"].rpartition(":")[2])
        yield System("kvhandoff", port, key, cores, psutil.Process(process.pid))


def vllm_router() -> str | None:
    """The command of vllm-router, where it is installed."""
    given = os.environ.get(ROUTER_ENV)
    if given:
        return given
    return str(DEFAULT_ROUTER) if DEFAULT_ROUTER.exists() else None


def why_no_vllm_router() -> str:
    """Why there is none."""
    if IMPOSSIBLE.exists():
        return IMPOSSIBLE.read_text().strip()
    return f"vllm-router is not installed: make vllm-router-env, or set {ROUTER_ENV}"


@contextmanager
def rust(command: str, urls: Mapping[str, str], cores: Cores) -> Iterator[System]:
    """vllm-router in its P/D mode, with its own defaults but for its log."""
    port = free_port()
    arguments = [
        *(command, "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill", urls["prefill"], "--decode", urls["decode"]),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warning"),
    ]
    with _process("vllm-router", arguments, cores.router) as process:
        _await_answer(process, port)
        yield System("vllm-router", port, "", cores, psutil.Process(process.pid))


def _await_answer(process: subprocess.Popen[bytes], port: int) -> None:
    """Until a whole request is answered: a router may listen before it knows its engines."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    url, body = f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(fields).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            if b"[DONE]" in answer.read():
                return
        time.sleep(_LOOK_S)
    raise SystemFailed(f"vllm-router did not serve in {START_S:g} s; see {LOGS / 'router-vllm-router.log'}")


@contextmanager
def _process(
    name: str, command: Sequence[str], cores: Sequence[int], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    LOGS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        log = stack.enter_context((LOGS / f"router-{name}.log").open("wb"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if name != "vllm-router" else log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_pinned(cores),
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _pinned(cores: Sequence[int]) -> Any:
    return lambda: os.sched_setaffinity(0, cores)
