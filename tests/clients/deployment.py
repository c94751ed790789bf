"""`kvhandoff up`, as a user starts it, and what its router says of the requests it had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvhandoff.web import free_port

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Until the engines serve; vLLM's take a minute, and the default model is converted once."""
CLIENT_S = 300.0
"""One run of a client."""

Counts = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Deployment:
    """Engines and a router, in processes of their own."""

    url: str
    model: str = "smollm2"

    @property
    def api(self) -> str:
        """For OpenAI clients."""
        return f"{self.url}/v1"

    def get(self, path: str) -> Any:
        """The JSON of a page."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def record(self, identifier: str) -> dict[str, Any]:
        """Of a request, by the id of its response."""
        record: dict[str, Any] = self.get(f"/v1/handoffs/{identifier}")
        return record

    def since(self, before: Counts) -> Changes:
        """What has been counted from then on."""
        now = self.counts()
        return Changes({name: value - before.get(name, 0.0) for name, value in now.items()})

    def counts(self) -> Counts:
        """The router's metrics now, once nothing is under way and all accounts are in."""
        deadline, last = time.monotonic() + 30, None
        while time.monotonic() < deadline:
            counts = self._counts()
            if counts["kvhandoff_router_in_flight", frozenset()] == 0 and counts == last:
                return counts
            last = counts
            time.sleep(1.0)  # the engines' accounts come in with their state reports, twice a second
        raise AssertionError(f"the router is not at rest: {last}")

    def _counts(self) -> Counts:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            page = response.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@dataclass(frozen=True)
class Changes:
    """How much each count has grown."""

    grown: Counts

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all samples that have these labels."""
        wanted = set(labels.items())
        full = f"kvhandoff_router_{name}"
        return sum(value for (own, given), value in self.grown.items() if own == full and wanted <= given)

    def answered(self) -> float:
        """Requests that ended with 200."""
        return self("requests_total", status="200")

    def others(self) -> dict[str, float]:
        """Requests that ended otherwise, by status."""
        return {
            dict(labels)["status"]: value
            for (name, labels), value in self.grown.items()
            if name == "kvhandoff_router_requests_total" and value and ("status", "200") not in labels
        }

    def figures(self) -> dict[str, float]:
        """For the report."""
        return {
            "requests": self("requests_total"),
            "histories_found": self("return_lookups_total", result="hit"),
            "returned_tokens": self("returned_tokens_total"),
        }


@contextmanager
def running(logs: Path, *arguments: str) -> Iterator[Deployment]:
    """`kvhandoff up` with these arguments; it ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "kvhandoff", "up", "--port", str(port), *arguments]
    with (logs / "up.log").open("w+") as log, process(command, log) as up:
        url = f"http://127.0.0.1:{port}"
        await_page(f"{url}/ready", up, log, until=lambda page: all(e["healthy"] for e in page["engines"]))
        yield Deployment(url)


@contextmanager
def process(
    command: list[str], log: IO[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    child = subprocess.Popen(
        command, stdout=log, stderr=log, text=True, env={**os.environ, **(environment or {})}
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def await_page(url: str, child: subprocess.Popen[str], log: IO[str], until: Any = bool) -> None:
    """Until a page answers with 200 and JSON that `until` finds good."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert child.poll() is None, _end_of(log)
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if until(json.load(response)):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise AssertionError(f"{url} is not served after {START_S:g} s: {_end_of(log)}")


def _end_of(log: IO[str]) -> str:
    log.flush()
    return Path(log.name).read_text()[-4000:]


def run(command: list[str], *, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """What a client printed on standard output; it must end well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(name: str) -> Path:
    """The folder of a client's own environment. Skips the test where `make clients` has not made it."""
    home = ROOT / f".venv-clients-{name}"
    if (home / ".ready").is_file():
        return home
    why = home / ".impossible"
    pytest.skip(why.read_text().strip() if why.is_file() else f"no {home.name}: `make clients` makes it")
