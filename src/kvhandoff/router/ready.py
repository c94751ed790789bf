"""What `GET /ready` says: whether requests can be answered, and what is wrong with whom."""

from __future__ import annotations

from typing import Any

from kvhandoff.router.engine import Engine
from kvhandoff.router.fleet import Fleet


def describe_fleet(fleet: Fleet) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body): 503 when no decode engine takes legs."""
    ready = any(engine.obstacle is None for engine in fleet.decode)
    return 200 if ready else 503, {
        "status": "ready" if ready else "no decode engine takes requests",
        "engines": [describe_engine(engine) for engine in fleet.engines],
        "pairs": fleet.pairs.report(),
        "sources": [{"name": source.name, "problem": source.problem} for source in fleet.sources],
    }


def describe_engine(engine: Engine) -> dict[str, Any]:
    """One engine; `drained`: it can be stopped, nobody needs it any more."""
    return {
        "url": engine.url,
        "engine_id": engine.state.engine_id if engine.state is not None else None,
        "role": engine.role,
        "healthy": engine.healthy,
        "problem": engine.problem,
        "rests": engine.circuit.rests,
        "draining": engine.draining,
        "drained": engine.drained,
        "legs": engine.reserved,
    }
