"""Too much: prompts that can't fit, pools that can't hold all at once, streams that lose their blocks.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.embedded.api import EngineRequest
from tests.cluster import MODEL, Cluster, LiveEngine, cluster, until
from tests.e2e.stage import BLOCK, PATIENT, greedy, prompt
from tests.gates import StepGate, TransferGate


async def alone(deployment: Cluster, tokens: list[int], max_tokens: int = 8) -> list[int]:
    """What an engine with a large pool says without anybody's help."""
    url = deployment.prefill[0].url
    return await deployment.tokens(tokens, max_tokens, url=url, body={"cache_salt": "alone"})


@pytest.mark.parametrize("order", ["larger first", "smaller first"])
async def test_two_loads_that_fill_the_pool_both_complete(tiny: Path, order: str) -> None:
    """Field case 16: a pool of 7 blocks, A needs 4 and one to grow, B needs 3 and one to grow."""
    prompts = [prompt(1, 4 * BLOCK), prompt(2, 3 * BLOCK)]
    if order == "smaller first":
        prompts.reverse()
    gate = TransferGate()
    async with cluster(tiny, decode_options={"num_blocks": 7, "wrap_plane": gate.wrap}) as deployment:
        expected = [await alone(deployment, p) for p in prompts]
        decode = deployment.decode[0]
        gate.closed = True
        first = asyncio.create_task(deployment.tokens(prompts[0]))
        await until(lambda: gate.held == 1)
        second = asyncio.create_task(deployment.tokens(prompts[1]))
        await until(lambda: decode.core.load()["waiting"] == 1 or gate.held == 2)
        gate.closed = False
        assert [await first, await second] == expected
        await deployment.settled()


async def test_prompts_that_fit_alone_but_not_together(tiny: Path) -> None:
    """Field case 16: each has its KV transferred, one after the other; nothing is recomputed or refused."""
    prompts = [prompt(seed, 5 * BLOCK + 3) for seed in range(6)]
    async with cluster(tiny, decode_options={"num_blocks": 7}) as deployment:
        expected = [await alone(deployment, p) for p in prompts]
        answers = await asyncio.gather(*(ask(deployment, p) for p in prompts))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        records = [await deployment.record(answer["id"]) for answer in answers]
        assert [record["kv_source"] for record in records] == ["transferred"] * 6
        await deployment.settled()


async def test_a_prompt_larger_than_the_decode_pool_is_refused(tiny: Path) -> None:
    """Field case 16: at once, with the real reason; the prefill engine gets its blocks back at once too."""
    options = {"num_blocks": 7}
    async with cluster(tiny, decode_options=options, settings=PATIENT) as deployment:
        expected = await alone(deployment, prompt(1, 40))
        for tokens, max_tokens in ((8 * BLOCK, 1), (7 * BLOCK, 1), (6 * BLOCK, 2 * BLOCK)):
            body = {"prompt": prompt(3, tokens), "max_tokens": max_tokens}
            status, answer = await deployment.post(body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert f"maximum context length is {7 * BLOCK}" in answer["error"]["message"]
        await deployment.settled()
        assert await deployment.tokens(prompt(1, 40)) == expected


async def test_a_prompt_longer_than_the_prefill_engine_takes(tiny: Path) -> None:
    """Field case 7: the prefill engine's limit is the client's 400, though the decode engine takes more."""
    async with cluster(tiny, prefill_options={"num_blocks": 8}) as deployment:
        decode = deployment.decode[0]
        limit = 8 * BLOCK - 1  # one token is generated there
        status, answer = await deployment.post({"prompt": prompt(4, limit + 1), "max_tokens": 4})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {8 * BLOCK}" in answer["error"]["message"]
        assert decode.agent.state(0).records == []  # it has not heard of the request
        url = decode.url
        expected = await deployment.tokens(prompt(4, limit), 4, url=url, body={"cache_salt": "alone"})
        assert await deployment.tokens(prompt(4, limit), 4) == expected
        await deployment.settled()


async def test_a_preempted_stream_goes_on_where_it_was(tiny: Path) -> None:
    """Field case 41: the pool is full while two answers stream; no token is repeated or missing, and usage
    counts once."""
    prompts, new = [prompt(5, 2 * BLOCK), prompt(6, 2 * BLOCK)], 3 * BLOCK
    async with cluster(tiny, decode_options={"num_blocks": 7}) as deployment:
        expected = [await alone(deployment, p, new) for p in prompts]
        decode = deployment.decode[0]
        requests = submitted(decode)
        with StepGate(decode) as steps:
            steps.close()
            clients = [asyncio.create_task(stream(deployment, p, new)) for p in prompts]
            await until(lambda: len(requests) == 2)  # else the first one could be done before the other comes
        streams = await asyncio.gather(*clients)
        assert sum(request.stats.preemptions for request in requests) > 0
        for events, tokens in zip(streams, expected, strict=True):
            choices = [choice for event in events for choice in event["choices"]]
            assert [token for choice in choices for token in choice["token_ids"] or ()] == tokens
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
            usages = [event["usage"] for event in events if event.get("usage")]
            counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
            assert counts == [(2 * BLOCK, new)]
        await deployment.settled()


async def ask(deployment: Cluster, tokens: list[int]) -> dict[str, Any]:
    status, answer = await deployment.post(greedy(tokens))
    assert status == 200, answer
    return answer


def submitted(engine: LiveEngine) -> list[EngineRequest]:
    """Every request that the engine gets from now on."""
    requests: list[EngineRequest] = []
    submit = engine.core.submit

    def note(request: EngineRequest) -> None:
        requests.append(request)
        submit(request)

    engine.core.submit = note  # type: ignore[method-assign]
    return requests


async def stream(deployment: Cluster, tokens: list[int], max_tokens: int) -> list[dict[str, Any]]:
    """The events of a streamed completion."""
    options = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    body = greedy(tokens, max_tokens, **options)
    async with deployment.session.post(f"{deployment.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line.strip() async for line in answer.content]
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return [json.loads(event) for event in events[:-1]]
