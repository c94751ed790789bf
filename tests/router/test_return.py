"""Return: a turn is kept, found again by the next one, and only by its own conversation."""

from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.core.ids import HandoffKey
from kvhandoff.handoff.messages import HistoryRef
from tests.router.engines import Leg, MockEngine, decode, failing, held, soon, until
from tests.router.test_push import gated_stream

LONG = "the quick brown fox jumps over the lazy dog"
Messages = list[dict[str, str]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TURN_1 = [user(LONG)]
TURN_2 = [*TURN_1, assistant("Hello"), user("and then?")]
TURN_3 = [*TURN_2, assistant("Hello"), user("what else?")]


class Turn:
    """One turn of a chat: its legs, and the `id` of its answer."""

    def __init__(self, c: Any, answer_id: str) -> None:
        self.id = answer_id
        taken = [engine for engine in c.engines if engine.legs.qsize()]
        self.engines = {engine.role: engine for engine in taken}
        self.legs: dict[str, Leg] = {engine.role: engine.legs.get_nowait() for engine in taken}

    @property
    def decode(self) -> MockEngine:
        return self.engines["decode"]

    @property
    def told(self) -> HistoryRef | None:
        """The history that the engine which computes the prompt was told of."""
        ticket = self.legs.get("prefill", self.legs["decode"]).ticket
        assert ticket is not None
        return ticket.history

    @property
    def retain(self) -> str | None:
        ticket = self.legs["decode"].ticket
        assert ticket is not None
        return ticket.retain

    def kept(self, n_tokens: int = 4096) -> HistoryRef:
        """What its decode engine keeps of it; until its account is in, as much as it could."""
        ticket = self.legs["decode"].ticket
        assert ticket is not None
        address = f"tcp://127.0.0.1:{self.decode.port + 1}"
        source = self.decode.identity
        return HistoryRef(key=ticket.key, source=source, control_address=address, n_tokens=n_tokens)


async def turn(
    c: Any, messages: Messages, *, path: str = "pull", headers: dict[str, str] | None = None, **fields: Any
) -> Turn:
    given = {"x-kvhandoff-path": path, **(headers or {})}
    body = c.chat_body(messages=messages, **fields)
    if body.get("stream"):
        async with c.session.post(c.url + "/v1/chat/completions", json=body, headers=given) as response:
            assert response.status == 200
            await response.read()
            return Turn(c, response.headers["X-Request-Id"])
    status, answer = await c.post(body, path="/v1/chat/completions", headers=given)
    assert status == 200
    return Turn(c, answer["id"])


async def loaded(engine: MockEngine, load: int) -> None:
    """Until the router knows of this load."""
    engine.load = load
    seen = len(engine.cursors)
    await until(lambda: len(engine.cursors) > seen + 1)


async def completion(c: Any, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Turn:
    given = {"x-kvhandoff-path": "pull", **(headers or {})}
    status, answer = await c.post(c.body(prompt=prompt, **fields), headers=given)
    assert status == 200
    return Turn(c, answer["id"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["pull", "push"])
async def test_unchanged_chat_client(cluster: Any, path: str, stream: bool) -> None:
    """It names no conversation, and gets its history from its second turn on: the messages tell."""
    async with cluster(prefill=2, decode=3) as c:
        first = await turn(c, TURN_1, path=path, stream=stream)
        assert (first.told, first.retain) == (None, "renewable")
        second = await turn(c, TURN_2, path=path, stream=stream)
        assert second.told == first.kept()
        assert second.decode is first.decode
        assert second.legs["decode"].ticket.history is None  # type: ignore[union-attr]
        third = await turn(c, TURN_3, path=path, stream=stream)
        assert third.told == second.kept()
        record = await c.record(second.id)
        assert record["history"]["engine_id"] == first.decode.engine_id
        assert record["requested_return"] == "auto"
        page = await c.text("/metrics")
        assert 'kvhandoff_router_return_lookups_total{result="hit"} 2.0' in page
        assert 'kvhandoff_router_return_lookups_total{result="miss"} 1.0' in page


async def test_edited_history_finds_what_it_still_shares(cluster: Any) -> None:
    async with cluster() as c:
        first = await turn(c, TURN_1)
        second = await turn(c, TURN_2)
        edited = [*TURN_1, assistant("Hello"), user("no, wait"), assistant("Hello"), user("what else?")]
        assert (await turn(c, edited)).told == first.kept()
        assert (await turn(c, [user("another " + LONG), *TURN_3[1:]])).told is None
        # Stripped thinking, or a branch: the turn that was asked with the same messages.
        stripped = [*TURN_1, assistant("lo"), user("and then?")]
        assert (await turn(c, stripped)).told == first.kept()
        assert (await turn(c, TURN_3)).told == second.kept()
        # The same turn again is no later one.
        assert (await turn(c, TURN_1)).told is None


async def test_messages_in_other_bytes_or_order(cluster: Any) -> None:
    async with cluster() as c:
        await turn(c, TURN_1)
        assert (await turn(c, [TURN_2[1], TURN_2[0], TURN_2[2]])).told is None
        # A message is not told from its neighbour's end.
        joined = [user(LONG + "x"), assistant("Hello"), user("and then?")]
        assert (await turn(c, joined)).told is None


async def test_messages_that_are_written_otherwise(cluster: Any) -> None:
    """What a client changes from turn to turn while the prompt stays the same."""
    async with cluster() as c:
        first = await turn(c, [{"role": "user", "content": LONG}])
        parts: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
        opening: Any = {"content": parts, "role": "user", "name": None}
        second = await turn(c, [opening, assistant("Hello"), user("and then?")])
        assert second.told == first.kept()
        thought: Any = {**assistant("Hello"), "reasoning_content": "hm", "tool_calls": []}
        third = await turn(c, [user(LONG), thought, user("and then?"), assistant("Hello"), user("so?")])
        assert third.told == second.kept()


NAMES: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"conversation_id": "chat-1"}, {}),
    ({"prompt_cache_key": "chat-1"}, {}),
    ({}, {"x-session-id": "chat-1"}),
    ({}, {"X-Session-ID": "chat-1"}),
    ({}, {"X-Session-Affinity": "chat-1"}),
    ({}, {"X-Correlation-ID": "chat-1"}),
]


