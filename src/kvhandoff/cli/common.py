"""What the commands share: the cluster key, ports, and how a process learns that it should end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import typer

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import check_host
from kvhandoff.handoff.signing import check_cluster_key
from kvhandoff.web import cannot_listen

CLUSTER_KEY_ENV = "KVHANDOFF_CLUSTER_KEY"

ClusterKeyFile = typer.Option(
    None,
    "--cluster-key-file",
    help=f"File with the key that router and engines share; else ${CLUSTER_KEY_ENV}.",
    dir_okay=False,
)


MOST_SECONDS = 10**10
MOST_GIB = 2**20
"""Of any option; larger ones, `inf` among them, are mistakes."""

Lifeline = typer.Option(False, "--lifeline", hidden=True, help="End when standard input closes.")


def cluster_key(file: Path | None) -> bytes:
    """The key of this cluster. Raises ConfigError when there is none."""
    if file is not None:
        try:
            key = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"cluster-key-file: {file} can't be read ({error.strerror})") from error
    else:
        key = os.environ.get(CLUSTER_KEY_ENV, "").encode()
    return check_cluster_key(key, set_by=f"${CLUSTER_KEY_ENV} or --cluster-key-file")


def check_port(host: str, port: int) -> None:
    """Find a used port, or a host where nobody can listen, before anything is started. Raises ConfigError."""
    check_host("host", host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # as servers do: the same port of IPv4 is another one
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def stop_event(*, lifeline: bool) -> asyncio.Event:
    """Set at SIGINT or SIGTERM and, with a lifeline, when whoever holds the other end of standard input ends:
    so a killed supervisor leaves nothing behind."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if lifeline:

        def readable() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                stop.set()

        loop.add_reader(0, readable)
    return stop
