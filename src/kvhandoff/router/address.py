"""Where an engine is: its server for completions, and the pages that only the router asks for.

An embedded engine serves both at one address. A vLLM engine's connector listens beside vLLM's server.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import check_url, root_url

SIDE_PORT = 14579
"""Where a vLLM engine's connector listens unless it is told otherwise (`kv_port` of --kv-transfer-config)."""

_INTERNAL = ",internal="

DNS = "dns+"
"""Before the URL of a name that stands for many engines."""


class EngineAddress(NamedTuple):
    """One engine's addresses, without a slash at their ends."""

    url: str
    """Takes completions."""
    internal: str | None = None
    """Has the pages under /internal; None: `url` itself, or the usual port of its host."""

    def candidates(self) -> tuple[str, ...]:
        """Where the pages may be, in the order to try them."""
        if self.internal is not None:
            return (self.internal,)
        host = urlsplit(self.url).hostname or ""
        return (self.url, root_url(host, SIDE_PORT))


def parse_address(name: str, text: str) -> EngineAddress:
    """`URL` or `URL,internal=URL`. Raises ConfigError; `name`: the setting, for its message."""
    url, comma, internal = text.partition(_INTERNAL)
    if "," in url or "," in internal:
        raise ConfigError(f"{name}: got {text!r}, allowed is URL or URL{_INTERNAL}URL")
    check_url(name, url)
    if comma:
        check_url(f"{name}{_INTERNAL.removesuffix('=')}", internal)
    return EngineAddress(url.rstrip("/"), internal.rstrip("/") if comma else None)


class EngineName(NamedTuple):
    """A name whose every address is an engine, all at one port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS}http://{self.host}:{self.port}"

    def url(self, address: str) -> str:
        """The engine at this one of its IP addresses."""
        return root_url(address, self.port)


def parse_name(name: str, text: str) -> EngineName:
    """`dns+http://NAME:PORT`. Raises ConfigError; `name`: the setting, for its message."""
    allowed = ConfigError(f"{name}: got {text!r}, allowed is {DNS}http://NAME:PORT")
    url = text.removeprefix(DNS)
    try:
        check_url(name, url)
    except ConfigError as error:
        raise allowed from error
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.port is None or parts.hostname is None:
        raise allowed
    return EngineName(parts.hostname, parts.port)
