"""The answer is the one that vLLM gives alone, token for token, whichever way the KV came."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvhandoff.core.reasons import Reason
from tests.vllm.engines import eventually
from tests.vllm.marks import both, gqa
from tests.vllm.pair import CHAT, MAX_TOKENS, Answered, Pair, greedy, new_key

pytestmark = pytest.mark.asyncio(loop_scope="session")

ways = pytest.mark.parametrize("way", ["pull", "push"])
LAST = 1
"""vLLM makes each token in a step of its own: a prompt's last token is computed, whatever KV is there."""
LENGTHS = (2, 31, 32, 33, 64, 65, 200, 500)
"""Around a block's ends, and prompts of several blocks and several steps."""


async def forward(pair: Pair, way: str, *args: Any, **options: Any) -> Answered:
    """A pull or a push."""
    return await (pair.pull if way == "pull" else pair.push)(*args, **options)


@both
@ways
@pytest.mark.parametrize("tokens", LENGTHS)
async def test_forward(pair: Pair, way: str, tokens: int) -> None:
    question = await pair.question(tokens)
    answer = await forward(pair, way, question.prompt)
    assert answer.token_ids == question.expected
    p, d = await pair.records(answer.key)
    assert (p.prompt_tokens, p.computed_tokens) == (tokens, tokens)
    assert (d.kv_source, d.reasons) == ("transferred", [])
    assert (d.transferred_tokens, d.computed_tokens) == (tokens - 1, LAST)
    assert d.bytes > 0


@gqa
async def test_push_moves_all_full_blocks_before_the_leg_ends(pair: Pair) -> None:
    """Field case 52: bytes don't wait for the offer to be complete. The blocks are granted before the prompt
    is computed, and the leg goes on for a second after it, so that the engines' speed decides nothing."""
    question, key = await pair.question(1000), new_key()
    destination = asyncio.create_task(pair.decode_push(question.prompt, key=key))

    async def granted() -> bool:
        return (await pair.d.blocks()).granted > 0

    await eventually(granted)
    prefilled = await pair.prefill(question.prompt, key=key, push=True, max_tokens=600, ignore_eos=True)
    assert prefilled.status == 200
    answer = await destination
    assert answer.token_ids == question.expected
    d = await pair.d.record(key.handoff_id)
    assert d.transferred_tokens == 1000 - LAST
    assert d.write_chunks > 1
    assert d.early_bytes == d.bytes * 31 // 32  # the prompt's last block is not full


@both
async def test_local(pair: Pair) -> None:
    question = await pair.question(150)
    answer = await pair.local(question.prompt, retain=None)
    assert answer.token_ids == question.expected
    record = await pair.d.record(answer.key.handoff_id)
    assert (record.kv_source, record.computed_tokens) == ("local", 150)


@gqa
@ways
@pytest.mark.parametrize("held", [32, 64, 128, 160])
async def test_destination_has_the_beginning(pair: Pair, way: str, held: int) -> None:
    """Field case 4: what the decode engine has already is not moved, and everything lands in its place."""
    beginning = pair.tokens(held)
    assert (await pair.local([*beginning, 5], retain=None)).status == 200
    question = await pair.question(170, begins=beginning)
    answer = await forward(pair, way, question.prompt)
    assert answer.token_ids == question.expected
    d = await pair.d.record(answer.key.handoff_id)
    assert (d.cached_tokens, d.transferred_tokens) == (held, 170 - held - LAST)


@gqa
@ways
async def test_source_has_the_beginning(pair: Pair, way: str) -> None:
    """What the prefill engine had in its prefix cache is handed over like what it computed."""
    beginning = pair.tokens(96)
    await pair.prefill([*beginning, 5])
    question = await pair.question(170, begins=beginning)
    answer = await forward(pair, way, question.prompt)
    assert answer.token_ids == question.expected
    p, d = await pair.records(answer.key)
    assert (p.cached_tokens, p.computed_tokens, d.transferred_tokens) == (96, 74, 170 - LAST)


@both
@ways
async def test_many_at_once(pair: Pair, way: str) -> None:
    """More requests than either engine runs at a time."""
    questions = [await pair.question(tokens) for tokens in (20, 64, 100, 130, 200, 90, 40, 170, 33, 210)]
    answers = await asyncio.gather(*(forward(pair, way, q.prompt) for q in questions))
    assert [answer.token_ids for answer in answers] == [q.expected for q in questions]
    records = [await pair.d.record(answer.key.handoff_id) for answer in answers]
    assert sum(record.transferred_tokens > 0 for record in records) >= 8, [r.reasons for r in records]


# ------------------------------------------------------------------------------------- what clients ask


@gqa
@ways
async def test_streamed(pair: Pair, way: str) -> None:
    question = await pair.question(150, 12)
    alone = (await pair.post(pair.d, greedy(question.prompt, 12, cache_salt="alone, streamed"))).choices[0]
    key = new_key()
    if way == "pull":
        prefilled = await pair.prefill(question.prompt, key=key)
        ticket = await pair.ticket(pair.d, "decode", key=key, offer=prefilled.offer)
        streamed = await pair.stream(pair.d, greedy(question.prompt, 12), key=key, ticket=ticket)
    else:
        ticket = await pair.ticket(pair.d, "decode", key=key, push_from=await pair.offer_ref(key))
        _, streamed = await asyncio.gather(
            pair.prefill(question.prompt, key=key, push=True),
            pair.stream(pair.d, greedy(question.prompt, 12), key=key, ticket=ticket),
        )
    assert streamed.token_ids == question.expected
    assert (streamed.text, streamed.finish_reason) == (alone["text"], alone["finish_reason"])
    assert (await pair.d.record(key.handoff_id)).transferred_tokens == 150 - LAST


