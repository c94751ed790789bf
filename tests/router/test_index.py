"""The choice of an index, and what its values may be."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.router.index import IN_MEMORY, LocalIndex, Turn, check_index, open_index
from kvhandoff.router.valkey_index import ValkeyIndex, decode, encode
from tests.router.engines import key_of

TURN = Turn(key_of("0123456789abcdef01234567", 2), Identity(EngineId("d"), Epoch("1")))


def opened(index: str) -> Any:
    return open_index(index, limit=7, ttl_s=1.0, deadline_s=1.0, connect_s=1.0, on_lost_turns=lambda _: None)


@pytest.mark.parametrize(
    "index",
    [
        IN_MEMORY,
        "valkey://localhost",
        "valkey://localhost:6379",
        "valkey://localhost:6379/",
        "redis://user:pass@10.0.0.1:6379/15",
        "valkeys://[::1]:6379/0",
        "rediss://h/0",
        "unix:///run/valkey.sock?db=3",
        "unix://user:pass@/run/valkey.sock",
    ],
)
def test_taken(index: str) -> None:
    check_index(index)
    assert isinstance(opened(index), LocalIndex if index == IN_MEMORY else ValkeyIndex)


@pytest.mark.parametrize(
    "index",
    [
        *("", "Memory", "localhost:6379", "http://h:1"),
        *("valkey://", "valkey:///0", "valkey://:6379/0", "valkey://:0/0", "valkey://h:0/0"),
        *("valkey://h/x", "valkey://h/-1", "valkey://h/99999", "valkey://h/0/1", "valkey://h/٣"),
        *("valkey://h/0#x", "valkey://h:x", "valkey://h:70000", "valkey://[h/0"),
        *("unix://", "unix://run/valkey.sock", "unix://:1/run/valkey.sock", "unix:///run/valkey.sock#x"),
        *("REDISS://h/0", " rediss://h/0", "redi\tss://h/0"),
    ],
)
def test_refused(index: str) -> None:
    """What the client would drop is refused too; and a URL that only some take for TLS, so that no name would
    be checked."""
    shown = re.escape(repr(index.replace("#x", "#…")))
    with pytest.raises(
        ConfigError, match=rf"^index: got {shown}, allowed is memory, or a server's URL: valkey"
    ):
        check_index(index)


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        ("http://u:secret@h:1/0", "http://…@h:1/0"),
        ("valkey://:secret@h/x", "valkey://…@h/x"),
        ("valkey://u:secret@h:x/0", "valkey://…@h:x/0"),
        ("valkey://u:sec/ret@h/0", "valkey://…@h/0"),
        ("valkey://u:sec?ret@h/0", "…"),
        ("valkey://u:sec#ret@h/0", "…"),
        ("u:secret@h:6379", "…@h:6379"),
        ("valkey://h/0?password=secret", "valkey://h/0?…"),
        ("valkey://h/0?password=sec@ret", "…"),
        ("valkey://h/0?db=1", "valkey://h/0?…"),
        ("unix://?password=secret", "unix://?…"),
        ("unix:///s?db=1&password=secret", "unix:///s?…"),
        ("unix:///s?db=secret", "unix:///s?…"),
    ],
)
def test_no_message_shows_a_password(index: str, shown: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_index(index)
    assert str(error.value).startswith(f"index: got {shown!r}, allowed is memory, ")


def test_tls_checks_the_certificate_and_its_host() -> None:
    index = opened("rediss://h:1/0")
    settings = index._link._client.connection_pool.connection_kwargs
    assert settings["ssl_check_hostname"] is True
    [context] = [c.ssl_context for c in [index._link._client.connection_pool.make_connection()]]
    assert (context.check_hostname, context.cert_reqs.name) == (True, "CERT_REQUIRED")


WITHOUT_CLIENT = """
import sys
sys.modules["valkey"] = None
from kvhandoff.core.errors import ConfigError
from kvhandoff.router.app import create_app
from kvhandoff.router.config import RouterConfig
create_app(RouterConfig(decode=("http://h:1",), cluster_key=b"k"))
try:
    create_app(RouterConfig(decode=("http://h:1",), cluster_key=b"k", index="valkey://h:1/0"))
except ConfigError as error:
    sys.exit(f"{error}")
"""


def test_the_client_is_needed_only_where_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_CLIENT], capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("index: ")
    assert done.stderr.strip().endswith(
        "allowed without its client is memory: pip install 'kvhandoff[valkey]'"
    )


def test_a_value_is_short_and_comes_back() -> None:
    assert decode(encode(TURN)) == TURN
    assert len(encode(TURN)) < 80


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x01",
        b"\x02" + encode(TURN)[1:],
        encode(TURN)[:-1],
        encode(TURN) + b"x",
        b"\x01" + msgspec.msgpack.encode([["h", "0"], ["d", "1"]]),
        b"\x01" + msgspec.msgpack.encode({"key": ["h", 0], "source": ["d", "1"]}),
        b"\x01" + msgspec.msgpack.encode([["h" * 2000, 0], ["d", "1"]]),
        b"a text of somebody else's",
    ],
)
def test_a_foreign_value_is_a_miss(value: bytes) -> None:
    assert decode(value) is None


@given(st.binary(max_size=200))
def test_any_value(value: bytes) -> None:
    for tried in (value, b"\x01" + value):
        made = decode(tried)
        assert made is None or isinstance(made, Turn)
