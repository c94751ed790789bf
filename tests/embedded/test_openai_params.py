"""What valid bodies ask the engine for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhandoff.core.errors import RequestError
from kvhandoff.embedded.openai import ChatBody, CompletionBody, parse
from kvhandoff.embedded.params import sampling_params, sibling_seed
from kvhandoff.embedded.prompts import split
from kvhandoff.embedded.text import SamplingDefaults
from tests.tinymodels import VOCAB_SIZE

USER = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=100)


def asked(kind: Any, defaults: SamplingDefaults = DEFAULTS, prompt_tokens: int = 10, **fields: Any) -> Any:
    required = {"messages": USER} if kind is ChatBody else {"prompt": "hi"}
    body = parse(json.dumps(required | fields).encode(), kind, model_vocab=VOCAB_SIZE)
    return sampling_params(body, prompt_tokens=prompt_tokens, max_model_len=512, defaults=defaults)


def test_defaults_come_from_the_model() -> None:
    plain = SamplingDefaults()
    chat = asked(ChatBody, plain)
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.top_k) == (502, 1.0, 1.0, 0)
    assert asked(CompletionBody, plain).max_tokens == 16
    assert asked(CompletionBody, plain, prompt_tokens=505).max_tokens == 7
    chat = asked(ChatBody)
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.top_k) == (100, 0.6, 0.9, 20)
    assert asked(ChatBody, prompt_tokens=500).max_tokens == 12
    mine = asked(ChatBody, temperature=0, top_p=1, top_k=0, max_tokens=200)
    assert (mine.max_tokens, mine.temperature, mine.top_p, mine.top_k) == (200, 0, 1, 0)


def test_fields_reach_the_engine() -> None:
    params = asked(
        CompletionBody,
        min_tokens=2,
        max_tokens=9,
        seed=7,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=2,
        top_k=-1,
        temperature=0.001,
    )
    assert (params.min_tokens, params.max_tokens, params.seed) == (2, 9, 7)
    assert (params.stop_token_ids, params.ignore_eos) == ((3, 4), True)
    assert (params.logprobs, params.prompt_logprobs, params.top_k) == (5, 2, 0)
    assert params.temperature == 0.01


def test_token_limits_of_chat() -> None:
    """Field case 31: either field, both, or none."""
    assert asked(ChatBody, max_completion_tokens=50).max_tokens == 50
    assert asked(ChatBody, max_tokens=60).max_tokens == 60
    assert asked(ChatBody, max_completion_tokens=50, max_tokens=60).max_tokens == 50


def test_room_for_the_answer() -> None:
    """Prompt and answer fill the context to the last token, and no further."""
    assert asked(ChatBody, prompt_tokens=500, max_tokens=12).max_tokens == 12
    with pytest.raises(RequestError, match=r"13 > 512 - 500") as caught:
        asked(ChatBody, prompt_tokens=500, max_tokens=13)
    assert caught.value.code == "context_length_exceeded"
    assert asked(ChatBody, prompt_tokens=511).max_tokens == 1
    with pytest.raises(RequestError, match="has 512 input tokens"):
        asked(ChatBody, prompt_tokens=512)


def test_logprobs_asked_for() -> None:
    assert asked(ChatBody).logprobs is None
    assert asked(ChatBody, logprobs=False).logprobs is None
    assert asked(ChatBody, logprobs=True).logprobs == 0
    assert asked(ChatBody, logprobs=True, top_logprobs=4).logprobs == 4
    assert asked(CompletionBody, logprobs=0).logprobs == 0
    assert asked(CompletionBody, echo=True).prompt_logprobs is None
    assert asked(CompletionBody, echo=True, logprobs=3).prompt_logprobs == 3
    assert asked(CompletionBody, echo=True, logprobs=3, prompt_logprobs=5).prompt_logprobs == 5
    assert asked(CompletionBody, echo=True, max_tokens=0, logprobs=1).max_tokens == 1


def test_sibling_seeds() -> None:
    assert [sibling_seed(5, index) for index in range(3)] == [5, 6, 7]
    assert sibling_seed(2**63 - 1, 1) == -(2**63)
    assert sibling_seed(None, 1) is None


def test_prompt_forms() -> None:
    def prompts(prompt: Any) -> Any:
        return split(parse(json.dumps({"prompt": prompt}).encode(), CompletionBody, model_vocab=9))

    assert prompts("hi") == ["hi"]
    assert prompts(["hi", "there"]) == ["hi", "there"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert prompts(["hi", [3]]) == ["hi", [3]]
