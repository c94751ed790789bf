"""What conversations are called: what tells them apart, and what does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvhandoff.core.errors import RequestError
from kvhandoff.router.body import parse_body, summarize
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.names import MOST_NAMES, Names, key_of_names, names_of
from tests.router.test_body import JSON

COMPLETIONS, RESPONSES = Endpoint.COMPLETIONS, Endpoint.RESPONSES


def names(
    headers: dict[str, str] | None = None,
    *,
    endpoint: Endpoint = Endpoint.CHAT,
    tenant: str = "",
    key: bytes = b"",
    **fields: Any,
) -> Names:
    return names_in(msgspec.json.encode({"model": "m", **fields}), headers, endpoint, tenant, key)


def names_in(
    body: bytes,
    headers: dict[str, str] | None = None,
    endpoint: Endpoint = Endpoint.CHAT,
    tenant: str = "",
    key: bytes = b"",
) -> Names:
    parsed = parse_body(body)
    return names_of(parsed, CIMultiDict(headers or {}), summarize(parsed, endpoint), tenant=tenant, key=key)


def of_message(message: object, endpoint: Endpoint = Endpoint.CHAT) -> bytes:
    """The fingerprint of this message alone."""
    [fingerprint] = names(endpoint=endpoint, **{endpoint.input_field: [message]}).messages
    return fingerprint


def user(content: object, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def text(words: str, kind: str = "text", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "text": words, **fields}


# ---- the client's own names ----


def test_a_header_may_have_any_bytes() -> None:
    """The bytes of a header that are no UTF-8 come as lone surrogates."""
    got = names({"x-session-id": "\udce9"}, endpoint=COMPLETIONS)
    assert got.explicit is not None
    others = [names({"x-session-id": text}, endpoint=COMPLETIONS) for text in ("\udcea", "é", "?")]
    assert got not in others


def test_the_most_particular_name_is_taken() -> None:
    body = {"conversation_id": "1", "prompt_cache_key": "5"}
    headers = {"X-Session-ID": "2", "X-Session-Affinity": "3", "X-Correlation-ID": "4"}
    for number, name in enumerate(["conversation_id", *headers, "prompt_cache_key"], start=1):
        wanted = names(conversation_id=str(number)).explicit
        assert names(headers, **body).explicit == wanted
        body.pop(name, None)
        headers.pop(name, None)
    assert names(headers, **body).explicit is None


@pytest.mark.parametrize("field", ["conversation_id", "prompt_cache_key"])
@pytest.mark.parametrize("wrong", [7, [], {"a": 1}, False])
def test_a_name_that_is_no_text_is_refused(field: str, wrong: object) -> None:
    with pytest.raises(RequestError, match=rf"{field}: got .*, allowed is a string or null") as refused:
        names(**{field: wrong})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_no_name() -> None:
    assert not names(endpoint=COMPLETIONS)
    assert not names(endpoint=COMPLETIONS, messages=["a"], conversation_id="")
    assert not names(endpoint=COMPLETIONS, conversation_id=None)
    assert not names(messages=7)
    assert not names(messages="a")
    assert not names(endpoint=RESPONSES, messages=["a"])
    assert names(messages=["a"])


# ---- what tells conversations apart ----


BELONGS: list[dict[str, Any]] = [
    {"tenant": "t"},
    {"cache_salt": "s"},
    {"model": "n"},
    {"key": b"k"},
]


@pytest.mark.parametrize("other", BELONGS)
def test_no_name_is_anothers(other: dict[str, Any]) -> None:
    """Field case 61: of another tenant, salt, model or cluster."""
    asked = {"messages": ["a", "b"], "conversation_id": "c"}
    mine, theirs = names(**asked), names(**(asked | other))
    assert not {mine.explicit, *mine.messages} & {theirs.explicit, *theirs.messages}
    assert theirs == names(**(asked | other))


def test_tenant_salt_and_name_do_not_run_together() -> None:
    one = names(tenant="a", cache_salt="b", conversation_id="cd")
    assert one.explicit != names(tenant="ab", conversation_id="cd").explicit
    assert one.explicit != names(tenant="a", cache_salt="bc", conversation_id="d").explicit
    assert one.explicit == names(tenant="a", cache_salt="b", prompt_cache_key="cd").explicit


def test_clusters_have_keys_of_their_own() -> None:
    assert key_of_names(b"one") != key_of_names(b"another")
    assert len(key_of_names(b"x" * 1000)) == 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user("b")),
        (user("a"), {"role": "assistant", "content": "a"}),
        (user("a"), user("a", name="n")),
        (user("a"), user([text("a"), text("")])),
        (user([text("a"), text("b")]), user([text("ab")])),
        (user([text("a"), text("b")]), user([text("b"), text("a")])),
        (user([{"type": "image_url", "image_url": {"url": "1"}}]), user([{"type": "image_url"}])),
        ({"role": "tool", "tool_call_id": "1", "content": "a"}, {"role": "tool", "content": "a"}),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "g", "arguments": "{}"}}]},
        ),
        (user('","name":"n'), user("", name="n")),
        (user(0), user(None)),
        (user(False), user(None)),
        ("a", ["a"]),
        (user("x" * 100_000), user("x" * 99_999 + "y")),
    ],
)
def test_messages_that_differ(one: object, other: object) -> None:
    assert of_message(one) != of_message(other)


def test_order_and_borders_of_messages() -> None:
    last = {names(messages=m).messages[-1] for m in (["a", "b"], ["b", "a"], ["a", "bc"], [["a", "b"]])}
    assert len(last) == 4


# ---- what does not ----


@pytest.mark.parametrize(
    "same",
    [
        user([text("hi")]),
        user([text("hi", "input_text")]),
        user([text("hi", cache_control={"type": "ephemeral"})]),
        user("hi", cache_control={"type": "ephemeral"}),
        user("hi", name=None, tool_calls=[], refusal=None),
        user("hi", id="msg_1", status="completed", type="message"),
        {"content": "hi", "role": "user"},
    ],
)
def test_a_message_in_other_words_of_json(same: object) -> None:
    """Clients, and what stands before them, write one message in several ways."""
    assert of_message(same) == of_message(user("hi"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"h\xc3\xa9 \\"x\\""}]}',
        b'{ "messages" : [ { "content" : "h\\u00e9 \\"x\\"" ,\n "role":\t"user" } ], "model":"m"}',
    ],
)
def test_spaces_escapes_and_the_order_of_keys(body: bytes) -> None:
    assert names_in(body).messages == names(messages=[user('hé "x"')]).messages


@pytest.mark.parametrize(
    "same",
    [
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}], "content": None, "function_call": None},
        {"role": "assistant", "tool_calls": [{"id": "1"}], "content": "", "reasoning_content": "so"},
    ],
)
def test_an_answer_that_is_a_call(same: object) -> None:
    assert of_message(same) == of_message({"role": "assistant", "content": [], "tool_calls": [{"id": "1"}]})


def test_several_parts_may_carry_marks() -> None:
    """Clients move the mark of the cache to the newest message with each turn."""
    marked = [text("a"), text("b", cache_control={"type": "ephemeral"})]
    assert of_message(user(marked)) == of_message(user([text("a"), text("b")]))


def test_a_responses_input() -> None:
    """One text, or items; an answer given back as it came, or in short; without its reasoning, or with it."""
    first = names(endpoint=RESPONSES, input="hi")
    assert first.messages == names(endpoint=RESPONSES, input=[user("hi")]).messages
    answered = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text("ho", "output_text", annotations=[], logprobs=[])],
    }
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("hm")]}
    whole = names(endpoint=RESPONSES, input=[user("hi"), thought, answered, user("and?")])
    short = [user([text("hi", "input_text")]), {"role": "assistant", "content": "ho"}, user("and?")]
    assert whole.messages[-1] == names(endpoint=RESPONSES, input=short).messages[-1]
    assert first.messages[-1] in whole.of_former_turns()


def test_a_long_message_is_taken_by_its_bytes() -> None:
    message = user("x" * 70_000)
    assert of_message(message) == of_message(dict(message))
    # A hint is all that is lost.
    assert of_message(message) != of_message(user([text("x" * 70_000)]))


# ---- bounds ----


def test_former_turns_are_bounded() -> None:
    made = names(messages=[user(str(n)) for n in range(3000)], conversation_id="c")
    asked = list(made.of_former_turns())
    assert asked == [*made.messages[-2 : -2 - MOST_NAMES : -1], made.explicit]
    assert asked[0] == made.messages[2998]
    assert len(asked) == MOST_NAMES + 1
    few = names(messages=["a", "b", "c"])
    assert list(few.of_former_turns()) == [few.messages[1], few.messages[0]]


@settings(max_examples=300)
@given(st.text(), st.text())
def test_a_plain_message_is_called_like_one_with_fields_that_do_not_count(role: str, content: str) -> None:
    """The one is read by a shorter way than the other."""
    plain = {"role": role, "content": content}
    assert (
        of_message(plain) == of_message(plain | {"id": "x"}) == of_message({"content": content, "role": role})
    )


@pytest.mark.parametrize(
    "messages",
    [b"[1e999]", b'["\xff"]', b'["a", {"content": 1e999}]', b'{"a": 1}'],
)
def test_what_cannot_be_read_has_no_fingerprints(messages: bytes) -> None:
    made = names_in(b'{"model":"m","messages":' + messages + b"}")
    assert (made.messages, list(made.of_this_turn())) == ((), [])


@given(JSON, JSON, JSON, st.sampled_from(Endpoint))
def test_any_types(messages: Any, conversation: Any, salt: Any, endpoint: Endpoint) -> None:
    if conversation is not None and not isinstance(conversation, str):
        with pytest.raises(RequestError, match=r"conversation_id: got .*, allowed is a string or null"):
            names(endpoint=endpoint, conversation_id=conversation)
        conversation = None
    made = names(endpoint=endpoint, messages=messages, conversation_id=conversation, cache_salt=salt)
    assert (made.explicit is not None) is bool(conversation)
    assert len(made.messages) == (
        len(messages) if endpoint is Endpoint.CHAT and isinstance(messages, list) else 0
    )


@given(st.lists(JSON, min_size=1))
def test_any_messages(messages: list[Any]) -> None:
    """Each beginning has the name that it has alone, whatever it is."""
    made = names(messages=messages).messages
    assert made == tuple(names(messages=messages[: n + 1]).messages[-1] for n in range(len(messages)))
