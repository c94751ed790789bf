"""What a router is told at start-up, checked at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from kvhandoff.core.errors import ConfigError, check_once
from kvhandoff.core.urls import check_host
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import MissPolicy
from kvhandoff.router.address import DNS, EngineAddress, EngineName, parse_address, parse_name
from kvhandoff.router.index import IN_MEMORY, check_index
from kvhandoff.router.policy import PATH_CHOICES, RETURN_CHOICES, PathChoice, Policies, ReturnChoice
from kvhandoff.router.security import Security
from kvhandoff.router.worker import Worker

MISS_POLICIES: tuple[MissPolicy, ...] = ("recompute", "error")

PairTestChoice = Literal["auto", "on", "off"]
PAIR_TEST_CHOICES: tuple[PairTestChoice, ...] = get_args(PairTestChoice)

RetainChoice = Literal["renewable", "fixed", "off"]
RETAIN_CHOICES: tuple[RetainChoice, ...] = get_args(RetainChoice)
MOST = 10**10
"""Of any number here: in seconds three centuries, and nothing overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every wait of the router, in seconds (rule 3). What follows each is written beside it.

    A leg may take longer than `retry_s`. What follows then depends on whose it was. After a prefill leg the
    decode engine computes the prompt, however old the request is: that engine needs nobody for it. After a
    decode leg the client gets the failure: one that took so long was at work, as far as the router can know,
    and another would double the load.
    """

    body_s: float = 60.0
    """A client's sending its whole body; then 408."""
    connect_s: float = 1.0
    """Connecting to an engine; then another engine."""
    prefill_s: float = 120.0
    """A whole prefill leg; then another prefill engine within `retry_s`, or the decode engine alone. The leg
    of an engine that turns unhealthy ends at once."""
    first_byte_s: float = 120.0
    """A streamed decode leg, from its sending to its first byte; pushed, from the end of the prefill leg, for
    which it waits. Then another attempt within `retry_s`, or 504."""
    answer_s: float = 600.0
    """A decode leg that is not streamed, from the same moment to its last byte. Then another attempt within
    `retry_s`, or 504."""
    idle_s: float = 60.0
    """Between two pieces of a stream, on either side; then the stream is broken off with an error."""
    retry_s: float = 60.0
    """A request that is older starts no new attempt but one: locally, after a failed prefill leg. Its client
    gets the last failure."""
    withdraw_s: float = 0.5
    """Telling an engine that nobody will come, or that a leg is moved; its own deadlines end both anyway."""
    linger_s: float = 0.5
    """A pushed prompt's prefill leg, after the answer has begun; then it is ended, since nobody needs it."""
    poll_s: float = 2.0
    """One state report of one engine; three missed ones make it unhealthy."""
    progress_s: float = 60.0
    """An engine with work whose count of steps stands still for so long, though it answers for its state, is
    unhealthy until it moves. Longer than its longest step, and than the leases of its memory."""
    record_s: float = 1.0
    """A reader of a record waits this long for the engines' accounts; then it is given as incomplete."""
    index_s: float = 0.05
    """A look-up in a shared index of conversations; then the prompt is computed without its history. Also
    of what routers count of a tenant together; then this one's own count decides."""
    ticket_s: float = 20.0
    """How long a ticket is good for, from its signing to the engine's reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router. Raises ConfigError when a value can't be used."""

    prefill: tuple[str, ...] = ()
    """The prefill engines: `URL`, e.g. `http://127.0.0.1:8101`, or `URL,internal=URL` where an engine's pages
    for the router are at an address of their own (`address.py`)."""
    decode: tuple[str, ...] = ()
    """The decode engines, in the same form; one at least, unless `fleet_file` or `registration` bring some.
    In both, `dns+http://NAME:PORT` stands for an engine at each of the name's addresses."""
    fleet_file: Path | None = None
    """More engines, in a YAML file that is watched (`member_file.py`)."""
    registration: bool = False
    """Whether engines may register themselves, signed with the cluster key."""
    pair_tests: PairTestChoice = "auto"
    """Whether a request of two blocks is sent through every prefill and decode engine that come up, to see
    whether they hand over: `auto`, for up to 64 pairs; `on`, `off`."""
    cluster_key: bytes = field(repr=False)
    """Signs the tickets; the engines have the same."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    shutdown_s: float = 2.0
    """Requests under way have so long to end when the server is closed; then they are cut off with an error.
    `kvhandoff router` gives them longer."""
    path: PathChoice = "auto"
    """The path of requests that don't force one with the header x-kvhandoff-path."""
    policies: Policies = Policies()
    """How engines are chosen, and when the decode engine is bound."""
    on_miss: MissPolicy = "recompute"
    """When the KV can't be used: compute the prompt on the decode engine, or answer with an error."""
    return_mode: ReturnChoice = "auto"
    """Whether requests that don't say with the header x-kvhandoff-return get their conversation's history
    from the decode engine that keeps it."""
    retain: RetainChoice = "renewable"
    """How long decode engines keep a turn for the next one: under a lease that each use renews, for a fixed
    time, or not at all."""
    max_attempts: int = 3
    """Attempts of one request in all, the first one included."""
    poll_interval_s: float = 0.5
    max_body_bytes: int = 32 * 2**20
    max_records: int = 10_000
    """Records kept for `GET /v1/handoffs/{id}`; the oldest go first."""
    index: str = field(default=IN_MEMORY, repr=False)
    """Where conversations are found again: `memory`, or for several replicas of the router a Valkey or Redis
    server's URL, `valkey://HOST:PORT/DB`. It may hold a password."""
    index_ttl_s: float = HandoffSettings().retain_lease_s
    """How long a shared index keeps a turn after its last use: the engines' `retain_lease_s`."""
    max_conversations: int = 50_000
    """Names of turns that are remembered in memory, about two for each, and engines' accounts of turns; the
    least recently used go first."""
    traces: str | None = field(default=None, repr=False)
    """Where spans are posted (OTLP over HTTP), as a whole URL; None: no traces."""
    worker: Worker = field(default_factory=Worker)
    """Which of the processes that share the port this is."""
    timeouts: Timeouts = Timeouts()
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        if not (self.decode or self.fleet_file or self.registration):
            raise ConfigError(
                "decode: got no URL, allowed is one URL or more, a file of them (fleet), or registration"
            )
        for name, urls in (("prefill", self.prefill), ("decode", self.decode)):
            for url in urls:
                if url.startswith(DNS):
                    parse_name(name, url)
                else:
                    parse_address(name, url)
        given = [address.url for address in self.prefill_addresses + self.decode_addresses]
        given += [str(name) for name in self.prefill_names + self.decode_names]
        given += [a.internal for a in self.prefill_addresses + self.decode_addresses if a.internal]
        check_once(given, where="prefill, decode: ")
        if not self.cluster_key:
            raise ConfigError("cluster_key: got an empty key, allowed is one byte or more")
        check_host("host", self.host)
        check_index(self.index)
        _check_choice("path", self.path, PATH_CHOICES)
        _check_choice("return_mode", self.return_mode, RETURN_CHOICES)
        _check_choice("retain", self.retain, RETAIN_CHOICES)
        _check_choice("on_miss", self.on_miss, MISS_POLICIES)
        _check_choice("pair_tests", self.pair_tests, PAIR_TEST_CHOICES)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: got {self.port}, allowed is 0 to 65535")
        positive = ("max_attempts", "poll_interval_s", "max_body_bytes", "max_records", "max_conversations")
        for name in (*positive, "index_ttl_s", "shutdown_s"):
            _check_positive(name, getattr(self, name))
        for item in fields(self.timeouts):
            _check_positive(f"timeouts.{item.name}", getattr(self.timeouts, item.name))

    @property
    def prefill_addresses(self) -> tuple[EngineAddress, ...]:
        """The URLs of `prefill`, parsed."""
        return _addresses("prefill", self.prefill)

    @property
    def decode_addresses(self) -> tuple[EngineAddress, ...]:
        """The URLs of `decode`, parsed."""
        return _addresses("decode", self.decode)

    @property
    def prefill_names(self) -> tuple[EngineName, ...]:
        """The names of `prefill`, parsed."""
        return _names("prefill", self.prefill)

    @property
    def decode_names(self) -> tuple[EngineName, ...]:
        """The names of `decode`, parsed."""
        return _names("decode", self.decode)


def _addresses(name: str, given: tuple[str, ...]) -> tuple[EngineAddress, ...]:
    return tuple(parse_address(name, text) for text in given if not text.startswith(DNS))


def _names(name: str, given: tuple[str, ...]) -> tuple[EngineName, ...]:
    return tuple(parse_name(name, text) for text in given if text.startswith(DNS))


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}, allowed is {', '.join(allowed)}")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value <= MOST:
        raise ConfigError(f"{name}: got {value!r}, allowed is more than 0, up to {MOST:.0f}")