@pytest.mark.parametrize(("fields", "headers"), NAMES)
async def test_named_conversation(cluster: Any, fields: dict[str, str], headers: dict[str, str]) -> None:
    """Completions have no messages: they are found by their name alone. Engines never see it."""
    async with cluster() as c:
        first = await completion(c, LONG, headers, **fields)
        assert (first.told, first.retain) == (None, "renewable")
        second = await completion(c, LONG + " again", headers, **fields)
        assert second.told == first.kept()
        for leg in (*first.legs.values(), *second.legs.values()):
            assert not {"conversation_id", "prompt_cache_key"} & set(leg.body)
            assert "chat-1" not in leg.headers.values()
        assert (await completion(c, LONG + " again", {"x-session-id": "chat-2"})).told is None
        unnamed = await completion(c, LONG)
        assert (unnamed.told, unnamed.retain) == (None, None)


async def test_messages_say_more_than_a_name(cluster: Any) -> None:
    """One name for several conversations (`prompt_cache_key`), or another for each request (a correlation
    id)."""
    async with cluster() as c:
        first = await turn(c, TURN_1, prompt_cache_key="app", headers={"x-correlation-id": "1"})
        other = await turn(c, [user("other " + LONG)], prompt_cache_key="app")
        second = await turn(c, TURN_2, prompt_cache_key="app", headers={"x-correlation-id": "2"})
        assert second.told == first.kept()
        # Without a known message the name has to do: the last turn under it.
        newest = await turn(c, [user("new " + LONG)], prompt_cache_key="app")
        assert newest.told == other.kept()


