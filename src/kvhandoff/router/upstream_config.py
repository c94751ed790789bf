"""What a router of stock vLLM engines is told at start-up, checked at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from kvhandoff.core.errors import ConfigError, check_once
from kvhandoff.core.urls import check_host
from kvhandoff.router.config import PAIR_TEST_CHOICES, PairTestChoice, Timeouts
from kvhandoff.router.policy import PathChoice
from kvhandoff.router.security import Security

UpstreamConnector = Literal["nixl", "nixl-push"]
"""`nixl`: vLLM's NixlConnector, whose decode engines read; `nixl-push`: its NixlPushConnector, whose prefill
engines write."""
UPSTREAM_CONNECTORS: tuple[UpstreamConnector, ...] = get_args(UpstreamConnector)

CONNECTOR_CLASSES: dict[UpstreamConnector, str] = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
"""`kv_connector` of the engines' --kv-transfer-config."""
MODES: dict[UpstreamConnector, Literal["pull", "push"]] = {"nixl": "pull", "nixl-push": "push"}
"""Who moves the KV; the engines' `transfer_mode`."""

SIDE_CHANNEL_PORT = 5600
"""vLLM's default for VLLM_NIXL_SIDE_CHANNEL_PORT."""

_FORM = "URL[,engine_id=ID][,side_channel=HOST:PORT][,tp_size=N]"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamAddress:
    """One engine."""

    url: str
    engine_id: str = ""
    """As its --kv-transfer-config names it. A decode engine that is pushed to has to be told."""
    side_channel: tuple[str, int]
    """(host, port) that its connector answers handshakes at."""
    tp_size: int = 1

    @classmethod
    def parse(cls, text: str) -> UpstreamAddress:
        """From the command line: `URL[,engine_id=ID][,side_channel=HOST:PORT][,tp_size=N]`.

        The side channel is at the URL's host and vLLM's default port if nothing else is said. Raises
        ConfigError.
        """
        url, *rest = text.split(",")
        host = _host(url, text)
        engine_id, side_channel, tp_size = "", (host, SIDE_CHANNEL_PORT), 1
        for part in rest:
            name, _, value = part.partition("=")
            match name:
                case "engine_id" if value:
                    engine_id = value
                case "side_channel":
                    side_channel = _address(value, text)
                case "tp_size" if value.isdecimal() and int(value) > 0:
                    tp_size = int(value)
                case _:
                    raise _unusable(text)
        return cls(url=url.rstrip("/"), engine_id=engine_id, side_channel=side_channel, tp_size=tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """One router of stock vLLM engines. Raises ConfigError when a value can't be used."""

    connector: UpstreamConnector
    prefill: tuple[UpstreamAddress, ...] = ()
    decode: tuple[UpstreamAddress, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    shutdown_s: float = 2.0
    """As in `RouterConfig`."""
    path: PathChoice = "auto"
    """Of requests that don't force one. `auto`: the connector's own."""
    keep_references: bool = True
    """Whether the next turn of a conversation is given what a decode engine has answered about the last one.
    Engines that don't run with `bidirectional_kv_xfer` answer nothing."""
    reference_s: float = 480.0
    """How long such an answer is good for: vLLM's default for `decoder_kv_blocks_ttl`, in seconds."""
    pair_tests: PairTestChoice = "auto"
    """Whether engines are asked for their connector when they come up: `auto` and `on`, if there are prefill
    engines; `off`."""
    max_attempts: int = 3
    poll_interval_s: float = 1.0
    max_body_bytes: int = 32 * 2**20
    max_records: int = 10_000
    max_conversations: int = 50_000
    traces: str | None = field(default=None, repr=False)
    """Where spans are posted (OTLP over HTTP), as a whole URL; None: no traces."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("decode: got no URL, allowed is one URL or more")
        check_host("host", self.host)
        given = [address.url for address in self.prefill + self.decode]
        check_once(given, where="prefill, decode: ")
        if self.connector not in UPSTREAM_CONNECTORS:
            allowed = ", ".join(UPSTREAM_CONNECTORS)
            raise ConfigError(f"connector: got {self.connector!r}, allowed is {allowed}")
        if self.path not in self.paths:
            raise ConfigError(
                f"path: got {self.path!r}, allowed with {self.connector} is {', '.join(self.paths)}"
            )
        if self.pair_tests not in PAIR_TEST_CHOICES:
            allowed = ", ".join(PAIR_TEST_CHOICES)
            raise ConfigError(f"pair_tests: got {self.pair_tests!r}, allowed is {allowed}")
        for address in self.prefill:
            if self.connector == "nixl-push" and not address.engine_id:
                raise ConfigError(
                    f"prefill: got {address.url} without engine_id, allowed with nixl-push is {_FORM}, with "
                    "the engine_id of the engine's --kv-transfer-config"
                )

    @property
    def mode(self) -> Literal["pull", "push"]:
        """The path of whatever is handed over."""
        return MODES[self.connector]

    @property
    def paths(self) -> tuple[PathChoice, ...]:
        """What requests may ask for: the connector class is that of the whole deployment."""
        return ("auto", self.mode, "local")


def _host(url: str, text: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError as error:  # a port that is no number, a broken IPv6 address
        raise _unusable(text) from error
    if not usable or parts.hostname is None or parts.path.strip("/") or parts.query or parts.fragment:
        raise _unusable(text)
    return parts.hostname


def _address(value: str, text: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise _unusable(text)
    return host.strip("[]"), int(port)


def _unusable(text: str) -> ConfigError:
    return ConfigError(f"prefill, decode: got {text!r}, allowed is {_FORM}, with URL as http://HOST:PORT")
