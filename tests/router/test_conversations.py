"""The index of conversations: names, bounds, and accounts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router.body import parse_body, summarize
from kvhandoff.router.conversations import Conversations, Names, names_of
from kvhandoff.router.endpoints import Endpoint
from tests.router.engines import key_of
from tests.router.test_body import JSON

CHAT = Endpoint.CHAT
D = Identity(EngineId("d"), Epoch("1"))


def names(
    headers: dict[str, str] | None = None, *, endpoint: Endpoint = Endpoint.CHAT, **fields: Any
) -> Names:
    parsed = parse_body(msgspec.json.encode({"model": "m", **fields}))
    return names_of(parsed, CIMultiDict(headers or {}), summarize(parsed, endpoint))


def named(conversation: object) -> Names:
    """Of a completion, whose prompt doesn't name it."""
    return names(endpoint=Endpoint.COMPLETIONS, conversation_id=conversation)


def history(handoff_id: str, source: Identity = D) -> HistoryRef:
    return HistoryRef(key=key_of(handoff_id), source=source, control_address="tcp://h:1", n_tokens=4096)


def account(handoff_id: str, engine: Identity = D, **fields: Any) -> LegRecord:
    values = {"attempt": 0, "leg": "decode"} | fields
    return LegRecord(handoff_id=handoff_id, engine_id=engine.engine_id, epoch=engine.epoch, **values)


def everybody(life: Identity) -> bool:
    return True


def test_a_header_may_have_any_bytes() -> None:
    """The bytes of a header that are no UTF-8 come as lone surrogates."""
    got = names({"x-session-id": "\udce9"}, endpoint=Endpoint.COMPLETIONS)
    assert got.explicit is not None
    others = [names({"x-session-id": text}, endpoint=Endpoint.COMPLETIONS) for text in ("\udcea", "é", "?")]
    assert got not in others


def test_longest_beginning_first() -> None:
    index = Conversations(10)
    index.remember(names(messages=["a"]), history("1"))
    index.remember(names(messages=["a", "b"]), history("2"))
    assert index.find(names(messages=["a", "b", "c"]), everybody) == history("2")
    assert index.find(names(messages=["a", "x", "c"]), everybody) == history("1")
    assert index.find(names(messages=["a", "b"]), everybody) == history("1")
    assert index.find(names(messages=["a"]), everybody) is None
    assert index.find(names(messages=["x", "a", "b"]), everybody) is None


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "s"},
        {"model": "n"},
        {"messages": ["a", "bc"]},
        {"messages": [["a", "b"], "c"]},
        {"messages": ["b", "a", "c"]},
    ],
)
def test_what_tells_conversations_apart(other: dict[str, Any]) -> None:
    index = Conversations(10)
    index.remember(names(messages=["a", "b"]), history("1"))
    asked = {"messages": ["a", "b", "c"]}
    assert index.find(names(**asked), everybody) == history("1")
    assert index.find(names(**asked | other), everybody) is None


def test_a_response_s_input_names_its_conversation() -> None:
    turn = names(endpoint=Endpoint.RESPONSES, input=["a", "b"])
    index = Conversations(10)
    index.remember(turn, history("1"))
    found = names(endpoint=Endpoint.RESPONSES, input=["a", "b", "c", "d"])
    assert index.find(found, everybody) == history("1")
    assert not names(endpoint=Endpoint.RESPONSES, input="a")  # no list of items to begin another one
    assert not names(endpoint=Endpoint.RESPONSES, messages=["a"])


def test_salt_and_name_do_not_run_together() -> None:
    one = names(cache_salt="a", conversation_id="bc")
    assert one.explicit != names(cache_salt="ab", conversation_id="c").explicit
    assert one.explicit == names(cache_salt="a", prompt_cache_key="bc").explicit


def test_the_most_particular_name_is_taken() -> None:
    body = {"conversation_id": "1", "prompt_cache_key": "5"}
    headers = {"X-Session-ID": "2", "X-Session-Affinity": "3", "X-Correlation-ID": "4"}
    for number, name in enumerate(["conversation_id", *headers, "prompt_cache_key"], start=1):
        wanted = names(conversation_id=str(number)).explicit
        assert names(headers, **body).explicit == wanted
        body.pop(name, None)
        headers.pop(name, None)
    assert names(headers, **body).explicit is None


def test_no_name() -> None:
    assert not names(endpoint=Endpoint.COMPLETIONS)
    assert not names(endpoint=Endpoint.COMPLETIONS, messages=["a"], conversation_id="")
    assert not named(7)
    assert not names(messages=7)
    assert names(messages=["a"])


@settings(deadline=None)  # the machine may be busy
@given(JSON, JSON, JSON, st.sampled_from(Endpoint))
def test_any_types(messages: Any, conversation: Any, salt: Any, endpoint: Endpoint) -> None:
    made = names(endpoint=endpoint, messages=messages, conversation_id=conversation, cache_salt=salt)
    assert (made.explicit is not None) is (isinstance(conversation, str) and conversation != "")
    assert len(made.messages) == (
        len(messages) if endpoint is Endpoint.CHAT and isinstance(messages, list) else 0
    )


def test_bounded_and_least_recently_used_first() -> None:
    index = Conversations(3)
    for number in range(3):
        index.remember(named(str(number)), history(str(number)))
    assert index.find(named("0"), everybody) == history("0")
    index.remember(named("3"), history("3"))
    found = [index.find(named(str(n)), everybody) is not None for n in range(4)]
    assert found == [True, False, True, True]
    for number in range(100):
        index.remember(names(messages=[number], conversation_id=str(number)), history(str(number)))
    assert len(index) == 3


def test_ended_lives_are_dropped() -> None:
    index = Conversations(10)
    other = Identity(EngineId("e"), Epoch("1"))
    index.remember(names(messages=["a"]), history("1", other))
    index.remember(names(messages=["a", "b"]), history("2"))
    asked = names(messages=["a", "b", "c"])
    assert index.find(asked, lambda life: life == other) == history("1", other)
    assert len(index) == 1
    assert index.find(asked, everybody) == history("1", other)


def test_accounts() -> None:
    index = Conversations(10)
    index.remember(names(messages=["a"]), history("1"))
    asked = names(messages=["a", "b"])
    # Of another life, of another leg, of another turn: none of them says anything of this one.
    index.account(account("1", Identity(EngineId("d"), Epoch("2"))))
    index.account(account("1", leg="prefill"))
    index.account(account("1", attempt=1))
    index.account(account("2"))
    assert index.find(asked, everybody) == history("1")
    index.account(account("1", retained_tokens=48))
    found = index.find(asked, everybody)
    assert found is not None
    assert found.n_tokens == 48
    index.account(account("1", retained_tokens=0))
    assert index.find(asked, everybody) is None


def test_a_later_turn_takes_the_name() -> None:
    index = Conversations(10)
    name = named("1")
    index.remember(name, history("1"))
    index.remember(name, history("2"))
    assert index.find(name, everybody) == history("2")
