"""Bad input on the command line: a message that names what is wrong and what is allowed, and exit code 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tinymodels import CONTEXT, cached_tiny_model


def run(*arguments: str, key: str = "the key of these tests") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVHANDOFF_CLUSTER_KEY": key, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "kvhandoff", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["up", "--prefill", "-1"], "'--prefill': got '-1', allowed is 0 or more"),
        (["up", "--path", "shove"], "'auto', 'pull', 'push', 'local'"),
        (["up", "--return", "maybe"], "'auto', 'on', 'off'"),
        (["up", "--retain", "forever"], "'renewable', 'fixed', 'off'"),
        (["up", "--transport", "carrier-pigeon"], "'auto', 'nixl', 'shm'"),
        (["up", "--port", "70000"], "'--port': got '70000', allowed is 0 to 65535"),
        (["up", "--port", "abc"], "'--port': got 'abc': Input should be a valid integer"),
        (["up", "--kv-memory", "inf"], "got 'inf', allowed is 0.001 to 1048576"),
        (
            ["engine", "--role", "decode", "--kv-memory", "inf"],
            "got 'inf', allowed is 0.001 to 1048576",
        ),
        (["engine", "--role", "decode", "--retain-lease", "inf"], "got 'inf', allowed is 0.1 to 10000000000"),
        (["router", "--index-ttl", "soon"], "'--index-ttl': got 'soon': Input should be a valid number"),
        (["router", "--index-ttl", "nan"], "'--index-ttl': got 'nan', allowed is 0.1 to 10000000000"),
        (["router"], "decode: got none, allowed is one or more, --fleet FILE, or --registration"),
        (
            ["router", "--decode", "http://127.0.0.1:1", "--host", ""],
            "host: got '', allowed is an address or",
        ),
        (["router", "--decode", "http://127.0.0.1:1", "--connector", "nixl", "--host", ""], "host: got ''"),
        (["router", "--decode", "http://127.0.0.1:1", "--host", "a..b"], "host: got 'a..b', allowed is an"),
        (["router", "--decode", "http://127.0.0.1:1", "--host", "a b"], "host: got 'a b', allowed is an"),
        (
            ["router", "--decode", "http://127.0.0.1:1", "--workers", "2", "--return", "off", "--host", " "],
            "host: got ' ', allowed is an address or a name",
        ),
        (["engine", "--role", "decode", "--host", ""], "host: got '', allowed is an address or a name"),
        (["up", "--host", ""], "host: got '', allowed is an address or a name"),
        (["router", "--decode", "localhost"], "http://HOST:PORT"),
        (["router", "--decode", "http://127.0.0.1:1", "--on-miss", "hope"], "'recompute', 'error'"),
        (["router", "--decode", "http://127.0.0.1:1", "--index", "http://h:1"], "index: got 'http://h:1'"),
        (["router", "--decode", "http://127.0.0.1:1", "--index", "valkey://h:x"], "allowed is memory"),
        (["router", "--decode", "http://127.0.0.1:1", "--binding", "hope"], "'early', 'late', 'rebind'"),
        (["router", "--decode", "http://127.0.0.1:1", "--prefill-policy", "hope"], "'round_robin'"),
        (["engine", "--role", "cook"], "'prefill', 'decode', 'both'"),
        (["engine", "--role", "decode", "--kv-memory", "1", "--kv-blocks", "9"], "kv-memory and kv-blocks"),
        (["engine", "--role", "decode", "--log-level", "loud"], "'debug', 'info', 'warning', 'error'"),
        (["up", "--dtype", "int3"], "'auto', 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_bad_flags(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--control", "nonsense"],
            "control: got 'nonsense', allowed is tcp://HOST:PORT; port 0 takes a free",
        ),
        (["--control", "tcp://127.0.0.1:65536"], "control: got 'tcp://127.0.0.1:65536', allowed is tcp://"),
        (
            ["--control", "tcp://192.0.2.1:0"],
            "control: got 'tcp://192.0.2.1:0', which can't be listened at (Ca",
        ),
        (["--register", "nonsense"], "register: got 'nonsense', allowed is http://HOST:PORT"),
        (["--register-url", "nonsense"], "register-url: got 'nonsense', allowed is http://HOST:PORT"),
        (
            ["--register-url", "http://d:1"],
            "register-url: got 'http://d:1' without register, allowed is with register only",
        ),
        (["--model-name", ""], "model-name: got '', allowed is a name, or to leave it out"),
        (["--model-name", " "], "model-name: got ' ', allowed is a name, or to leave it out"),
        (
            ["--engine-id", ""],
            "engine-id: got '', allowed are letters (a to z), digits, '.', '_', ':' and '-'",
        ),
        (["--engine-id", "a b/c"], "engine-id: got 'a b/c', allowed are letters (a to z), digits, '.', "),
        (["--cluster-key-file", "/nowhere"], "cluster-key-file: /nowhere can't be read"),
        (["--traces", "nonsense"], "traces: got 'nonsense', allowed is http://HOST:PORT"),
    ],
)
def test_options_are_looked_at_before_the_model(arguments: list[str], said: str) -> None:
    done = run("engine", "--role", "decode", "--model", "/no/such/model", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "/no/such/model" not in done.stderr


@pytest.mark.parametrize(
    ("binding", "path", "warned"),
    [("rebind", "pull", True), ("late", "push", True), ("early", "push", False), ("early", "auto", False)],
)
def test_a_binding_without_effect(binding: str, path: str, warned: bool) -> None:
    arguments = ("router", "--decode", "http://127.0.0.1:1", "--binding", binding, "--path", path)
    done = run(*arguments, "--host", "192.0.2.1")  # where it can't listen
    assert done.returncode == 2
    warning = f"WARNING binding {binding}: has no effect on requests of path {path}, which is theirs unless"
    assert (warning in done.stderr) is warned


@pytest.mark.parametrize("command", [["up", "--port", "0"], ["engine", "--role", "decode"]])
def test_blocks_larger_than_the_context(command: list[str]) -> None:
    arguments = ("--model", str(cached_tiny_model("llama")), "--block-size", str(CONTEXT + 1))
    done = run(*command, *arguments)
    assert done.returncode == 2
    wanted = f"block-size: got {CONTEXT + 1}, allowed is up to the model's context, {CONTEXT} tokens"
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_no_cluster_key() -> None:
    done = run("router", "--decode", "http://127.0.0.1:1", key="")
    assert done.returncode == 2
    assert "KVHANDOFF_CLUSTER_KEY" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["router", "--decode", "foo[/b]bar"], "decode: got 'foo[/b]bar', allowed is http://HOST:PORT"),
        (["router", "--decode", "http://[fd00::1]:99999"], "decode: got 'http://[fd00::1]:99999' (Port out"),
        (
            ["router", "--decode", "http://x:1", "--tenants", "no[/x]file"],
            "tenants: no[/x]file can't be read",
        ),
        (["router", "--port", "[/b]"], "'--port': got '[/b]': Input should be a valid integer"),
        (["router-key", "[/b]"], "name: got '[/b]', allowed is 1 to 64 letters"),
        (["up", "--port", "0", "--model", "x[/b]y"], "model: 'x[/b]y' was not found"),
        (["engine", "--role", "decode", "--control", ":x:[/b]"], "control: got ':x:[/b]', allowed is tcp://"),
        (["doctor", "--engine", "[bold]"], "engine: got '[bold]', allowed is http://HOST:PORT"),
    ],
)
def test_values_are_shown_as_they_are(arguments: list[str], said: str) -> None:
    """None is taken for markup, or for the name of an emoji."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_an_extra_is_named() -> None:
    """Where its libraries are not installed, and in the help."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None; from kvhandoff.cli import main\n"
        "sys.argv = ['kvhandoff', 'router', '--decode', 'http://x:1', '--traces', 'http://x:2']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install 'kvhandoff[traces]', or --traces off" in done.stderr
    for command in ("up", "engine", "router"):
        assert "Needs kvhandoff[traces]." in run(command, "--help").stdout


@pytest.mark.parametrize("command", [["up"], ["engine", "--role", "decode"]])
def test_bad_models(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    done = run(*command, "--model", str(tmp_path), "--port", "0")
    assert done.returncode == 2
    assert "weights" in done.stderr
    missing = run(*command, "--model", str(tmp_path / "nowhere"), "--port", "0")
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr


@pytest.mark.parametrize(
    "command", [["up"], ["engine", "--role", "decode"], ["router", "--decode", "http://x:1"]]
)
def test_port_in_use(command: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        model = [] if command[0] == "router" else ["--model", str(cached_tiny_model("llama"))]
        done = run(*command, *model, "--port", port)
    assert done.returncode == 2
    assert done.stderr == f"error: port {port} on 127.0.0.1: can't listen (the port is in use)\n"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nowhere.invalid"])
@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        ["engine", "--role", "decode"],
        ["router"],
        ["router", "--connector", "nixl"],
        ["router", "--workers", "2", "--return", "off"],
    ],
)
def test_a_host_of_another_machine(command: list[str], host: str) -> None:
    engine = ["--decode", "http://127.0.0.1:1"] if command[0] == "router" else []
    done = run(*command, *engine, "--port", "0", "--host", host)
    assert done.returncode == 2
    lines = done.stderr.splitlines()  # and nothing has been started
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: host: got '{host}', which can't be listened at (")
    assert lines[0].endswith(
        "), allowed is an address or a name of this machine; 0.0.0.0 or :: is all of them"
    )


def test_import_and_router_need_no_torch() -> None:
    code = (
        "import sys, kvhandoff, kvhandoff.cli, kvhandoff.router.app, kvhandoff.handoff.node\n"
        "heavy = {'torch', 'transformers', 'nixl_cu12', 'vllm'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