@pytest.mark.parametrize("name", [{}, {"conversation_id": "chat-1"}])
async def test_salts_never_mix(cluster: Any, name: dict[str, str]) -> None:
    """Field case 61: another tenant sends the same messages, or the same conversation id."""
    async with cluster() as c:
        await turn(c, TURN_1, cache_salt="a", **name)
        assert (await turn(c, TURN_2, cache_salt="b", **name)).told is None
        assert (await turn(c, TURN_2, **name)).told is None
    async with cluster() as c:
        await turn(c, TURN_1, **name)
        assert (await turn(c, TURN_2, cache_salt="a", **name)).told is None
        same = await turn(c, TURN_1, cache_salt="c", **name)
        assert (await turn(c, TURN_2, cache_salt="c", **name)).told == same.kept()


# ---- on, off, and how long ----


async def test_header_turns_it_off_and_on(cluster: Any) -> None:
    async with cluster(return_mode="off") as c:
        off = await turn(c, TURN_1)
        assert (off.told, off.retain) == (None, None)
        first = await turn(c, TURN_1, headers={"x-kvhandoff-return": "On"})
        assert first.retain == "renewable"
        assert (await turn(c, TURN_2)).told is None
        second = await turn(c, TURN_2, headers={"x-kvhandoff-return": "on"})
        assert second.told == first.kept()
        assert (await c.record(second.id))["requested_return"] == "on"
    async with cluster() as c:
        await turn(c, TURN_1)
        off = await turn(c, TURN_2, headers={"x-kvhandoff-return": "off"})
        assert (off.told, off.retain) == (None, None)
        assert (await c.record(off.id))["history"] is None
        status, answer = await c.post(c.body(), headers={"x-kvhandoff-return": "maybe"})
        assert (status, answer["error"]["param"]) == (400, "x-kvhandoff-return")
        assert answer["error"]["message"] == "x-kvhandoff-return: got 'maybe', allowed is auto, on, off"


@pytest.mark.parametrize(("retain", "asked"), [("renewable", "renewable"), ("fixed", "fixed"), ("off", None)])
@pytest.mark.parametrize("path", ["pull", "local"])
async def test_retention(cluster: Any, retain: str, asked: str | None, path: str) -> None:
    async with cluster(retain=retain, decode=2) as c:
        first = await turn(c, TURN_1, path=path)
        assert first.retain == asked
        second = await turn(c, TURN_2)
        assert second.told == (None if asked is None else first.kept())


