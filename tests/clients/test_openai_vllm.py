"""The `openai` Python client and vLLM engines: tools, and answers of a form, which embedded ones refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.deployment import Deployment, running
from tests.vllm.environment import find

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CHOICE: Any = {"type": "function", "function": {"name": "weather"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


ALIKE: Any = {"extra_body": {"top_k": 1, "ignore_eos": True}}
"""Greedy, but not called so: vLLM refuses several greedy answers, since they are one."""


class Place(BaseModel):
    """The form of an answer."""

    city: str
    inhabitants: int


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    environment = find()
    if environment.python is None:
        pytest.skip(f"no vLLM: {environment.why_not}")
    arguments = ["--engine", "vllm", "--vllm-command", str(environment.vllm), "--path", "pull"]
    arguments += ["--", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with running(tmp_path_factory.mktemp("vllm"), *arguments) as deployment:
        yield deployment


@pytest.fixture
def create(up: Deployment, record_property: Callable[[str, object], None]) -> Any:
    record_property("client", "openai (Python), vLLM engines")
    record_property("version", openai.__version__)
    api = openai.OpenAI(base_url=up.api, api_key="none", max_retries=0)

    def ask(**fields: Any) -> Any:
        return api.chat.completions.create(
            **({"model": up.model, "messages": QUESTION, "max_tokens": 60} | fields)
        )

    return ask


def test_forced_tool_call(up: Deployment, create: Any) -> None:
    asked = {"tools": [WEATHER], "tool_choice": CHOICE, "temperature": 0, "max_tokens": 300}
    answer = create(**asked)
    assert answer.choices[0].message.tool_calls, answer
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    record = up.record(answer.id)
    assert (record["path"], record["kv_source"]) == ("pull", "transferred")

    pieces = [
        piece.function
        for chunk in create(**asked, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    assert "".join(piece.name or "" for piece in pieces) == "weather"
    arguments = "".join(piece.arguments or "" for piece in pieces)
    assert json.loads(arguments) == json.loads(call.function.arguments)  # vLLM lays them out differently
    assert len(pieces) > 2


def test_form_of_an_answer(create: Any) -> None:
    question = [{"role": "user", "content": "Name a city and how many inhabitants it has, as JSON."}]
    schema = {"name": "place", "schema": Place.model_json_schema(), "strict": True}
    answer = create(
        messages=question, response_format={"type": "json_schema", "json_schema": schema}, temperature=0
    )
    Place.model_validate_json(answer.choices[0].message.content)
    free = create(messages=question, response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)
    assert free.choices[0].message.content.lstrip().startswith("{")


def test_choices_logprobs_and_usage(create: Any) -> None:
    answer = create(n=2, logprobs=True, top_logprobs=2, temperature=1, max_tokens=5, **ALIKE)
    assert [len(choice.logprobs.content) for choice in answer.choices] == [5, 5]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(create(stream=True, stream_options={"include_usage": True}, max_tokens=5, **ALIKE))
    assert chunks[-1].usage.completion_tokens == 5


def test_errors(create: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        create(temperature=-1)
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        create(temperature=0, n=2)
    with pytest.raises(openai.BadRequestError):
        create(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}})
