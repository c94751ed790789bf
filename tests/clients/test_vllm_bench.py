"""`vllm bench serve`, and vLLM's benchmark of conversations, which is no part of its package."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.deployment import Deployment, environment, run
from tests.vllm.environment import find

REQUESTS = 12
MULTI_TURN = "KVHANDOFF_VLLM_MULTI_TURN"
"""Names vLLM's folder benchmarks/multi_turn."""


QUIET = {"VLLM_NO_USAGE_STATS": "1"}


def vllm_version(vllm: Path, where: Path) -> str:
    return run([str(vllm), "--version"], cwd=where, environment=QUIET).strip()


@pytest.fixture(scope="module")
def vllm() -> Path:
    """vLLM's command."""
    environment = find()
    if environment.python is None:
        pytest.skip(f"no vLLM: {environment.why_not}")
    return environment.vllm


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
def test_bench_serve(
    up: Deployment,
    vllm: Path,
    model_directory: Path,
    tmp_path: Path,
    backend: str,
    endpoint: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("client", f"vllm bench serve, {backend}")
    record_property("version", vllm_version(vllm, tmp_path))
    before = up.counts()
    command = [
        *(str(vllm), "bench", "serve", "--backend", backend, "--base-url", up.url, "--endpoint", endpoint),
        *("--model", up.model, "--tokenizer", str(model_directory), "--dataset-name", "random"),
        *("--random-input-len", "128", "--random-output-len", "16", "--num-prompts", str(REQUESTS)),
        *("--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    run(command, cwd=tmp_path, environment=QUIET)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * 16
    changes = up.since(before)
    assert changes.answered() >= REQUESTS
    assert changes.others() == {}
    record_property("figures", changes.figures())


def test_multi_turn(
    up: Deployment,
    vllm: Path,
    model_directory: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    home = environment("multi-turn")
    if MULTI_TURN not in os.environ:
        pytest.skip(f"${MULTI_TURN} does not name vLLM's benchmarks/multi_turn")
    record_property("client", "vLLM's benchmark_serving_multi_turn.py")
    record_property("version", vllm_version(vllm, tmp_path))
    conversations, turns = 4, 3
    words = ("river", "stone", "garden", "window", "market", "letter", "morning", "silver", "engine")
    pick = random.Random(1)

    def text(count: int) -> str:
        return " ".join(pick.choice(words) for _ in range(count))

    given = [
        {
            "id": f"conversation-{number}",
            "messages": [
                {"role": role, "content": text(90 if role == "user" else 12)}
                for _ in range(turns)
                for role in ("user", "assistant")
            ],
        }
        for number in range(conversations)
    ]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(given))
    before = up.counts()
    script = Path(os.environ[MULTI_TURN]) / "benchmark_serving_multi_turn.py"
    command = [
        *(str(home / "bin/python"), str(script), "--model", str(model_directory)),
        *("--served-model-name", up.model, "--url", up.url, "--input-file", str(file)),
        # One conversation for each of its clients at a time: with more it ends before the last ones have.
        *("--num-clients", "2", "--max-active-conversations", "2", "--no-early-stop", "--seed", "1"),
        *("--limit-min-tokens", "12", "--limit-max-tokens", "12"),
    ]
    run(command, cwd=tmp_path)
    changes = up.since(before)
    assert changes.answered() == conversations * turns
    assert changes.others() == {}
    assert changes("return_lookups_total", result="hit") == conversations * (turns - 1)
    record_property("figures", changes.figures())
