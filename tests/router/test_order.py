"""Which leg is sent when: the order is the path's, not the deployment's (field cases 20 and 46)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.engines import held, soon
from tests.router.test_choices import TOKENS, account, reported


@pytest.mark.parametrize("stream", [False, True])
async def test_each_path_has_its_order_on_the_same_engines(cluster: Any, stream: bool) -> None:
    """A push's legs are at their engines at once; a pull's decode leg is sent when the prefill leg has been
    answered. Nobody has to say of an engine which of the two it is for, and records say what was done."""

    async def ask(path: str) -> tuple[int, str]:
        headers = {"x-kvhandoff-path": path}
        async with c.session.post(
            c.url + "/v1/completions", json=c.body(stream=stream), headers=headers
        ) as answer:
            await answer.read()
            return answer.status, answer.headers["X-Request-Id"]

    async with cluster() as c:
        c.p.script = held
        for path, binding in (("pull", "late"), ("push", "early"), ("pull", "late")):
            c.p.gate.clear()
            request = asyncio.create_task(ask(path))
            p = await soon(c.p.legs.get())
            if path == "push":
                d = await soon(c.d.legs.get())  # nothing else would bring the prefill leg's answer
                c.p.gate.set()
            else:
                # Whatever had been sent beside the prefill leg would be there before this one.
                assert (await ask("local"))[0] == 200
                assert (await soon(c.d.legs.get())).ticket.leg == "local"
                assert c.d.legs.empty()
                c.p.gate.set()
                d = await soon(c.d.legs.get())
            assert d.ticket.key == p.ticket.key
            status, identifier = await soon(request)
            record = await c.record(identifier)
            assert (status, record["path"], record["binding"]) == (200, path, binding)
            assert (record["kv_source"], record["attempts"]) == ("transferred", 1)


async def taken(c: Any) -> tuple[str, bool]:
    """The path of a prompt now, and whether a push is expected to be faster than a pull."""
    _, answer = await c.post(c.body(prompt=TOKENS))
    record = await c.record(answer["id"])
    ttft = record["expected"]["ttft_s"]
    return record["path"], ttft["push"] < ttft["pull"]


async def test_push_is_left_where_it_is_known_to_lose(cluster: Any) -> None:
    """Its writes are seen late at this decode engine: the next prompt is pulled, and its record says why."""
    async with cluster(poll_interval_s=0.01) as c:
        c.d.free = 1000
        await reported(c.d)
        paths = []
        for _ in range(2):
            paths.append(await taken(c))
            for _ in range(100):
                phases = {"write_tail": 0.0, "detect": 5.0}
                account(c.d, "decode", phases, bytes=10**6, early_bytes=10**6, transferred_tokens=1000)
            await reported(c.d)
        assert paths == [("push", True), ("pull", False)]


async def test_push_is_left_where_its_prefill_leg_is_known_to_begin_late(cluster: Any) -> None:
    """What no engine sees alone: how much longer the one has waited than the other has computed."""
    async with cluster(poll_interval_s=0.01) as c:
        c.d.free = 1000
        await reported(c.d)
        note = c.d.note

        def late(leg: Any, **changes: Any) -> None:
            phases = {"await_prefill": 5.0, "write_tail": 0.0, "detect": 0.0}
            moved = {"transferred_tokens": 1000, "bytes": 10**6, "early_bytes": 10**6}
            note(leg, **(changes | moved), phases=phases)

        c.d.note = late
        paths = []
        for _ in range(2):
            paths.append(await taken(c))
            for _ in range(10):
                _, answer = await c.post(c.body(prompt=TOKENS), headers={"x-kvhandoff-path": "push"})
                record = await c.record(answer["id"])
                assert (record["path"], record["kv_source"]) == ("push", "transferred")
        assert paths == [("push", True), ("pull", False)]
