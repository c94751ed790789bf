"""Which turn of a conversation may use what a decode engine has answered about the last one."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.router.upstream_engines import (
    PULL_PREFILL,
    UpstreamCluster,
    UpstreamLeg,
    UpstreamMock,
    upstream_cluster,
)

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "hello"}
AGAIN = {"role": "user", "content": "and then?"}


async def turn(c: UpstreamCluster, **fields: Any) -> UpstreamLeg:
    """The prefill leg of one request."""
    status, _ = await c.post(**fields)
    assert status == 200
    return await c.p.leg()


def kept(c: UpstreamCluster, leg: UpstreamLeg) -> bool:
    """Whether the leg was given the decode engine's reference; else it has upstream's empty one."""
    reference = {"do_remote_prefill": False, "do_remote_decode": True, **c.d.reference}
    assert leg.params in (reference, PULL_PREFILL)
    return leg.params == reference


async def test_the_next_turn_gets_it_once() -> None:
    async with upstream_cluster() as c:
        assert not kept(c, await turn(c, chat=True))
        messages = [ASKED, ANSWERED, AGAIN]
        assert kept(c, await turn(c, chat=True, messages=messages))
        # Consumed: the engine has freed the blocks. The same request again is computed.
        assert not kept(c, await turn(c, chat=True, messages=messages))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "HI"}, ANSWERED, AGAIN],
        [ASKED, {"role": "assistant", "content": "hell"}, AGAIN],
        [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}, AGAIN],
        [{"role": "system", "content": "be brief"}, ASKED, ANSWERED, AGAIN],
        [AGAIN],
    ],
    ids=["edited question", "edited answer", "answer in parts", "new system message", "another conversation"],
)
async def test_an_edited_history_gets_none(messages: list[Any]) -> None:
    async with upstream_cluster() as c:
        await turn(c, chat=True, conversation_id="c")
        assert not kept(c, await turn(c, chat=True, messages=messages, conversation_id="c"))


@pytest.mark.parametrize(
    "field", [{"cache_salt": "other"}, {"tools": []}, {"chat_template_kwargs": {"x": 1}}]
)
async def test_what_shapes_the_prompt_otherwise_gets_none(field: dict[str, Any]) -> None:
    async with upstream_cluster() as c:
        await turn(c, chat=True)
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN], **field))


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [1]},
        {"tool_choice": "none"},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
        {"add_special_tokens": False},
    ],
)
async def test_what_shapes_the_prompt_has_to_be_equal(field: dict[str, Any]) -> None:
    messages = [ASKED, ANSWERED, AGAIN]
    (name,) = field
    async with upstream_cluster() as c:
        await turn(c, chat=True, **field)
        assert not kept(c, await turn(c, chat=True, messages=messages))
        assert not kept(c, await turn(c, chat=True, messages=messages, **{name: "another"}))
        assert kept(c, await turn(c, chat=True, messages=messages, **field))


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize(
    "field",
    [
        {"truncate_prompt_tokens": 8},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"skip_special_tokens": False},
        {"of_a_later_vllm": 1},
    ],
)
async def test_what_may_cut_the_prompt_gets_none(field: dict[str, Any], later: bool) -> None:
    """Equal in both turns it does so in another place of the prompt."""
    async with upstream_cluster() as c:
        await turn(c, chat=True, **({} if later else field))
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN], **field))


async def test_an_answer_that_echoes_its_prompt_is_not_kept() -> None:
    async with upstream_cluster() as c:
        await turn(c, conversation_id="c", echo=True)
        assert not kept(c, await turn(c, prompt="a prompthello and more", conversation_id="c"))
        assert not kept(c, await turn(c, prompt="a prompthello and more", conversation_id="c", echo=True))


async def test_how_the_answer_is_sampled_does_not_matter() -> None:
    async with upstream_cluster() as c:
        await turn(c, chat=True, temperature=0, seed=1, stop=["."], user="u", max_tokens=3)
        assert kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN], top_p=0.5, logprobs=True))


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def answering(choice: dict[str, Any], **message: Any) -> Any:
    """A decode engine's usual answer, with these fields added to its choice and its message."""

    async def script(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
        reference = {"do_remote_prefill": False, "do_remote_decode": True, **engine.reference}
        answer = leg.whole("hello", reference)
        answer["choices"][0] |= choice
        answer["choices"][0]["message"] |= message
        return web.json_response(answer)

    return script


@pytest.mark.parametrize(
    "added",
    [{"tool_calls": CALLS}, {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"refusal": "no"}, {"new": 1}],
)
async def test_an_answer_that_is_more_than_text_is_not_kept(added: dict[str, Any]) -> None:
    """The client may send it back, edit it, or leave it out: all of these are other prompts."""
    async with upstream_cluster() as c:
        c.d.script = answering({}, **added)
        for answered in (ANSWERED, ANSWERED | added, ANSWERED | {"tool_calls": []}):
            await turn(c, chat=True)
            assert not kept(c, await turn(c, chat=True, messages=[ASKED, answered, AGAIN]))


async def test_empty_fields_of_an_answer_are_none() -> None:
    async with upstream_cluster() as c:
        c.d.script = answering({"stop_reason": 2}, tool_calls=[], reasoning=None, refusal=None)
        await turn(c, chat=True)
        assert kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN]))


