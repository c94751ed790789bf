from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.router.config import RouterConfig, Timeouts
from kvhandoff.router.policy import Policies

GOOD: dict[str, Any] = {"decode": ("http://127.0.0.1:1",), "cluster_key": b"k"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode": ()}, "decode: got no URL"),
        ({"decode": ("dns+http://engines",)}, "allowed is dns+http://NAME:PORT"),
        ({"prefill": ("dns+http://e:1",), "decode": ("dns+http://e:1",)}, "dns+http://e:1 more than once"),
        ({"pair_tests": "maybe"}, "pair_tests: got 'maybe', allowed is auto, on, off"),
        ({"decode": ("127.0.0.1:1",)}, "decode: got '127.0.0.1:1'"),
        ({"decode": ("ftp://h:1",)}, "allowed is http://HOST:PORT"),
        ({"decode": ("http://h:x",)}, "decode: got 'http://h:x'"),
        ({"decode": ("http://h:70000",)}, "decode: got"),
        ({"decode": ("http://h:1/v1",)}, "decode: got 'http://h:1/v1'"),
        ({"prefill": ("http://h:1?a=b",)}, "prefill: got"),
        ({"prefill": ("http://127.0.0.1:1/",)}, "http://127.0.0.1:1 more than once"),
        ({"cluster_key": b""}, "cluster_key: got an empty key"),
        ({"path": "shove"}, "path: got 'shove', allowed is auto, pull, push, local"),
        ({"return_mode": "maybe"}, "return_mode: got 'maybe', allowed is auto, on, off"),
        ({"retain": "forever"}, "retain: got 'forever', allowed is renewable, fixed, off"),
        ({"max_conversations": 0}, "max_conversations: got 0"),
        ({"index": "http://h:1"}, "index: got 'http://h:1', allowed is memory, or a server's URL"),
        ({"index_ttl_s": 0}, "index_ttl_s: got 0"),
        ({"index_ttl_s": float("inf")}, "index_ttl_s: got inf, allowed is more than 0, up to 10000000000"),
        ({"timeouts": Timeouts(index_s=0)}, "timeouts.index_s: got 0"),
        ({"on_miss": "retry"}, "on_miss: got 'retry', allowed is recompute, error"),
        ({"port": 65536}, "port: got 65536"),
        ({"max_attempts": 0}, "max_attempts: got 0"),
        ({"timeouts": Timeouts(connect_s=-1)}, "timeouts.connect_s: got -1"),
        ({"timeouts": Timeouts(idle_s=float("nan"))}, "timeouts.idle_s: got nan"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig(**(GOOD | fields))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("prefill", "least_work, round_robin"),
        ("decode", "least_work, round_robin"),
        ("binding", "auto, early, late, rebind"),
    ],
)
def test_unknown_policy(field: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got 'hope', allowed is {allowed}"):
        Policies(**{field: "hope"})  # type: ignore[arg-type]


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(RouterConfig(**(GOOD | {"cluster_key": b"secret"})))
    assert "secret" not in repr(RouterConfig(**(GOOD | {"index": "valkey://:secret@h:1/0"})))
