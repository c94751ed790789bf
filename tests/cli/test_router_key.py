"""Keys, tenants and certificates on the command line, as an operator would use them."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhandoff.router.tenants import read_tenants
from tests.cli.test_bad_input import run
from tests.router.certificates import CERT_A, KEY_A

DECODE = ("--decode", "http://127.0.0.1:1")


@contextmanager
def router(*arguments: str) -> Iterator[str]:
    """A router process; its URL."""
    command = [sys.executable, "-m", "kvhandoff", "router", *DECODE, "--port", "0", "--lifeline", *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, "KVHANDOFF_CLUSTER_KEY": "a key of these tests"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.stdin.close()  # its lifeline
        assert process.wait(30) == 0


def made(*arguments: str) -> tuple[str, str]:
    """(lines for the file, key) of a new key."""
    done = run("router-key", *arguments)
    assert done.returncode == 0
    keys = re.findall(r"kvh_[A-Za-z0-9_-]{43}", done.stderr)
    assert len(keys) == 1
    assert keys[0] not in done.stdout
    return done.stdout, keys[0]


def test_keys_are_made_for_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    entries = [made("acme"), made("ops", "--operator")]
    file.write_text("tenants:\n" + "".join(lines for lines, _ in entries))
    tenants = read_tenants(file, file.read_bytes())
    found = [tenants.of(key) for _, key in entries]
    assert [(tenant.name, tenant.role) for tenant in found if tenant] == [
        ("acme", "client"),
        ("ops", "operator"),
    ]
    assert len({tenant.salt for tenant in tenants}) == 2


def test_a_bad_name() -> None:
    done = run("router-key", "a b")
    assert done.returncode == 2
    assert "name: got 'a b', allowed is 1 to 64 letters" in done.stderr
    assert "kvh_" not in done.stderr


@pytest.mark.parametrize("connector", [[], ["--connector", "nixl"]])
def test_a_router_asks_for_keys_over_tls(tmp_path: Path, connector: list[str]) -> None:
    lines, key = made("ops", "--operator")
    files = {"tenants": "tenants:\n" + lines, "tls.crt": CERT_A, "tls.key": KEY_A}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tls = ("--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key"))
    trust = ssl.create_default_context(cadata=CERT_A)
    with router("--tenants", str(tmp_path / "tenants"), *tls, *connector) as url:
        assert url.startswith("https://")
        with urllib.request.urlopen(f"{url}/health", context=trust) as answer:
            assert json.load(answer) == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/v1/models", context=trust)
        with refused.value:
            assert refused.value.code == 401
            assert json.load(refused.value)["error"]["code"] == "invalid_api_key"
        asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, context=trust) as answer:
            assert json.load(answer)["data"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tenants", "{bad}"], "tenants: missing, it is required"),
        (["--tenants", "{missing}"], "missing can't be read"),
        (["--tls-cert", "{bad}"], "tls-cert, tls-key: got one of them, allowed is both or neither"),
        (["--tls-cert", "{bad}", "--tls-key", "{bad}"], "can't be used together"),
        (["--engine-ca", "{bad}"], "engine-ca: "),
        (["--engine-ca", "{bad}", "--connector", "nixl"], "engine-ca: "),
    ],
)
def test_bad_files(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "bad").write_text("{}")
    places = {"bad": tmp_path / "bad", "missing": tmp_path / "missing"}
    done = run("router", *DECODE, "--port", "0", *(text.format_map(places) for text in arguments))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
