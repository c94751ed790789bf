"""Requests that end early on one side: the other side hears of it, and the client never gets a wrong answer.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.handoff.tickets import Ticket, TicketKey
from tests.cluster import CLUSTER_KEY, LiveEngine, until
from tests.e2e.stage import CHUNK, Stage, claims, leave, news, prompt, stage

Policy = Literal["recompute", "error"]


def abort_all(engine: LiveEngine) -> None:
    """As an operator or a fault would: the engine ends every request by itself."""
    assert engine.core.live()
    for request_id in engine.core.live():
        engine.core.abort(request_id)


@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_prefill_aborted_in_the_middle(tiny: Path, on_miss: Policy) -> None:
    """Field case 7: after chunk 2 of 5. Never an answer from a half-filled memory."""
    tokens = prompt(1, 5 * CHUNK)
    async with stage(tiny, router_options={"on_miss": on_miss}) as s:
        expected = await s.alone(tokens)
        s.reset()
        s.prefill_steps.close()
        client = s.ask(tokens)
        s.prefill_steps.let(2)
        await until(lambda: s.prefill_steps.done == 2 and s.prefill_steps.holds)
        abort_all(s.prefill)
        s.open()
        status, answer = await client
        if on_miss == "recompute":
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
            record = await s.cluster.record(answer["id"])
            assert (record["kv_source"], record["path"]) == ("local", "local")
            assert "prefill_failed" in record["reasons"]
        else:
            assert (status, answer["error"]["code"]) == (503, "prefill_failed")
        assert s.prefill_steps.tokens <= 3 * CHUNK
        await s.idle()


async def test_offer_withdrawn_while_it_is_read(tiny: Path) -> None:
    """Field case 7: the blocks stay until the reader is done with them, and the answer is right."""
    tokens = prompt(2, 5 * CHUNK)
    async with stage(tiny) as s:
        expected = await s.alone(tokens)
        s.transfers.closed = True
        client = s.ask(tokens)
        await until(lambda: s.transfers.held == 1 and claims(s.prefill) == 1)
        (key,) = s.prefill.agent._running_node.offers._offers
        await withdraw(s, key)
        assert s.prefill.blocks().offered == 10
        # Whatever else the engine computes meanwhile, it has to do it in other blocks.
        await s.alone(prompt(3, 5 * CHUNK))
        s.open()
        status, answer = await client
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        assert (await s.cluster.record(answer["id"]))["kv_source"] == "transferred"
        await s.idle()


async def withdraw(s: Stage, key: HandoffKey) -> None:
    ticket = Ticket(
        leg="withdraw",
        audience=s.prefill.agent.me,
        not_after=s.prefill.agent.clock() + 10,
        key=HandoffKey(HandoffId(key.handoff_id), key.attempt),
    )
    body = {"ticket": TicketKey(CLUSTER_KEY).sign(ticket)}
    async with s.cluster.session.post(f"{s.prefill.url}/internal/withdraw", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def test_client_leaves_in_a_long_prefill(tiny: Path) -> None:
    """Field case 30: at 10 %; the prefill engine stops at its next chunk."""
    tokens = prompt(4, 20 * CHUNK)
    async with stage(tiny) as s:
        s.prefill_steps.close()
        client = s.ask(tokens)
        s.prefill_steps.let(2)
        await until(lambda: s.prefill_steps.done == 2 and s.prefill_steps.holds)
        await leave(client)
        await until(lambda: news(s.prefill) > 0)
        s.open()
        await s.idle()
        assert s.prefill_steps.tokens == 3 * CHUNK  # the third had begun
        assert s.decode.agent.state(0).records == []


async def test_client_leaves_between_prefill_and_decode(tiny: Path) -> None:
    """Field case 30: the decode engine has claimed the offer, but is busy with a long step. The prefill
    engine gets its blocks back while that goes on; the next request, which needs these very blocks, waits
    neither for a lease nor for the other engine."""
    tokens, following = prompt(5, 5 * CHUNK), prompt(6, 5 * CHUNK)
    async with stage(tiny, prefill_options={"num_blocks": 11}) as s:
        expected = await s.alone(following)
        s.decode_steps.close()
        other = s.request(prompt(7, CHUNK), url=s.decode.url)
        await until(lambda: s.decode_steps.holds)
        client = s.ask(tokens)
        await until(lambda: news(s.decode) == 1 and claims(s.prefill) == 1)
        await leave(client)
        await until(lambda: s.prefill.blocks().offered == 0, describe=s.where)
        s.open()
        assert await s.request(following) == expected
        await other
        await s.idle()
