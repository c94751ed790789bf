"""Clients that leave, at every moment they can, or don't read: their sequences end and their legs too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Event
from typing import Any

import aiohttp
import pytest

from kvhandoff.embedded.api import TokenOutput
from kvhandoff.embedded.server import Limits
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.web import run_main
from tests.embedded.fake_agent import made_up, tokens
from tests.embedded.serving import (
    CHAT,
    COMPLETIONS,
    Stream,
    give,
    ids_of,
    raw_connection,
    serving,
    soon,
)

EOS = 2
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_leave_before_the_first_token(path: str, stream: bool) -> None:
    async with serving() as server:
        body = {"prompt": "hi", "messages": USER, "stream": stream}
        task = asyncio.create_task(server.session.post(path, json=body))
        leg = await server.leg()
        await server.request()
        task.cancel()
        await soon(leg.ended.wait())
        assert leg.calls == ["tokenized", "submit", "finished"]
        assert leg.outcome == ("abort", 0)


async def test_leave_in_the_middle_of_a_stream() -> None:
    async with serving() as server:
        stream = Stream(server, {"prompt": "hi", "n": 3})
        request = await server.request()
        give(request, *ids_of("x"))
        await stream.next()
        leg = await server.leg()
        await stream.leave()
        await soon(leg.ended.wait())
        assert leg.outcome == ("abort", 1)
        assert len(leg.requests) == 3
        # The engine goes on until the abort takes effect: nobody minds.
        give(request, *ids_of("y"))
        give(request, None, finish_reason="abort")


async def test_leave_with_several_prompts() -> None:
    async with serving() as server:
        body = {"prompt": ["a", "b", "c"]}
        task = asyncio.create_task(server.session.post(COMPLETIONS, json=body))
        legs = [await server.leg() for _ in range(3)]
        requests = [await server.request() for _ in range(3)]
        give(requests[1], *ids_of("x"), finish_reason="length")
        task.cancel()
        for leg in legs:
            await soon(leg.ended.wait())
        assert [leg.outcome[0] for leg in legs if leg.outcome] == ["abort"] * 3


async def test_leave_while_the_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = Event(), Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        started.set()
        go_on.wait(10)
        return [5]

    monkeypatch.setattr(TextProcessor, "encode", encode)
    async with serving(max_model_len=50_000) as server:
        body = {"prompt": "long " * 2000}
        task = asyncio.create_task(server.session.post(COMPLETIONS, json=body))
        leg = await server.leg()
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        await soon(leg.ended.wait())
        go_on.set()
        assert leg.calls == ["finished"]
        assert leg.outcome == ("abort", 0)


async def test_leave_before_the_offer_is_told() -> None:
    """A prefill leg whose response nobody takes is an abort, though its token was made."""
    async with serving(tokens(ids_of("x"))) as server:
        server.agent.hold_response.clear()
        body = {"prompt": "hi", "kv_transfer_params": {"leg": "prefill"}}
        task = asyncio.create_task(server.session.post(COMPLETIONS, json=body))
        leg = await server.leg()
        await soon(leg.asked_for_params.wait())
        task.cancel()
        await soon(leg.ended.wait())
        assert leg.outcome == ("abort", 1)


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    """The engine is never held up by it, and after `stall_s` its request ends."""
    async with serving(max_model_len=200_000, limits=Limits(stall_s=0.2)) as server:
        body = b'{"prompt": "hi", "stream": true, "max_tokens": 100000, "logprobs": 20}'
        head = b"Content-Length: %d\r\n\r\n" % len(body)
        async with raw_connection(server.port, head + body) as (reader, _):
            leg = await server.leg()
            request = await server.request()
            # About 15 MB of events: more than all buffers on the way hold.
            output = TokenOutput(request.request_id, 270, logprob=made_up(270, 20))
            for _ in range(50_000):
                request.on_output(output)
            await soon(leg.ended.wait())
            assert leg.outcome is not None
            assert leg.outcome[0] == "abort"
            assert leg.outcome[1] < 50_000
            # The connection is closed, without what was still to be sent.
            with suppress(ConnectionError):
                assert not (await soon(reader.read())).endswith(b"0\r\n\r\n")


async def test_shutdown_ends_what_runs() -> None:
    async with serving() as server:
        task = asyncio.create_task(server.session.post(COMPLETIONS, json={"prompt": "hi"}))
        leg = await server.leg()
        await server.request()
    assert leg.outcome == ("abort", 0)
    with pytest.raises(aiohttp.ClientError):
        await soon(task)


@pytest.mark.parametrize(
    "scenario",
    [
        test_leave_in_the_middle_of_a_stream,
        test_leave_before_the_offer_is_told,
        test_a_client_that_reads_nothing_is_given_up,
        test_shutdown_ends_what_runs,
    ],
)
def test_on_the_loop_of_production(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Engines run on uvloop where there is one; pytest runs the tests on asyncio's own loop."""
    run_main(scenario())
