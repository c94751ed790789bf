"""URLs and hosts: those that a person has written, and those that are told to others."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from kvhandoff.core.errors import ConfigError

_NAME = re.compile(rb"[A-Za-z0-9._-]+")
"""A host's, once it is encoded as the DNS has it."""

_WANTED = "http://HOST:PORT or https://HOST:PORT"


def check_host(name: str, host: str) -> None:
    """Raises ConfigError unless it can be where a server listens. The operating system takes an empty one for
    all addresses, which have to be asked for."""
    if not (_is_address(host) or _is_name(host)):
        raise ConfigError(
            f"{name}: got {host!r}, allowed is an address or a name; 0.0.0.0 or :: is all of them"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    try:
        return _NAME.fullmatch(host.encode("idna")) is not None
    except UnicodeError:  # e.g. a label of no characters, or of more than 63
        return False


def bracketed(host: str) -> str:
    """As it stands in front of a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def root_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Of the server that listens there."""
    return f"{scheme}://{bracketed(host)}:{port}"


def check_url(name: str, url: str) -> None:
    """Raises ConfigError unless it is the root of a server."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # a port that is no number, a broken IPv6 address
        raise ConfigError(f"{name}: got {url!r} ({error}), allowed is {_WANTED}") from error
    if parts.username is not None or parts.password is not None:  # which are not to be shown
        where = f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(f"{name}: got {where!r} with a user or a password, allowed is {_WANTED}")
    if not usable or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{name}: got {url!r}, allowed is {_WANTED}")
