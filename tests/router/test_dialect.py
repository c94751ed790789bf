"""What vLLM engines are sent differently, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvhandoff.router.body import parse_body
from kvhandoff.router.dialect import dialect_of
from kvhandoff.router.endpoints import Endpoint

IDS = msgspec.Raw(b"[1,2]")
TEXT: list[Any] = [
    {"role": "system", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": "hi"},
]


def decode(endpoint: Endpoint = Endpoint.CHAT, integration: Any = "vllm", **client: Any) -> dict[str, Any]:
    fields = parse_body(msgspec.json.encode(client))
    salt = client.get("cache_salt") or ""
    body = dialect_of(integration, endpoint).decode(fields, "h", salt if isinstance(salt, str) else "")
    return msgspec.json.decode(body.sealed("p.s", IDS))  # type: ignore[no-any-return]


def prefill(endpoint: Endpoint = Endpoint.CHAT, integration: Any = "vllm", **client: Any) -> dict[str, Any]:
    fields = parse_body(msgspec.json.encode(client))
    body = dialect_of(integration, endpoint).prefill(fields, "h", "", "p.s")
    return msgspec.json.decode(body)  # type: ignore[no-any-return]


def forwards(**client: Any) -> bool:
    return "prompt_token_ids" in decode(**client)["kv_transfer_params"]


def test_a_chat_of_text_takes_token_ids() -> None:
    assert decode(messages=TEXT)["kv_transfer_params"] == {"ticket": "p.s", "prompt_token_ids": [1, 2]}
    assert forwards(messages=TEXT, echo=False, truncate_prompt_tokens=None)
    assert forwards(messages=[{"role": "user", "content": ["a", {"type": "refusal", "refusal": "no"}]}])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "something_new"},
        {"image_url": "data:"},
    ],
)
def test_media_are_rendered_by_both(part: Any) -> None:
    """The ids stand for the place of the media, not for what they show."""
    content = [{"type": "text", "text": "what is this?"}, part]
    assert not forwards(messages=[*TEXT, {"role": "user", "content": content}])


@pytest.mark.parametrize(
    "field",
    [
        {"echo": True},
        {"truncate_prompt_tokens": 5},
        {"return_token_offsets": True},
        {"return_prompt_text": True},
    ],
)
def test_what_needs_the_messages_rendered(field: dict[str, Any]) -> None:
    assert not forwards(messages=TEXT, **field)
    assert "prompt_token_ids" in decode(integration="embedded", messages=TEXT, **field)["kv_transfer_params"]


@pytest.mark.parametrize("messages", [None, 5, "hi", [5], [{"content": 7}], [{"content": {"a": 1}}]])
def test_odd_messages_are_left_to_the_engine(messages: Any) -> None:
    assert not forwards(messages=messages)


def test_a_completion_s_prompt_stays_what_the_client_wrote() -> None:
    made = decode(Endpoint.COMPLETIONS, prompt="hi", echo=True)
    assert made == {"prompt": "hi", "echo": True, "kv_transfer_params": {"ticket": "p.s"}}


def test_a_seed_is_for_the_answer() -> None:
    assert "seed" not in prefill(messages=TEXT, seed=5)
    assert decode(messages=TEXT, seed=5)["seed"] == 5
    assert prefill(integration="embedded", messages=TEXT, seed=5)["seed"] == 5


def test_the_response_format_may_be_in_the_prompt() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a"}}
    assert prefill(messages=TEXT, response_format=schema)["response_format"] == schema
    assert "response_format" not in prefill(integration="embedded", messages=TEXT, response_format=schema)


@pytest.mark.parametrize(
    ("integration", "given", "sent"),
    [("vllm", "a", "a"), ("vllm", "", None), ("vllm", 5, 5), ("embedded", "", ""), ("embedded", "a", "a")],
)
def test_salt(integration: Any, given: Any, sent: Any) -> None:
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        assert decode(endpoint, integration, cache_salt=given).get("cache_salt") == sent


def test_the_ticket_s_salt_wins() -> None:
    fields = parse_body(b'{"cache_salt":"client"}')
    for body in (
        dialect_of("vllm", Endpoint.CHAT).prefill(fields, "h", "ticket", "p.s"),
        dialect_of("vllm", Endpoint.CHAT).decode(fields, "h", "ticket").sealed("p.s", None),
    ):
        assert msgspec.json.decode(body)["cache_salt"] == "ticket"
    assert fields == {"cache_salt": msgspec.Raw(b'"client"')}


def test_a_response_is_named_in_its_body() -> None:
    assert prefill(Endpoint.RESPONSES, request_id="mine")["request_id"] == "resp_h"
    assert decode(Endpoint.RESPONSES, request_id="mine")["request_id"] == "resp_h"
    assert "request_id" not in decode(Endpoint.CHAT, request_id="mine")


def test_without_a_ticket() -> None:
    fields = parse_body(b'{"prompt":["a","b"],"cache_salt":"s","kv_transfer_params":{"a":1}}')
    body = dialect_of("vllm", Endpoint.COMPLETIONS).decode(fields, "h", "s").sealed(None, None)
    assert msgspec.json.decode(body) == {"prompt": ["a", "b"], "cache_salt": "s"}
