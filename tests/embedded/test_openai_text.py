"""Tokenizing, templates, incremental detokenization and stop strings."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.embedded.chat import Message, template_messages
from kvhandoff.embedded.detokenize import Detokenizer, StopMatcher, StopStrings, TokenBytes
from kvhandoff.embedded.openai import ChatBody, CompletionBody
from kvhandoff.embedded.prompts import PromptReader
from kvhandoff.embedded.text import SamplingDefaults, TextProcessor
from tests.tinymodels import VOCAB_SIZE, cached_tiny_model

TEXTS = [
    "The capital of France is Paris.",
    " leading and trailing ",
    "Grüße aus Köln, 你好，世界！ 👩‍👩‍👧‍👦 \U0001f680",
    "<|im_start|>user\nspecial tokens in the text<|im_end|>\n",
    "tabs\tnewlines\r\n\n   runs   of    spaces",
    "e\u0301 combining, \u00a0 nbsp, \ufffd itself",
    "",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return cached_tiny_model("llama")


@cache
def loaded_text() -> TextProcessor:
    return TextProcessor.load(cached_tiny_model("llama"))


@pytest.fixture(scope="module")
def text() -> TextProcessor:
    return loaded_text()


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def sentencepiece_like(*, strip: bool = True) -> Tokenizer:
    """A tokenizer the way Llama 2 and Gemma have it: `▁` for spaces, bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh.é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("b", "c"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


# -- equality with transformers ---------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", TEXTS)
def test_encodes_as_transformers(text: TextProcessor, reference: Any, prompt: str) -> None:
    for special in (True, False):
        expected = reference(prompt, add_special_tokens=special).input_ids
        assert text.encode(prompt, add_special_tokens=special) == expected


@pytest.mark.smollm2
@pytest.mark.parametrize("prompt", TEXTS)
def test_encodes_as_transformers_smollm2(prompt: str) -> None:
    from kvhandoff.embedded.models import resolve_model

    directory = resolve_model("smollm2")
    text, reference = TextProcessor.load(directory), AutoTokenizer.from_pretrained(directory)
    expected = reference(prompt).input_ids
    assert text.encode(prompt, add_special_tokens=True) == expected
    assert text.decode(expected, skip_special=False) == reference.decode(expected) == prompt
    messages = [{"role": "user", "content": prompt}]
    rendered = text.render_chat(messages, {"add_generation_prompt": True})
    ids = reference.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert text.encode(rendered, add_special_tokens=False) == ids


async def test_adds_bos_as_transformers(model_dir: Path, tmp_path: Path) -> None:
    """The BOS that the tokenizer's own settings ask for, and none in front of a rendered chat."""
    directory = tmp_path / "bos"
    shutil.copytree(model_dir, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    text, reference = TextProcessor.load(directory), AutoTokenizer.from_pretrained(directory)
    expected = reference("Numbers: 1 2 3").input_ids
    assert expected[0] == 1
    assert len(expected) > 4
    assert text.encode("Numbers: 1 2 3", add_special_tokens=True) == expected
    assert text.encode("Numbers: 1 2 3", add_special_tokens=False) == expected[1:]

    with ThreadPoolExecutor(1) as executor:
        reader = PromptReader(text, 512, executor)
        completion = CompletionBody()
        assert await reader.completion(completion, "Numbers: 1 2 3", 0) == expected
        bare = CompletionBody(add_special_tokens=False)
        assert await reader.completion(bare, "Numbers: 1 2 3", 0) == expected[1:]
        ids = await reader.chat(ChatBody(messages=[Message(role="user", content="hi")]), 0)
        chat = reference.apply_chat_template(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True
        ).input_ids
        assert ids == chat
        assert ids[:2] != [1, 1]


def test_renders_chat_as_transformers(text: TextProcessor, reference: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße!"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "more"},
    ]
    for add_prompt in (True, False):
        rendered = text.render_chat(messages, {"add_generation_prompt": add_prompt})
        ids = reference.apply_chat_template(messages, add_generation_prompt=add_prompt).input_ids
        assert text.encode(rendered, add_special_tokens=False) == ids
        assert rendered.endswith("assistant\n") is add_prompt


def test_past_tool_calls_are_rendered(text: TextProcessor) -> None:
    """By a template that adds the content to other texts, though the message has none."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [
        Message(role="user", content="hi"),
        Message(role="assistant", content=None, tool_calls=[call]),
        Message(role="tool", content="2", tool_call_id="1"),
    ]
    rendered = text.render_chat(template_messages(asked), {})
    assert [line for line in rendered.split("<|im_end|>\n") if "assistant" in line] == [
        "<|im_start|>assistant\n"
    ]


# -- what a model directory says --------------------------------------------------------------------------


def edited(model_dir: Path, tmp_path: Path, **files: str | None) -> Path:
    """A copy of the model with some files replaced, or removed (None). `_` in a name stands for a dot."""
    directory = tmp_path / "edited"
    shutil.copytree(model_dir, directory)
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    return directory


def test_no_chat_template(model_dir: Path, tmp_path: Path) -> None:
    text = TextProcessor.load(edited(model_dir, tmp_path, chat_template__jinja=None))
    assert not text.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        text.render_chat([{"role": "user", "content": "hi"}], {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_template_that_refuses(model_dir: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    text = TextProcessor.load(edited(model_dir, tmp_path, chat_template__jinja=template))
    with pytest.raises(RequestError, match="roles must alternate"):
        text.render_chat([{"role": "user", "content": "hi"}], {})


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content.__class__.__mro__ }}", "{{ 1 // 0 }}", "{{ messages[9].role.x }}"]
)
def test_template_that_breaks(model_dir: Path, tmp_path: Path, template: str) -> None:
    """Neither the interpreter's insides nor a crash: an error of the request."""
    text = TextProcessor.load(edited(model_dir, tmp_path, chat_template__jinja=template))
    with pytest.raises(RequestError, match="chat template refuses"):
        text.render_chat([{"role": "user", "content": "hi"}], {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template__jinja": "{% for %}"}, "chat template"),
        ({"generation_config__json": '{"temperature": -1}'}, r"generation_config.*temperature"),
        ({"generation_config__json": "[]"}, "generation_config.json: got list"),
        ({"config__json": "{"}, "config.json"),
        ({"tokenizer__json": None, "tokenizer_config__json": None}, "tokenizer"),
    ],
)
def test_unusable_model_directory(
    model_dir: Path, tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TextProcessor.load(edited(model_dir, tmp_path, **files))


def test_unsupported_decoder() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(tokenizer)


def test_sampling_defaults(model_dir: Path, tmp_path: Path, text: TextProcessor) -> None:
    assert text.defaults == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=None)
    assert text.vocab_size == VOCAB_SIZE
    given_config = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7, "do_sample": false}'
    edited_text = TextProcessor.load(edited(model_dir, tmp_path, generation_config__json=given_config))
    assert edited_text.defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=7)


