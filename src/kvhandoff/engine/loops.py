"""From any thread to the thread of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def hand_over(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Have the loop call `function`, in the order of these calls. False: it is closed, and nobody is there to
    be told; an engine that calls must go on all the same."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True
