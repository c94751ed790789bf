from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.errors import RequestError
from kvhandoff.router.body import check_stateless, parse_body, read_model, summarize
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary


def summary(endpoint: Endpoint = Endpoint.COMPLETIONS, **fields: Any) -> RequestSummary:
    return summarize(parse_body(msgspec.json.encode(fields)), endpoint)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"no json",
        b"[1]",
        b'"text"',
        b"null",
        b'{"a":1} x',
        b'{"a":[1,}',
        b'{"\xff":1}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_no_json_object(raw: bytes) -> None:
    with pytest.raises(RequestError, match="body: it must be a JSON object") as error:
        parse_body(raw)
    assert (error.value.status, error.value.param) == (400, "body")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (rb'{"a":"x\ud800"}', "half of a surrogate pair"),
        (rb'{"a":"x\udbffy"}', "half of a surrogate pair"),
        (rb'{"a":"\udc00"}', "half of a surrogate pair"),
        (rb'{"a":"\ud83d\ude00', "Input data was truncated"),
        (b'{"a', "Input data was truncated"),
        (b'{"\xff":1}', "it is not valid UTF-8"),
    ],
)
def test_text_that_is_no_unicode(raw: bytes, why: str) -> None:
    """It is told from a body that ends too early."""
    with pytest.raises(RequestError, match=rf"^body: it must be a JSON object \(.*{why}"):
        parse_body(raw)


def test_a_model_that_is_no_unicode() -> None:
    with pytest.raises(RequestError) as error:
        read_model(parse_body(b'{"model":"smollm2\xff"}'), "tiny")
    assert error.value.message == "model: got bytes that are not valid UTF-8, allowed is a string: tiny"


@given(st.binary(max_size=200))
def test_anything_is_parsed_or_refused(raw: bytes) -> None:
    try:
        fields = parse_body(raw)
    except RequestError:
        return
    for endpoint in Endpoint:
        assert isinstance(summarize(fields, endpoint), RequestSummary)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ["model", "prompt", "messages", "stream", "echo", "logprobs", "prompt_logprobs", "cache_salt"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(Endpoint))
def test_any_types_are_summarized(fields: dict[str, Any], endpoint: Endpoint) -> None:
    made = summary(endpoint, **fields)
    assert made.prompt_bound >= 0
    assert made.prompts >= 0
    assert made.stream is (fields.get("stream") is True)
    assert made.model == (fields["model"] if isinstance(fields.get("model"), str) else "")


@pytest.mark.parametrize(
    ("prompt", "prompts", "bound"),
    [
        ("hello", 1, 5),
        ("", 1, 0),
        ("é\n", 1, 3),  # bytes of the text, not of its JSON
        ("x" * 5000, 1, 5002),
        ([1, 2, 3], 1, 3),
        ([], 1, 0),
        (["one"], 1, 7),
        (["one", "two"], 2, 13),
        ([[1, 2], [3]], 2, 11),
        (5, 1, 0),
        (None, 1, 0),
    ],
)
def test_prompt(prompt: Any, prompts: int, bound: int) -> None:
    made = summary(prompt=prompt)
    assert (made.prompts, made.prompt_bound) == (prompts, bound)


def test_chat_counts_the_messages_json() -> None:
    messages = [{"role": "user", "content": "hi"}]
    made = summary(Endpoint.CHAT, messages=messages, prompt=["a", "b"])
    assert (made.prompts, made.prompt_bound) == (1, len(msgspec.json.encode(messages)))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 5}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "logprobs": None}, False),
        ({"echo": True}, False),
        ({"echo": False, "logprobs": 5}, False),
        ({"logprobs": 5}, False),
        ({}, False),
    ],
)
def test_prompt_logprobs(fields: dict[str, Any], wanted: bool) -> None:
    assert summary(**fields).prompt_logprobs is wanted


def test_a_chat_s_echo() -> None:
    assert summary(Endpoint.CHAT, echo=True).prompt_logprobs
    assert not summary(Endpoint.CHAT, echo=False, logprobs=True).prompt_logprobs


def test_rest() -> None:
    made = summary(model="m", stream=True, cache_salt="s")
    assert (made.model, made.stream, made.cache_salt) == ("m", True, "s")
    made = summary(model=5, stream="true", cache_salt=[])
    assert (made.model, made.stream, made.cache_salt) == ("", False, "")


def test_a_response_counts_its_input_and_instructions() -> None:
    made = summary(Endpoint.RESPONSES, input="hi", instructions="be kind", messages=["a"])
    assert (made.prompts, made.prompt_bound) == (1, len('"hi"') + len('"be kind"'))


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("previous_response_id", "resp_1", '"resp_1"'),
        ("background", True, "true"),
        ("conversation", {"id": "c"}, '{"id":"c"}'),
    ],
)
def test_what_needs_a_stored_response(field: str, value: Any, shown: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: got {shown}, allowed is null") as error:
        check_stateless(parse_body(msgspec.json.encode({field: value})))
    assert (error.value.status, error.value.param) == (400, field)
    for nothing in (None, False) if field == "background" else (None,):
        check_stateless(parse_body(msgspec.json.encode({field: nothing})))
