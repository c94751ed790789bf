"""Files that secure a router's connections: its certificate, and whose certificates of engines it trusts."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhandoff.core.errors import ConfigError
from kvhandoff.router.watched import Watched, read_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What a router is told of who may speak to whom. Raises ConfigError when a value can't be used."""

    tenants: Path | None = None
    """The file of tenants (`tenants.py`); None: everything is open."""
    tls_cert: Path | None = None
    """PEM: the router's certificate and those between it and its root; None: plain HTTP."""
    tls_key: Path | None = None
    """PEM: the certificate's private key, not encrypted."""
    engine_ca: Path | None = None
    """PEM: the only roots trusted for engines at https URLs; None: the system's."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls-cert, tls-key: got one of them, allowed is both or neither")


def listener_tls(security: Security) -> Watched[ssl.SSLContext] | None:
    """For the router's listener; new certificates are taken up for new connections. Raises ConfigError."""
    cert, key = security.tls_cert, security.tls_key
    if cert is None or key is None:
        return None
    live = _server_context()

    def load(_: Sequence[bytes]) -> ssl.SSLContext:  # OpenSSL reads the files itself
        _load_chain(_server_context(), cert, key)  # a bad pair would spoil the one that is in use
        _load_chain(live, cert, key)
        return live

    return Watched("tls-cert, tls-key", [cert, key], load)


def engine_tls(security: Security) -> ssl.SSLContext | None:
    """For connections to engines; None: the system's roots. Raises ConfigError."""
    path = security.engine_ca
    if path is None:
        return None
    read_file("engine-ca", path)
    try:
        return ssl.create_default_context(cafile=str(path))
    except ssl.SSLError as error:
        raise ConfigError(f"engine-ca: {path} has no usable certificate in PEM ({error.reason})") from error


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    def no_password() -> str:
        # Without this OpenSSL would ask for it at the terminal.
        raise ConfigError(f"tls-key: {key} is encrypted, allowed is a key without a password")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except OSError as error:
        why = (error.reason or "no PEM in it") if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"tls-cert, tls-key: {cert} and {key} can't be used together ({why})") from error
