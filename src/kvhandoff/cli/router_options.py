"""The options of `kvhandoff router`, some of which `kvhandoff up` hands on."""

from __future__ import annotations

from enum import StrEnum

import typer

from kvhandoff.cli.common import MOST_SECONDS
from kvhandoff.handoff.settings import HandoffSettings


class PathOption(StrEnum):
    """The path of requests that don't force one."""

    AUTO = "auto"
    PULL = "pull"
    PUSH = "push"
    LOCAL = "local"


class BindingOption(StrEnum):
    """When path `auto` binds the decode engine."""

    AUTO = "auto"
    EARLY = "early"
    LATE = "late"
    REBIND = "rebind"


BOUND_BY = {
    BindingOption.AUTO: tuple(PathOption),
    BindingOption.EARLY: (PathOption.AUTO, PathOption.PUSH),
    BindingOption.LATE: (PathOption.AUTO, PathOption.PULL),
    BindingOption.REBIND: (PathOption.AUTO, PathOption.PUSH),
}
"""The paths of the router that agree with a binding."""


class ChoiceOption(StrEnum):
    """How an engine is chosen."""

    LEAST_WORK = "least_work"
    ROUND_ROBIN = "round_robin"


class ReturnOption(StrEnum):
    """Whether a conversation's next turn gets the history from the decode engine that keeps it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class RetainOption(StrEnum):
    """How long decode engines keep a turn for the next one."""

    RENEWABLE = "renewable"
    FIXED = "fixed"
    OFF = "off"


class MissOption(StrEnum):
    """What happens when a request's KV can't be used."""

    RECOMPUTE = "recompute"
    ERROR = "error"


class ConnectorOption(StrEnum):
    """What moves KV between the engines."""

    KVHANDOFF = "kvhandoff"
    NIXL = "nixl"
    NIXL_PUSH = "nixl-push"


Tenants = typer.Option(
    None,
    "--tenants",
    dir_okay=False,
    help="File of tenants, the hashes of their API keys, and their limits (YAML or JSON), read again when it "
    "changes. Without one the router is open.",
)
TlsCert = typer.Option(None, "--tls-cert", dir_okay=False, help="PEM file with the router's certificate.")
TlsKey = typer.Option(None, "--tls-key", dir_okay=False, help="PEM file with the certificate's key.")
EngineCa = typer.Option(
    None,
    "--engine-ca",
    dir_okay=False,
    help="PEM file with the roots to trust for engines at https URLs, instead of the system's.",
)


class PairTestOption(StrEnum):
    """Whether pairs of engines are tested when they come up."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


Fleet = typer.Option(
    None,
    "--fleet",
    help="More engines, in a YAML file: lists `prefill` and `decode` of {url, internal, drain}. It is "
    "watched; replace it by renaming.",
    dir_okay=False,
)
Registration = typer.Option(
    False, "--registration", help="Take in engines that register themselves with the cluster key."
)
PairTests = typer.Option(
    PairTestOption.AUTO,
    "--pair-tests",
    help="Send two blocks through each pair of engines as they come up, to see whether they hand over; auto: "
    "up to 64 pairs.",
)
Connector = typer.Option(
    ConnectorOption.KVHANDOFF,
    "--connector",
    help="kvhandoff, or vLLM's own NixlConnector or NixlPushConnector, whose transfers nobody verifies. With "
    "those, engines are URL[,engine_id=ID][,side_channel=HOST:PORT][,tp_size=N].",
)
Binding = typer.Option(
    BindingOption.AUTO,
    "--binding",
    help="When path auto binds the decode engine: early (push), late (pull), rebind (early, and the router "
    "may change it before the answer begins), or auto: what costs less.",
)
PrefillPolicy = typer.Option(
    ChoiceOption.LEAST_WORK, "--prefill-policy", help="How prefill engines are chosen."
)
DecodePolicy = typer.Option(ChoiceOption.LEAST_WORK, "--decode-policy", help="How decode engines are chosen.")
ReturnMode = typer.Option(
    ReturnOption.AUTO,
    "--return",
    help="Whether a conversation's next turn gets its history back.",
)
Retain = typer.Option(
    RetainOption.RENEWABLE,
    "--retain",
    help="Keep turns under a renewed lease, for a fixed time, or not at all.",
)


ShutdownTimeout = typer.Option(
    25.0,  # less than the 30 s after which Kubernetes kills, so that clients can still be told
    "--shutdown-timeout",
    min=0.001,
    max=MOST_SECONDS,
    help="Seconds that requests under way have to end when the router is told to end (SIGTERM); then they "
    "are cut off with an error.",
)
Index = typer.Option(
    "memory",
    "--index",
    envvar="KVHANDOFF_INDEX",
    help="Where conversations are found again: memory, or for several replicas of the router "
    "valkey://HOST:PORT/DB (also redis, and valkeys or rediss for TLS).",
)
IndexTTL = typer.Option(
    HandoffSettings().retain_lease_s,
    "--index-ttl",
    min=0.1,
    max=MOST_SECONDS,
    help="Seconds that a shared index keeps a turn after its last use: the engines' --retain-lease.",
)
Workers = typer.Option(
    1,
    "--workers",
    min=1,
    max=64,
    help="Processes that share the port, for more requests than one core can carry; with several, "
    "conversations need a shared --index, or --return off.",
)
WorkerIndex = typer.Option(None, "--worker", hidden=True, min=0, help="Which of the workers this is.")
Doors = typer.Option(None, "--doors", hidden=True, file_okay=False, help="Folder of the workers' sockets.")
