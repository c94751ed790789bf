"""AIPerf: conversations of several turns, streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.clients.deployment import Deployment, environment, run

CONVERSATIONS = 4
TURNS = 3


def test_conversations(
    up: Deployment,
    model_directory: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    home = environment("aiperf")
    record_property("client", "AIPerf")
    record_property("version", run([str(home / "bin/aiperf"), "--version"], cwd=tmp_path).strip())
    before = up.counts()
    command = [
        *(str(home / "bin/aiperf"), "profile", "--model", up.model, "--url", up.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(model_directory)),
        *("--conversation-num", str(CONVERSATIONS), "--conversation-turn-mean", str(TURNS)),
        *("--conversation-turn-stddev", "0", "--concurrency", "2", "--random-seed", "1"),
        *("--prompt-input-tokens-mean", "100", "--prompt-output-tokens-mean", "16"),
        *("--output-artifact-dir", str(tmp_path / "out"), "--ui", "none"),
    ]
    run(command, cwd=tmp_path)
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == CONVERSATIONS * TURNS
    assert not report.get("error_summary")
    assert report["time_to_first_token"]["avg"] > 0
    changes = up.since(before)
    assert (changes.answered(), changes.others()) == (CONVERSATIONS * TURNS, {})
    assert changes("return_lookups_total", result="hit") == CONVERSATIONS * (TURNS - 1)
    assert changes("returned_tokens_total") > CONVERSATIONS * (TURNS - 1) * 64
    record_property("figures", changes.figures())
