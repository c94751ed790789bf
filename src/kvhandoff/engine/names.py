"""An engine id is one process at a time: peers take another life of it as proof that the former has ended."""

from __future__ import annotations

import errno
import socket
import time
from hashlib import blake2b

from kvhandoff.core.clock import monotonic
from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.ranks import MAX_RANKS

PREDECESSOR_S = 10.0
"""How long a process waits for one of its name to end."""

_POLL_S = 0.1


def rank_name(engine_id: str, rank: int) -> str:
    """What the process of one rank holds."""
    return f"{engine_id}#{rank}"


def await_further_ranks(engine_id: str, ranks: int, cluster_key: bytes) -> None:
    """Return when no rank from `ranks` on is left: a former life may have had more than this one, whose own
    ranks hold the names below. Raises ConfigError and blocks as `hold_name` does."""
    for rank in range(ranks, MAX_RANKS):
        hold_name(rank_name(engine_id, rank), cluster_key).close()


def hold_name(engine_id: str, cluster_key: bytes) -> socket.socket:
    """Be the one process of this host that has this engine id in this cluster, until the socket is closed or
    the process ends. A predecessor that is still ending is waited for. Raises ConfigError when it doesn't.

    An engine of several processes gives each a name of its own: all that move KV have to have ended before
    another life answers. Blocks for up to `PREDECESSOR_S`.
    """
    digest = blake2b(engine_id.encode(), key=cluster_key[:64], digest_size=16, person=b"kvh-engine-name")
    name = socket.socket(socket.AF_UNIX)
    deadline = monotonic() + PREDECESSOR_S
    while True:
        try:
            name.bind(f"\0kvhandoff/{digest.hexdigest()}")  # an abstract name: the kernel frees it with us
        except OSError as error:
            if error.errno != errno.EADDRINUSE or monotonic() > deadline:
                name.close()
                why = "a process of this host has it" if error.errno == errno.EADDRINUSE else str(error)
                raise ConfigError(
                    f"engine-id: got {engine_id!r}, allowed is a name that no other engine has ({why})"
                ) from error
            time.sleep(_POLL_S)
        else:
            return name