async def test_text_that_ended_the_answer_has_been_computed_too() -> None:
    async with upstream_cluster() as c:
        c.d.script = answering({"stop_reason": "END"})
        await turn(c, chat=True)
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN]))


@pytest.mark.parametrize("added", [{"name": "bob"}, {"tool_calls": CALLS}, {"reasoning_content": "hm"}])
async def test_an_answer_sent_back_with_more_is_another(added: dict[str, Any]) -> None:
    async with upstream_cluster() as c:
        await turn(c, chat=True)
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED | added, AGAIN]))


async def test_the_decode_engine_with_the_history_is_chosen_again() -> None:
    async with upstream_cluster(n_decode=3) as c:
        await turn(c, chat=True)
        await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN])
        assert [engine.legs.qsize() for engine in c.decode] == [2, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "name", "used"),
    [
        ("a prompthello and more", "c", True),
        ("a prompthello", "c", False),  # nothing new to compute
        ("a promptHello and more", "c", False),
        ("a prompthello and more", "d", False),
        ("a prompthello and more", None, False),
    ],
)
async def test_completions_need_a_name_and_the_same_beginning(
    prompt: str, name: str | None, used: bool
) -> None:
    async with upstream_cluster() as c:
        await turn(c, conversation_id="c")
        named = {} if name is None else {"conversation_id": name}
        assert kept(c, await turn(c, prompt=prompt, **named)) is used


@pytest.mark.parametrize(("asked", "used"), [(True, True), (False, False)], ids=["told", "not told"])
async def test_token_ids_need_those_of_the_answer(asked: bool, used: bool) -> None:
    async with upstream_cluster() as c:
        await turn(c, prompt=[1, 2], conversation_id="c", return_token_ids=asked)
        assert kept(c, await turn(c, prompt=[1, 2, *b"hello", 9], conversation_id="c")) is used


async def test_token_ids_that_differ_get_none() -> None:
    async with upstream_cluster() as c:
        await turn(c, prompt=[1, 2], conversation_id="c", return_token_ids=True)
        assert not kept(c, await turn(c, prompt=[1, 3, *b"hello", 9], conversation_id="c"))


async def test_a_streamed_answer_has_no_place_for_it() -> None:
    async with upstream_cluster() as c:
        await c.stream(conversation_id="c")
        await c.p.leg()
        assert not kept(c, await turn(c, prompt="a prompthello and more", conversation_id="c"))


async def test_it_ends_with_the_engines_time() -> None:
    now = [100.0]
    async with upstream_cluster(clock=lambda: now[0], reference_s=480.0) as c:
        await turn(c, chat=True)
        now[0] += 480.0
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN]))


async def test_none_is_kept_when_it_is_not_wanted() -> None:
    async with upstream_cluster(keep_references=False) as c:
        await turn(c, chat=True)
        assert not kept(c, await turn(c, chat=True, messages=[ASKED, ANSWERED, AGAIN]))


async def test_the_oldest_go_first() -> None:
    async with upstream_cluster(max_conversations=1) as c:
        await turn(c, conversation_id="c")
        await turn(c, conversation_id="d")
        assert not kept(c, await turn(c, prompt="a prompthello!", conversation_id="c"))