def test_penalties_of_the_model_are_named(caplog: pytest.LogCaptureFixture) -> None:
    SamplingDefaults.from_generation_config({"repetition_penalty": 1.1, "min_p": 0})
    assert [record.args for record in caplog.records] == [("repetition_penalty", 1.1)]


# -- detokenization ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=40), st.booleans())
def test_pieces_are_the_decoding(token_ids: list[int], skip_special: bool) -> None:
    """Any token ids, garbage bytes and special tokens among them."""
    text = loaded_text()
    detokenizer = text.detokenizer(skip_special=skip_special)
    expected = text._tokenizer.decode(token_ids, skip_special_tokens=skip_special)
    assert "".join(pieces_of(detokenizer, token_ids)) == expected


@given(st.text())
def test_pieces_are_whole_characters(sample: str) -> None:
    text = loaded_text()
    pieces = pieces_of(text.detokenizer(skip_special=False), text.encode(sample, add_special_tokens=False))
    assert "".join(pieces) == sample
    if "\ufffd" not in sample:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(text: TextProcessor) -> None:
    token_ids = text.encode("🚀x", add_special_tokens=False)
    assert len(token_ids) == 5
    pieces = pieces_of(text.detokenizer(skip_special=True), token_ids)
    assert pieces == ["", "", "", "🚀", "x", ""]
    assert pieces_of(text.detokenizer(skip_special=True), token_ids[:2]) == ["", "", "\ufffd"]


def test_special_tokens_show_only_on_demand(text: TextProcessor) -> None:
    token_ids = text.encode("a<|im_end|>b", add_special_tokens=False)
    assert "".join(pieces_of(text.detokenizer(skip_special=True), token_ids)) == "ab"
    assert "".join(pieces_of(text.detokenizer(skip_special=False), token_ids)) == "a<|im_end|>b"


@given(st.text(alphabet="abcdefgh. éü🚀<0x41>", max_size=30), st.booleans())
def test_sentencepiece_pieces_are_the_decoding(sample: str, strip: bool) -> None:
    tokenizer = sentencepiece_like(strip=strip)
    table = TokenBytes(tokenizer)
    token_ids = tokenizer.encode(sample).ids
    pieces = pieces_of(Detokenizer(table, at_start=True), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert table.strips_first_space is strip


def test_sentencepiece_completion_keeps_its_first_space() -> None:
    """A completion goes on where the prompt ended: `The` + `▁a` is `The a`."""
    tokenizer = sentencepiece_like()
    token_ids = tokenizer.encode("a").ids
    assert tokenizer.decode(token_ids) == "a"
    assert "".join(pieces_of(Detokenizer(TokenBytes(tokenizer)), token_ids)) == " a"


# -- stop strings -----------------------------------------------------------------------------------------


def cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The reference: the stop string that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few = st.text(alphabet="ab·", max_size=5)


@given(st.lists(few, max_size=15), st.lists(few.filter(bool), min_size=1, max_size=4), st.booleans())
def test_stop_strings_cut_as_in_the_whole_text(parts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include=include)
    shown, found = "", None
    for part in parts:
        sure, found = matcher.feed(part)
        shown += sure
        if found is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, found) == cut("".join(parts), stops, include=include)


@given(st.lists(few, max_size=15), st.lists(few.filter(bool), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_held(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    read = shown = ""
    for part in parts:
        sure, found = matcher.feed(part)
        read, shown = read + part, shown + sure
        if found is not None:
            return
        held = read[len(shown) :]
        open_prefixes = [
            p for stop in stops for p in (stop[:i] for i in range(len(stop))) if read.endswith(p)
        ]
        assert held == max(open_prefixes, key=len)


def test_unarmed_matcher_lets_stop_strings_pass() -> None:
    matcher = StopMatcher(StopStrings(["end"]))
    assert matcher.feed("the end, e", armed=False) == ("the end, ", None)
    assert matcher.feed("nd!") == ("", "end")
