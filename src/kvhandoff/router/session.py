"""How the router's HTTP connections to engines are kept."""

from __future__ import annotations

import aiohttp

from kvhandoff.router.security import Security, engine_tls

_KEEP_IDLE_S = 3.0
"""Idle connections to engines are kept this long, well below what engines keep theirs: vLLM's server 5 s. One
that the engine closes as a request goes out on it costs that request an attempt."""


def engine_session(connect_s: float, security: Security) -> aiohttp.ClientSession:
    """A session for all engines: as many connections as there are legs, no time limits but for connecting
    (each wait has its own), nothing unpacked, nothing taken from the environment or remembered. Raises
    ConfigError."""
    tls = engine_tls(security) or True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
