"""The token that P sampled is the answer's first where that is exact, and is left alone elsewhere (field case
40): by push and by pull, the text is the one that D gives alone.

Both legs get what the router would send them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.messages import OfferRef
from kvhandoff.router.legs import ROWS, Rewriting
from tests.cluster import MODEL, until
from tests.e2e.pushes import Pushing, pushing
from tests.e2e.stage import BLOCK
from tests.legs import new_key, ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")

Way = Literal["push", "pull"]
ways = pytest.mark.parametrize("way", ["push", "pull"])
SEEDED = {"temperature": 1.0, "seed": 7}
GREEDY = {"temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[Pushing]:
    async with pushing(tiny) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def c(engines: Pushing) -> AsyncIterator[Pushing]:
    engines.reset()
    yield engines
    engines.open()


@dataclass
class Asked:
    """A client's request, and what D alone makes of it."""

    c: Pushing
    body: dict[str, Any]

    async def alone(self) -> list[dict[str, Any]]:
        """The choices of D's own answer, that shares no KV."""
        body = {**self.body, "cache_salt": f"alone {new_key()}"}
        status, answer = await self.c.s.cluster.post(body, url=self.c.d.url)
        assert status == 200, answer
        return choices(answer)

    async def handed_over(self, way: Way) -> tuple[list[dict[str, Any]], LegRecord, int]:
        """The choices by push or pull, D's record, and how many steps D needed."""
        c, key = self.c, new_key()
        before = c.s.decode_steps.done
        prefill = self.prefill_leg()
        if way == "push":
            _, answer = await asyncio.gather(
                c.legs.prefill_push(c.p, c.d, key=key, **prefill),
                c.legs.decode_push(c.p, c.d, key=key, **self.body),
            )
        else:
            offer = await c.legs.offer(c.p, key=key, **prefill)
            answer = await c.legs.decode(c.d, offer, key=key, **self.body)
        assert answer.status == 200, answer.body
        record = await c.legs.record(c.d, key)
        assert (record.kv_source, record.reasons) == ("transferred", [])
        await c.idle()
        return choices(answer.body), record, c.s.decode_steps.done - before

    def prefill_leg(self) -> dict[str, Any]:
        """The prefill leg's fields, as the router writes them."""
        raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in self.body.items()}
        fields = Rewriting(ROWS).prefill(raw)
        return {name: msgspec.json.decode(bytes(value)) for name, value in fields.items()}


def asked(c: Pushing, prompt: list[int] | None = None, **fields: Any) -> Asked:
    usual = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    return Asked(c, {"prompt": prompt or c.prompt(3 * BLOCK + 5), **usual, **fields})


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client sees of an answer."""
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
    made = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [{name: choice.get(name) for name in names} for choice in made]


REUSED: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "seeded, top_k and top_p": {**SEEDED, "top_k": 20, "top_p": 0.9},
    "max_tokens 1": {**GREEDY, "max_tokens": 1},
    "seeded, max_tokens 1": {**SEEDED, "max_tokens": 1},
    "with EOS": {**GREEDY, "ignore_eos": False},
    "min_tokens": {**GREEDY, "min_tokens": 3, "ignore_eos": False},
    "a stop string": {**GREEDY, "stop": ["\n\n\n"]},
    "siblings": {**SEEDED, "n": 2},
}


@ways
@pytest.mark.parametrize("fields", REUSED.values(), ids=REUSED)
async def test_reused(c: Pushing, way: Way, fields: dict[str, Any]) -> None:
    """D needs no step for the first token, and all later ones are what they were."""
    request = asked(c, **fields)
    expected = await request.alone()
    answer, record, steps = await request.handed_over(way)
    assert answer == expected
    assert record.first_token_reused
    tokens = record.prompt_tokens
    assert (record.transferred_tokens, record.computed_tokens) == (tokens, 0)
    if len(expected) == 1:
        assert steps == len(expected[0]["token_ids"]) - 1


NOT_REUSED: dict[str, dict[str, Any]] = {
    "logprobs": {**GREEDY, "logprobs": 2},
    "seeded, logprobs": {**SEEDED, "logprobs": 0},
}


@ways
@pytest.mark.parametrize("fields", NOT_REUSED.values(), ids=NOT_REUSED)
async def test_not_reused(c: Pushing, way: Way, fields: dict[str, Any]) -> None:
    """What P does not send can't be had without a step: the KV is used, the token is not."""
    request = asked(c, **fields)
    expected = await request.alone()
    answer, record, _ = await request.handed_over(way)
    assert answer == expected
    assert expected[0]["logprobs"]["token_logprobs"]
    assert (record.first_token_reused, record.computed_tokens) == (False, 1)


@ways
async def test_drawn_without_a_seed(c: Pushing, way: Way) -> None:
    """Two engines draw two tokens; D's own is the one that counts."""
    request = asked(c, temperature=1.0)
    answer, record, _ = await request.handed_over(way)
    assert len(answer[0]["token_ids"]) == 6
    assert not record.first_token_reused