@gqa
@pytest.mark.parametrize("streamed", [False, True])
async def test_chat(pair: Pair, streamed: bool) -> None:
    """The decode engine takes the prefill engine's token ids instead of rendering the chat again."""
    messages = [
        {"role": "system", "content": f"{pair.rng.random()}: you are a helpful assistant. " * 8},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = await pair.post(pair.p, {**body, "cache_salt": "alone, chat"}, endpoint=CHAT)
    expected = alone.choices[0]["message"]["content"]

    key = new_key()
    ticket = await pair.ticket(pair.p, "prefill", key=key)
    prefilled = await pair.post(pair.p, {**body, "max_tokens": 1}, endpoint=CHAT, key=key, ticket=ticket)
    params = prefilled.body["kv_transfer_params"]
    assert len(params["prompt_token_ids"]) == prefilled.body["usage"]["prompt_tokens"]
    sealed = {**body, "kv_transfer_params": {"prompt_token_ids": params["prompt_token_ids"]}}
    ticket = await pair.ticket(pair.d, "decode", key=key, offer=prefilled.offer)
    if streamed:
        answer = await pair.stream(pair.d, sealed, endpoint=CHAT, key=key, ticket=ticket)
        assert answer.text == expected
    else:
        whole = await pair.post(pair.d, sealed, endpoint=CHAT, key=key, ticket=ticket)
        assert whole.choices[0]["message"]["content"] == expected
        assert whole.body["usage"] == alone.body["usage"]
    record = await pair.d.record(key.handoff_id)
    assert record.transferred_tokens == prefilled.body["usage"]["prompt_tokens"] - LAST


@gqa
@ways
async def test_several_choices(pair: Pair, way: str) -> None:
    """vLLM makes a request of each choice, and all of them get the one ticket: the first obeys it."""
    question = await pair.question(150)
    # vLLM refuses several greedy choices; of one candidate, sampling takes the best. (With a seed its CPU
    # build ends itself where a prompt is computed in several steps.)
    answer = await forward(pair, way, question.prompt, n=3, temperature=1.0, top_k=1)
    assert [choice["token_ids"] for choice in answer.choices] == 3 * [question.expected]
    await pair.settled()


@gqa
@ways
async def test_stop_string(pair: Pair, way: str) -> None:
    """It ends a request from outside the engine, which looks like an abort there."""
    question = await pair.question(150, 40)
    alone = greedy(question.prompt, 40, cache_salt="alone, stop")
    text = (await pair.post(pair.d, alone)).choices[0]["text"]
    stop = next(letter for letter in text[len(text) // 3 :] if letter.isascii() and letter.isprintable())
    expected = (await pair.post(pair.d, {**alone, "stop": [stop]})).choices[0]
    assert expected["finish_reason"] == "stop"
    answer = (await forward(pair, way, question.prompt, 40, stop=[stop])).choices[0]
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert answer[name] == expected[name]


@gqa
async def test_logprobs(pair: Pair) -> None:
    """Not only the best token is the same: the numbers are."""
    question = await pair.question(150)
    alone = await pair.post(pair.d, greedy(question.prompt, 8, cache_salt="alone, logprobs", logprobs=5))
    answer = await pair.pull(question.prompt, logprobs=5)
    expected, got = (a.choices[0]["logprobs"]["token_logprobs"] for a in (alone, answer))
    assert got == pytest.approx(expected, abs=1e-4)


@gqa
async def test_prompt_logprobs_are_computed_here(pair: Pair) -> None:
    """vLLM reads no KV for a prompt whose every logit is asked for; nothing stays behind."""
    question = await pair.question(150)
    answer = await pair.pull(question.prompt, prompt_logprobs=1)
    assert answer.token_ids == question.expected
    record = await pair.d.record(answer.key.handoff_id)
    assert (record.transferred_tokens, record.computed_tokens) == (0, 150)
    assert record.reasons == [Reason.PROMPT_LOGPROBS]


@gqa
async def test_salts_keep_prompts_apart(pair: Pair) -> None:
    """One salt's KV serves no prompt of another's, and each salt's own handoff works."""
    question = await pair.question(150)
    first = await pair.pull(question.prompt, salt="tenant a")
    second = await pair.pull(question.prompt, salt="tenant b")
    assert first.token_ids == second.token_ids == question.expected
    for answer in (first, second):
        p, d = await pair.records(answer.key)
        assert (p.cached_tokens, d.cached_tokens, d.transferred_tokens) == (0, 0, 150 - LAST)


@gqa
async def test_plain_requests_are_served_as_ever(pair: Pair) -> None:
    """Without a ticket, vLLM does what it does without a connector."""
    question = await pair.question(150, MAX_TOKENS)
    answer = await pair.post(pair.p, greedy(question.prompt, MAX_TOKENS))
    assert answer.token_ids == question.expected
    assert answer.body.get("kv_transfer_params") is None
