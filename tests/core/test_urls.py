"""Hosts and URLs, as people write them and as they are told."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import bracketed, check_host, check_url, root_url


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%eth0", "a-b.c_d.", "bücher.de"]
)
def test_hosts(host: str) -> None:
    check_host("host", host)


@pytest.mark.parametrize("host", ["", " ", "a b", "a..b", "a/b", "[::1]", "h:1", "*", "a" * 64, "a\nb"])
def test_no_hosts(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_host("listen", host)
    allowed = "an address or a name; 0.0.0.0 or :: is all of them"
    assert str(refused.value) == f"listen: got {host!r}, allowed is {allowed}"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "https://127.0.0.1:8000"), ("h", "https://h:8000"), ("::1", "https://[::1]:8000")],
)
def test_a_servers_url(host: str, url: str) -> None:
    made = root_url(host, 8000, scheme="https")
    assert made == url
    check_url("url", made)
    assert (urlsplit(made).hostname, urlsplit(made).port) == (host, 8000)
    assert root_url(host, 8000) == url.replace("https", "http")
    assert bracketed(host) == url.removeprefix("https://").removesuffix(":8000")
