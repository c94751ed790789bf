"""The one line of JSON by which a process says that it serves, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import msgspec

Announce = Callable[[object], None]
"""Writes the line: anything that msgspec can encode. It is called once."""


def take_stdout() -> Announce:
    """Keep standard output for the line: from now on, what else is written there goes to standard error.

    Native libraries write there as they like, UCX its warnings. Call it before any is loaded. Once the line
    is written, standard output is closed, so that whoever started this process has nothing more to read.
    """
    sys.stdout.flush()
    line = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def announce(facts: object) -> None:
        with line:
            line.write(msgspec.json.encode(facts) + b"\n")

    return announce
