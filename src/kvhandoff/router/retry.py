"""Whether a request whose leg has failed is tried again, and how: a pure function.

Attempts are bounded in number, and in time but for one: a request whose prefill leg has failed goes on
locally, however old it is, since that needs the fewest engines.
"""

from __future__ import annotations

from typing import Literal

Retry = Literal["again", "local"]


def next_attempt(*, failed: int, allowed: int, too_old: bool, of_prefill: bool) -> Retry | None:
    """After `failed` of the `allowed` attempts, the last of them for its prefill leg or another. None: there
    is to be none."""
    remaining = allowed - failed
    if remaining < 1 or (too_old and not of_prefill):
        return None
    return "local" if of_prefill and (remaining == 1 or too_old) else "again"
