"""Draining by an operator: an engine gets no new legs, and ends those that it has."""

from __future__ import annotations

import msgspec

from kvhandoff.core.errors import invalid
from kvhandoff.router.engine import Engine
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.orders import read_order


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/engines/drain`."""

    engine: str
    """Its id or its URL."""
    drain: bool = True
    """False: it gets legs again."""


def drain(raw: bytes, fleet: Fleet) -> Engine:
    """Carry the order in a body out: the engine. It holds for this router until it is taken back, or the
    engine is no member any more. Raises RequestError (400)."""
    order = read_order(raw, DrainOrder)
    for engine in (*fleet.prefill, *fleet.decode):
        if order.engine in (engine.url, engine.state.engine_id if engine.state is not None else None):
            engine.ordered_drain = order.drain
            return engine
    known = sorted(engine.state.engine_id if engine.state else engine.url for engine in fleet.engines)
    raise invalid("engine", order.engine, ", ".join(known), code="engine_not_found")
