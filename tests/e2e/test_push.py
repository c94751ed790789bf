"""Push: what is written where and when, and that the answer is the one that the engine gives alone.

The oracle is one engine serving alone: greedy token ids, in exact mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import until
from tests.e2e.pushes import Pushing, policies, pushing
from tests.e2e.stage import BLOCK, CHUNK, leftovers
from tests.legs import MAX_TOKENS, counted, new_key

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "nixl"])
async def engines(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pushing]:
    async with pushing(tiny, request.param) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def c(engines: Pushing) -> AsyncIterator[Pushing]:
    engines.reset()
    yield engines
    engines.open()


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, 5 * CHUNK + 3])
async def test_lengths(c: Pushing, length: int) -> None:
    """Whatever part of the last block is filled, all of the prompt comes from the other engine."""
    prompt = c.prompt(length)
    expected = await c.alone(prompt)
    _, answer = await c.legs.push(c.p, c.d, prompt)
    assert answer.token_ids == expected
    record = await c.legs.record(c.d, answer.key)
    assert (record.kv_source, record.reasons, record.grants) == ("transferred", [], 1)
    assert record.cached_tokens + record.transferred_tokens + record.computed_tokens == length
    assert record.blocks == c.writes.blocks == -(-length // BLOCK)
    assert record.bytes == record.blocks * c.d.region.block_bytes
    await c.idle()


# ------------------------------------------------------------------------------------------ prefix caches

HITS = {
    "nothing": (8 * BLOCK, 0, 0),
    "1 of 8 blocks": (8 * BLOCK, 1 * BLOCK, 1),
    "not block aligned": (8 * BLOCK, 3 * BLOCK + 5, 3),
    "7 of 8 blocks": (8 * BLOCK, 7 * BLOCK, 7),
    "8 of 8 blocks, the last for its logits": (8 * BLOCK, 8 * BLOCK, 7),
    "8 blocks, and part of a ninth": (8 * BLOCK + 5, 8 * BLOCK + 2, 8),
}
"""Prompt tokens, how many of them D has computed before, and how many blocks it need not be sent."""


@pytest.mark.parametrize(("length", "known", "hit"), HITS.values(), ids=HITS)
async def test_partial_hit_of_the_destination(c: Pushing, length: int, known: int, hit: int) -> None:
    """Field case 4: exactly the missing blocks are written, each where it belongs."""
    prompt = c.prompt(length)
    if known:
        await c.s.cluster.tokens(prompt[:known], 1, url=c.d.url)
    expected = await c.alone(prompt)
    _, answer = await c.legs.push(c.p, c.d, prompt)
    assert answer.token_ids == expected
    record = await c.legs.record(c.d, answer.key)
    missing = -(-length // BLOCK) - hit
    assert (record.cached_tokens, record.blocks, record.reasons) == (hit * BLOCK, missing, [])
    assert c.writes.blocks == missing
    assert record.bytes == missing * c.d.region.block_bytes
    await c.idle()


async def test_destination_that_lacks_nothing(c: Pushing) -> None:
    """Field case 4: all blocks but that of the last token are here: nothing is written."""
    prompt = c.prompt(8 * BLOCK + 1)
    expected = await c.s.cluster.tokens(prompt, MAX_TOKENS, url=c.d.url)
    assert expected == await c.alone(prompt)
    _, answer = await c.legs.push(c.p, c.d, prompt)
    assert answer.token_ids == expected
    record = await c.legs.record(c.d, answer.key)
    assert (record.kv_source, record.reasons) == ("local", [Reason.ALREADY_CACHED])
    assert c.writes.posted == 0
    await c.idle()


@pytest.mark.parametrize("known", [BLOCK, 3 * BLOCK + 5, 8 * BLOCK])
async def test_partial_hit_of_the_source(c: Pushing, known: int) -> None:
    """What P need not compute is written before its first step; the answer's usage counts it as cached."""
    prompt = c.prompt(8 * BLOCK)
    await c.s.cluster.tokens(prompt[:known], 1, url=c.p.url)
    expected = await c.alone(prompt)
    hit = min(known // BLOCK, 7)
    c.steps.close()
    push = c.start(prompt)
    await until(lambda: c.steps.holds and c.writes.blocks == hit)
    c.open()
    answer = await push.decode
    assert answer.token_ids == expected
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == hit * BLOCK
    assert c.writes.blocks == 8
    assert (await c.legs.record(c.p, push.key)).cached_tokens == hit * BLOCK
    await c.idle()


async def test_both_hit(c: Pushing) -> None:
    """P begins behind its hit, D's grant behind its own."""
    for at_p, at_d in ((2, 5), (5, 2)):
        prompt = c.prompt(8 * BLOCK)
        await c.s.cluster.tokens(prompt[: at_p * BLOCK], 1, url=c.p.url)
        await c.s.cluster.tokens(prompt[: at_d * BLOCK], 1, url=c.d.url)
        expected = await c.alone(prompt)
        _, answer = await c.legs.push(c.p, c.d, prompt)
        assert answer.token_ids == expected
        assert c.writes.blocks == 8 - at_d
        await c.idle()


# ------------------------------------------------------------------------------------------ chunk by chunk


async def test_each_chunk_is_written_before_the_next_is_computed(c: Pushing) -> None:
    """Field case 52: 7 of 8 chunks have landed while the last one is not even begun."""
    prompt = c.prompt(8 * CHUNK)
    expected = await c.alone(prompt)
    push = await c.computed(prompt, 0)
    for chunk in range(1, 8):
        c.steps.let(1)
        await until(lambda chunk=chunk: c.steps.done == chunk and c.steps.holds)
        await until(lambda chunk=chunk: c.writes.ended == chunk, describe=c.s.where)
    assert c.writes.blocks == 7 * CHUNK // BLOCK
    assert not push.decode.done()
    c.open()
    answer = await push.decode
    assert answer.token_ids == expected
    record = await c.record(push)
    assert (record.write_chunks, record.early_bytes * 8) == (8, record.bytes * 7)
    assert record.bytes == 8 * CHUNK // BLOCK * c.d.region.block_bytes
    await c.idle()


async def test_writes_of_several_chunks_in_flight(c: Pushing) -> None:
    """Later chunks are posted while earlier ones are on their way; none has landed early then."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    c.writes.closed = True
    push = await c.computed(prompt, 0)
    c.steps.open()
    await push.prefill
    await until(lambda: c.writes.held == 5, describe=c.s.where)
    assert not push.decode.done()
    for landed in range(1, 5):
        c.writes.let(1)
        await until(lambda landed=landed: c.writes.ended == landed)
        assert not push.decode.done()
        assert c.d.blocks().granted == 10
    c.writes.let(1)
    assert (await push.decode).token_ids == expected
    record = await c.record(push)
    assert (record.write_chunks, record.early_bytes) == (5, 0)
    await c.idle()


async def test_grant_that_comes_when_all_is_computed(c: Pushing) -> None:
    """D is busy until P has the whole prompt: it is written at once, in one transfer."""
    prompt, other = c.prompt(), c.prompt(CHUNK)
    expected = await c.alone(prompt)
    c.s.decode_steps.close()
    busy = asyncio.create_task(c.s.cluster.tokens(other, 2, url=c.d.url))
    await until(lambda: c.s.decode_steps.holds)
    push = c.start(prompt)
    await push.prefill
    assert c.writes.posted == 0
    c.open()
    assert (await push.decode).token_ids == expected
    record = await c.record(push)
    assert (record.write_chunks, record.early_bytes, record.reasons) == (1, 0, [])
    await busy
    await c.idle()


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_leg_comes_first(c: Pushing, first: str) -> None:
    """A grant may come before the prompt, and the prompt before the grant."""
    prompt, key = c.prompt(), new_key()
    expected = await c.alone(prompt)
    if first == "prefill":
        await c.legs.prefill_push(c.p, c.d, prompt, key=key)
        answer = await c.legs.decode_push(c.p, c.d, prompt, key=key)
    else:
        leg = c.decode(prompt, key)
        await until(lambda: len(c.p.agent._running_node.writes) == 1)
        await c.legs.prefill_push(c.p, c.d, prompt, key=key)
        answer = await leg
    assert answer.token_ids == expected
    assert (await c.legs.record(c.d, key)).kv_source == "transferred"
    await c.idle()


# ------------------------------------------------------------------------------------------ many


async def test_hundred_pushes(c: Pushing) -> None:
    """Field case 28: P holds nothing of them right after, and each answer has its KV from there."""
    prompts = [c.prompt(3 * BLOCK + n) for n in range(10)]
    expected = [await c.alone(prompt) for prompt in prompts]
    for salt in range(10):
        pushes = [c.legs.push(c.p, c.d, prompt, salt=f"{salt}") for prompt in prompts]
        answers = [answer for _, answer in await asyncio.gather(*pushes)]
        assert [answer.token_ids for answer in answers] == expected
        await until(lambda: leftovers(c.p) == {}, describe=c.s.where)
        records = [await c.legs.record(c.d, answer.key) for answer in answers]
        assert [(record.kv_source, record.reasons) for record in records] == [("transferred", [])] * 10
    await c.idle()


# ------------------------------------------------------------------------------------------ rule 6, rule 1


@policies
@pytest.mark.parametrize(("at_p", "at_d"), [("", "A"), ("A", ""), ("A", "B")])
async def test_salts_that_differ(c: Pushing, at_p: str, at_d: str, on_miss: MissPolicy) -> None:
    """Rule 6: the same prompt under another salt is another content: not one byte is written."""
    prompt, key = c.prompt(), new_key()
    expected = await c.alone(prompt)
    before = await c.legs.reasons(c.d)
    decode = c.legs.decode_push(c.p, c.d, prompt, key=key, salt=at_d, on_miss=on_miss)
    _, answer = await asyncio.gather(c.legs.prefill_push(c.p, c.d, prompt, key=key, salt=at_p), decode)
    if on_miss == "recompute":
        assert answer.token_ids == expected
    else:
        assert (answer.status, answer.error["code"]) == (503, Reason.CHAIN_MISMATCH)
    record = await c.legs.record(c.d, key)
    assert (record.transferred_tokens, record.bytes, record.reasons) == (0, 0, [Reason.CHAIN_MISMATCH])
    assert await c.legs.reasons(c.d) - before == counted(Reason.CHAIN_MISMATCH)
    assert c.writes.posted == 0
    await c.legs.withdraw(c.p, key)
    await c.idle()


@pytest.mark.parametrize("salt", ["", "A"])
async def test_salts_that_are_the_same(c: Pushing, salt: str) -> None:
    """The other half: under one salt everything is written."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    _, answer = await c.legs.push(c.p, c.d, prompt, salt=salt)
    assert answer.token_ids == expected
    assert c.writes.blocks == 10
    await c.idle()


@pytest.mark.parametrize("equal", [0, 2 * BLOCK, 5 * CHUNK - 1])
async def test_prompts_that_differ(c: Pushing, equal: int) -> None:
    """Rule 1: what is written has to be the whole prompt, also of one that begins alike."""
    prompt, key = c.prompt(), new_key()
    other = prompt[:equal] + [token + 1 for token in prompt[equal:]]
    expected = await c.alone(other)
    prefill = c.legs.prefill_push(c.p, c.d, prompt, key=key)
    _, answer = await asyncio.gather(prefill, c.legs.decode_push(c.p, c.d, other, key=key))
    assert answer.token_ids == expected
    assert (await c.legs.record(c.d, key)).reasons == [Reason.CHAIN_MISMATCH]
    assert c.writes.posted == 0
    await c.legs.withdraw(c.p, key)
    await c.idle()
