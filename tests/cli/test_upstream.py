"""`kvhandoff router` in front of engines with upstream's connectors: started as an operator would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest

from tests.cli.test_bad_input import run

DECODE = ("--decode", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--connector", "mooncake", *DECODE], "'kvhandoff', 'nixl', 'nixl-push'"),
        (["--connector", "nixl", *DECODE, "--path", "push"], "allowed with nixl is auto, pull, local"),
        (["--connector", "nixl", "--decode", "h:1"], "allowed is URL[,engine_id=ID]"),
        (["--connector", "nixl-push", *DECODE, "--prefill", "http://h:1"], "without engine_id"),
    ],
)
def test_bad_flags(arguments: list[str], said: str) -> None:
    done = run("router", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--binding", "late"], "binding: got late"),
        (["--prefill-policy", "round_robin"], "prefill-policy: got round_robin"),
        (["--decode-policy", "round_robin"], "decode-policy: got round_robin"),
        (["--on-miss", "error"], "on-miss: got error"),
        (["--retain", "fixed"], "retain: got fixed"),
        (["--index", "valkey://user:secret@h:1/0"], "index: got a server's URL"),
        (["--workers", "2"], "workers: got 2"),
        (["--fleet", "fleet.yaml"], "fleet: got fleet.yaml"),
        (["--registration"], "registration: got it"),
    ],
)
def test_options_of_our_own_engines(arguments: list[str], said: str) -> None:
    done = run("router", "--connector", "nixl", *DECODE, *arguments)
    assert done.returncode == 2
    assert f"{said}, allowed with --connector nixl is to leave it out" in " ".join(done.stderr.split())


def test_it_needs_no_cluster_key() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KVHANDOFF_CLUSTER_KEY"}
    command = [sys.executable, "-m", "kvhandoff", "router", "--connector", "nixl", *DECODE, "--port", "0"]
    with subprocess.Popen(
        [*command, "--lifeline"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as router:
        try:
            assert router.stdout is not None
            url = json.loads(router.stdout.readline())["url"]
            with urllib.request.urlopen(f"{url}/health") as answer:
                assert json.load(answer) == {"status": "ok"}
        finally:
            assert router.stdin is not None
            router.stdin.close()  # its lifeline
        assert router.wait(30) == 0
