"""Where a process is told to send its traces: `--traces`, or OpenTelemetry's own environment variables."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import typer

from kvhandoff.core.errors import ConfigError

OFF = "off"
PATH = "/v1/traces"
"""Of an OTLP collector: https://opentelemetry.io/docs/specs/otlp/#otlphttp-request"""
_PROTOCOL = "http/protobuf"

Traces = typer.Option(
    None,
    "--traces",
    metavar="URL|off",
    help="An OpenTelemetry collector (OTLP over HTTP, e.g. http://127.0.0.1:4318), or off. By default "
    "$OTEL_EXPORTER_OTLP_ENDPOINT, and off without it. Needs kvhandoff\\[traces].",  # no markup
)


def traces_endpoint(given: str | None) -> str | None:
    """The whole URL that spans are posted to, or None for no traces. `given`: the flag's value.

    Raises ConfigError for a URL or a protocol that can't be used, and where the libraries are not installed.
    """
    if given == OFF or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoint = _from_environment() if given is None else _whole("traces", given)
    if endpoint is not None:
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk.trace  # noqa: F401  found, or not
        except ImportError as error:
            raise ConfigError(
                "traces: the libraries are not installed: pip install 'kvhandoff[traces]', or --traces off"
            ) from error
    return endpoint


def _from_environment() -> str | None:
    """See https://opentelemetry.io/docs/specs/otel/protocol/exporter/"""
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return None
    whole = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if not (whole or base):
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name, "").strip():
            if protocol != _PROTOCOL:
                raise ConfigError(f"{name}: got {protocol!r}, allowed is {_PROTOCOL}, or --traces off")
            break
    if whole:
        return _checked("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", whole)
    return _checked("OTEL_EXPORTER_OTLP_ENDPOINT", base).rstrip("/") + PATH


def _whole(name: str, url: str) -> str:
    """A URL without a path gets the collector's own."""
    checked = _checked(name, url)
    return checked.rstrip("/") + PATH if urlsplit(checked).path in ("", "/") else checked


def _checked(name: str, url: str) -> str:
    allowed = "http://HOST:PORT or https://HOST:PORT, keys in $OTEL_EXPORTER_OTLP_HEADERS, or off"
    if any(sign in url for sign in "@?#"):  # not shown: it may hold a password
        raise ConfigError(f"{name}: got a URL with a user, query or fragment, allowed is {allowed}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{name}: got {url!r}, allowed is {allowed}")
    return url