@pytest.mark.parametrize("field", ["conversation_id", "prompt_cache_key"])
@pytest.mark.parametrize(
    ("body", "headers"),
    [({}, {}), ({}, {"x-kvhandoff-return": "off"}), ({"prompt": ["a", "b"]}, {})],
)
async def test_a_name_that_is_no_text_is_always_refused(
    cluster: Any, field: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """Whether it would be used or not."""
    async with cluster() as c:
        status, answer = await c.post(c.body(**body, **{field: 5}), headers=headers)
        assert (status, answer["error"]["message"]) == (400, f"{field}: got 5, allowed is a string or null")


async def test_several_prompts_belong_to_no_conversation(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = failing(400)  # it has no ticket to answer by
        status, _ = await c.post(c.body(prompt=[LONG, LONG], conversation_id="chat-1"))
        assert status == 400
        assert c.d.legs.get_nowait().ticket is None
        c.d.script = decode
        assert (await completion(c, LONG, conversation_id="chat-1")).told is None


async def test_account_says_how_much_is_kept(cluster: Any) -> None:
    """A history that is too short to gain anything is left alone, unless it is asked for."""

    async with cluster() as c:
        c.d.keeps = 80
        first = await turn(c, TURN_1)
        assert (await c.record(first.id))["retained_tokens"] == 80
        c.d.keeps = 48
        second = await turn(c, TURN_2)
        assert second.told == first.kept(80)
        await c.record(second.id)
        third = await turn(c, TURN_3)
        assert third.told is None
        assert "return_too_short" in (await c.record(third.id))["reasons"]
        third = await turn(c, TURN_3, headers={"x-kvhandoff-return": "on"})
        assert third.told == second.kept(48)
        # Nothing at all was kept: as if it had never been.
        c.d.keeps = 0
        second = await turn(c, TURN_2)
        await c.record(second.id)
        assert (await turn(c, TURN_3)).told == first.kept(80)


# ---- which engine ----


async def test_local_leg_reads_the_history_of_another_engine_only(cluster: Any) -> None:
    """The engine that has it finds it in its own prefix cache."""
    async with cluster(decode=2, poll_interval_s=0.01) as c:
        first = await turn(c, TURN_1)
        same = await turn(c, TURN_2, path="local")
        assert (same.decode, same.told) == (first.decode, None)
        await loaded(first.decode, 20)
        other = await turn(c, TURN_2, path="local")
        assert other.decode is not first.decode
        assert other.told == first.kept(100)


async def test_prompt_logprobs_need_the_whole_prompt_computed(cluster: Any) -> None:
    async with cluster(decode=2, poll_interval_s=0.01) as c:
        first = await turn(c, TURN_1)
        await loaded(first.decode, 20)
        asked = await turn(c, TURN_2, prompt_logprobs=1)
        assert asked.decode is not first.decode
        assert asked.told is None


async def test_holder_is_left_when_it_has_much_more_to_do(cluster: Any) -> None:
    """Field case 42: the conversation moves, and takes its history along."""
    async with cluster(decode=2, poll_interval_s=0.01) as c:
        first = await turn(c, TURN_1)
        for load, stays in ((4, True), (5, False)):
            await loaded(first.decode, load)
            second = await turn(c, TURN_2)
            assert (second.decode is first.decode) is stays
            assert second.told == first.kept(100)


async def test_restarted_engine_has_nothing(cluster: Any) -> None:
    """Field case 10: an ended life's entries are dropped; an earlier turn that another engine keeps is found
    instead."""
    async with cluster(decode=2, poll_interval_s=0.01) as c:
        first = await turn(c, TURN_1)
        await loaded(first.decode, 20)
        second = await turn(c, TURN_2)
        assert second.decode is not first.decode
        await second.decode.restart()
        await loaded(second.decode, 0)
        assert (await turn(c, TURN_3)).told == first.kept(100)


async def test_answered_by_a_later_attempt(cluster: Any) -> None:
    """The turn is kept under the key of the leg that answered."""
    async with cluster(decode=2) as c:
        c.d.script = held
        request = c.start(
            c.chat_body(messages=TURN_1), path="/v1/chat/completions", headers={"x-kvhandoff-path": "push"}
        )
        leg = await soon(c.d.legs.get())
        await c.d.kill()
        assert (await soon(request))[0] == 200
        done = Turn(c, "")
        assert done.decode is c.decode[1]
        kept = done.kept()
        assert kept.key == HandoffKey(leg.ticket.key.handoff_id, 1)
        assert (await turn(c, TURN_2)).told == kept


async def test_client_that_leaves_in_the_answer_may_come_back(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = gated_stream
        async with c.session.post(
            c.url + "/v1/chat/completions", json=c.chat_body(messages=TURN_1, stream=True)
        ) as response:
            await soon(response.content.readany())
            response.close()
        await soon(c.d.cancelled.get())
        await c.at_rest()
        left = Turn(c, "")
        c.d.script = decode
        assert (await turn(c, TURN_2)).told == left.kept()


async def test_request_that_failed_is_not_remembered(cluster: Any) -> None:
    async with cluster() as c:
        c.d.script = failing(400)
        status, _ = await c.post(c.chat_body(messages=TURN_1), path="/v1/chat/completions")
        assert status == 400
        c.d.script = decode
        while c.d.legs.qsize() + c.p.legs.qsize():
            (c.d if c.d.legs.qsize() else c.p).legs.get_nowait()
        assert (await turn(c, TURN_2)).told is None
