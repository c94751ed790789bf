"""`--traces`, and the environment variables that OpenTelemetry's users know."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from kvhandoff.cli.traces import traces_endpoint
from kvhandoff.core.errors import ConfigError
from tests.cli.test_bad_input import run

BASE, WHOLE = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BASE, WHOLE, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flag", "environment", "endpoint"),
    [
        (None, {}, None),
        ("off", {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", {}, "https://c/otlp/v1/traces"),
        (None, {BASE: "http://c:4318"}, "http://c:4318/v1/traces"),
        (None, {BASE: "http://c:4318/otlp/"}, "http://c:4318/otlp/v1/traces"),
        (None, {WHOLE: "http://c:4318/spans"}, "http://c:4318/spans"),
        (None, {BASE: "http://b", WHOLE: "http://c"}, "http://c"),
        (None, {BASE: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://c/v1/traces"),
        (None, {BASE: ""}, None),
        ("off", {BASE: "http://c"}, None),
        ("http://d", {BASE: "http://c"}, "http://d/v1/traces"),
        (None, {BASE: "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_where_traces_go(
    flag: str | None, environment: dict[str, str], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert traces_endpoint(flag) == endpoint


@pytest.mark.parametrize("url", ["c:4318", "ftp://c", "http://", "on", "http://c:x", "http://[c"])
def test_bad_urls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"traces: got .* allowed is http://HOST:PORT"):
        traces_endpoint(url)
    monkeypatch.setenv(BASE, url)
    with pytest.raises(ConfigError, match=f"{BASE}: got "):
        traces_endpoint(None)


@pytest.mark.parametrize("url", ["http://user:secret@c", "http://c?key=secret", "http://c#secret"])
def test_keys_do_not_belong_into_the_url(url: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        traces_endpoint(url)
    assert "secret" not in str(refused.value)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "http://c:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(
        ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: got 'grpc', allowed is http/protobuf"
    ):
        traces_endpoint(None)


def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert traces_endpoint(None) is None
    with pytest.raises(ConfigError, match=r"pip install 'kvhandoff\[traces\]'"):
        traces_endpoint("http://c")


@pytest.mark.parametrize("command", [["up"], ["router", "--decode", "http://127.0.0.1:1"]])
def test_bad_input(command: list[str]) -> None:
    done = run(*command, "--traces", "somewhere")
    assert done.returncode == 2
    assert "traces: got 'somewhere'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    done = run("router", "--decode", "http://127.0.0.1:1", "--port", "0", "--traces", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "OTEL_" in done.stderr
    assert "Traceback" not in done.stderr
