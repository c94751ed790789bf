"""Whether a pushed request is better off with another decode engine, before its answer begins."""

from __future__ import annotations

from collections.abc import Collection

from kvhandoff.router.policy.views import EngineView, FleetView, usable

REBIND_LEAD = 4
"""How many requests like this one more than another engine its own must have beside it, so that moving one
which has its blocks already is worth writing its KV again."""
MAX_REBINDS = 2
"""Moves of one request by the router; each begins the decode leg anew."""


def choose_rebind(
    fleet: FleetView, model: str, present: str, tokens: int, avoid: Collection[str] = ()
) -> EngineView | None:
    """The engine to move to from `present` (URL), for a request of `tokens`; None: it stays.

    Another is clearly better when it has blocks free for the request and no queue, and what the present one
    has to do beside this request is more than what the other has: by anything where requests queue for
    blocks, by REBIND_LEAD requests like this one where they don't. After a move the way back is never better
    (the difference has changed its sign), so that a request does not go to and fro under a steady load.
    """
    engines = usable(fleet.decode, model)
    here = next((engine for engine in engines if engine.url == present), None)
    if here is None:
        return None  # it fails, and what follows a failure is no choice
    enough = 0 if here.waiting else REBIND_LEAD * tokens
    others = [
        engine
        for engine in engines
        if engine.url != present
        and engine.url not in avoid
        and has_room(engine, tokens)
        and here.load - tokens - engine.load > enough
    ]
    return min(others, key=lambda engine: (engine.load, engine.chosen), default=None)


def has_room(engine: EngineView, tokens: int) -> bool:
    """Whether the engine can grant the blocks of a prompt at once."""
    return not engine.waiting and engine.room * engine.block_size >= tokens
