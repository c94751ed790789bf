"""Which turn of a conversation may use what a decode engine has answered about the last one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.upstream_engines import PULL_PREFILL, UpstreamCluster, UpstreamLeg, upstream_cluster

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
