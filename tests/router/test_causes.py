"""Field case 63: whatever keeps a request's KV from being used has a counter of its own, and what is the
protocol at work is no failure."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvhandoff.core.reasons import Reason
from tests.router.engines import Leg, MockEngine, completion, reset

PULL = {"x-kvhandoff-path": "pull"}
CAUSES = {
    Reason.TRANSFER_FAILED: "failure",  # the network
    Reason.OFFER_EXPIRED: "decline",
    Reason.OFFER_GIVEN_UP: "decline",
    Reason.HANDSHAKE_REFUSED: "failure",
}


def meets(reason: Reason) -> Any:
    """A decode engine that could not use the KV for this reason, and computes."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        engine.note(leg, computed_tokens=4, reasons=[reason], finish_reason="stop")
        return web.json_response(completion(leg, "Hello"))

    return script


async def test_each_cause_has_its_own_counter(cluster: Any) -> None:
    async with cluster() as c:
        for reason in CAUSES:
            c.d.script = meets(reason)
            status, answer = await c.post(c.body(), headers=PULL)
            record = await c.record(answer["id"])
            assert (status, record["kv_source"]) == (200, "recomputed")
            assert record["reasons"] == ["forced", reason]
        c.p.script = reset
        assert (await c.post(c.body(), headers=PULL))[0] == 200
        page = await c.text("/metrics")
    counted = sorted(
        line
        for line in page.split("\n")
        if line.startswith("kvhandoff_router_reasons_total{") and "choice" not in line
    )
    wanted = {**CAUSES, Reason.PREFILL_FAILED: "failure"}
    assert counted == sorted(
        f'kvhandoff_router_reasons_total{{kind="{kind}",reason="{reason}"}} 1.0'
        for reason, kind in wanted.items()
    )
