"""How a handler that is cancelled tells whether its client has left, or the server ends."""

from __future__ import annotations

import asyncio
from typing import Any

_ENDS = "the server ends"


def cut_off(task: asyncio.Task[Any]) -> None:
    """Cancel a handler since the server ends."""
    task.cancel(_ENDS)


def is_cut_off(error: asyncio.CancelledError) -> bool:
    """Whether the server ends; else the client has left. Its client is still there, and may be told."""
    return _ENDS in error.args