@ways
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_stop_token_as_first(c: Pushing, way: Way, sampling: dict[str, Any]) -> None:
    """It ends the answer at once, with an empty text and its own reason; P was not told that it stops."""
    prompt = c.prompt(3 * BLOCK + 5)
    first = (await asked(c, prompt, **sampling).alone())[0]["token_ids"][0]
    request = asked(c, prompt, **sampling, stop_token_ids=[first])
    expected = await request.alone()
    assert (expected[0]["finish_reason"], expected[0]["stop_reason"]) == ("stop", first)
    answer, record, _ = await request.handed_over(way)
    assert answer == expected
    assert not record.first_token_reused


@ways
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_masked_as_first(c: Pushing, way: Way, sampling: dict[str, Any]) -> None:
    """`min_tokens` masks D's stop tokens, of which P knows nothing."""
    prompt = c.prompt(3 * BLOCK + 5)
    first = (await asked(c, prompt, **sampling).alone())[0]["token_ids"][0]
    request = asked(c, prompt, **sampling, stop_token_ids=[first], min_tokens=2)
    expected = await request.alone()
    assert expected[0]["token_ids"][0] != first
    answer, record, _ = await request.handed_over(way)
    assert answer == expected
    assert not record.first_token_reused


@ways
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_eos_as_first(
    c: Pushing, way: Way, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of nothing; P stops at its one token too, and makes its offer all the same."""
    prompt = c.prompt(3 * BLOCK + 5)
    first = (await asked(c, prompt, **sampling).alone())[0]["token_ids"][0]
    for engine in (c.p, c.d):
        monkeypatch.setattr(engine.runner, "eos_token_ids", frozenset([first]))
    request = asked(c, prompt, **sampling, ignore_eos=False)
    expected = await request.alone()
    assert (expected[0]["text"], expected[0]["finish_reason"]) == ("", "stop")
    answer, record, _ = await request.handed_over(way)
    assert answer == expected
    assert not record.first_token_reused


@ways
async def test_stop_string_in_the_first_token(c: Pushing, way: Way) -> None:
    """A stop string is found in a token that no step of D's made."""
    prompt = c.prompt(3 * BLOCK + 5)
    text = (await asked(c, prompt, **GREEDY, max_tokens=1).alone())[0]["text"]
    while not text.isprintable() or not text:
        prompt = c.prompt(3 * BLOCK + 5)
        text = (await asked(c, prompt, **GREEDY, max_tokens=1).alone())[0]["text"]
    request = asked(c, prompt, **GREEDY, stop=[text[0]])
    expected = await request.alone()
    assert (expected[0]["text"], expected[0]["stop_reason"]) == ("", text[0])
    answer, record, _ = await request.handed_over(way)
    assert answer == expected
    assert record.first_token_reused


@ways
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_streamed(c: Pushing, way: Way, sampling: dict[str, Any]) -> None:
    """No first token is lost or doubled: one event for each token, in order, one end, usage once."""
    request = asked(c, **sampling, max_tokens=8)
    (expected,) = await request.alone()
    key = new_key()
    events = await stream(request, way, key)
    parts = [choice for event in events for choice in event["choices"]]
    assert [token for part in parts for token in part["token_ids"] or ()] == expected["token_ids"]
    assert "".join(part["text"] for part in parts) == expected["text"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    assert parts[0]["token_ids"] == expected["token_ids"][:1], "the first token waits for the next"
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 * BLOCK + 5, 8)
    assert (await c.legs.record(c.d, key)).first_token_reused
    await c.idle()


async def stream(request: Asked, way: Way, key: HandoffKey) -> list[dict[str, Any]]:
    """The events of a streamed answer; D's second step waits until the first event is here."""
    c = request.c
    if way == "push":
        agent = c.p.agent
        ref = OfferRef(key=key, source=agent.me, control_address=agent.control_address)
        signed = ticket(c.d, "decode", key=key, push_from=ref)
        prefill = asyncio.create_task(c.legs.prefill_push(c.p, c.d, key=key, **request.prefill_leg()))
    else:
        offer = await c.legs.offer(c.p, key=key, **request.prefill_leg())
        signed = ticket(c.d, "decode", key=key, offer=offer)
    body = {
        **request.body,
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"ticket": signed},
    }
    c.s.decode_steps.close()
    events = []
    async with c.s.cluster.session.post(f"{c.d.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line.removeprefix(b"data: ")))
                c.s.decode_steps.open()
    if way == "push":
        assert (await prefill).status == 200
    return events


@ways
async def test_cache_behind_a_reused_first_token(c: Pushing, way: Way) -> None:
    """The KV of a first token that no step sampled is computed by the next one: it is right in the cache
    that the turn after it finds."""
    prompt = c.prompt(3 * BLOCK - 1)
    request = asked(c, prompt, **GREEDY, max_tokens=BLOCK)
    (expected,) = await request.alone()
    (answer,), record, _ = await request.handed_over(way)
    assert answer == expected
    assert record.first_token_reused
    longer = prompt + expected["token_ids"]
    again = asked(c, longer, **GREEDY)
    (alone,) = await again.alone()
    await until(lambda: c.d.at_baseline())
    status, body = await c.s.cluster.post(again.body, url=c.d.url)
    assert (status, choices(body)) == (200, [alone])
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK
