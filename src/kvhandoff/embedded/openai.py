"""Request bodies of the OpenAI API with vLLM's additions: typed, checked, and turned into sampling.

Fields that nobody knows are ignored, as vLLM does. Fields that would change the answer and aren't supported
are refused, unless their value has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from kvhandoff.core.errors import RequestError, excerpt, invalid
from kvhandoff.core.fields import misfit
from kvhandoff.embedded.chat import Message
from kvhandoff.web import decode_json

# Ranges, each in words too, for errors. `check` refuses max_tokens of 0 except for an echo.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number, 0 or more, below 2^31")]
MaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number, 1 or more, below 2^31")]
Temperature = Annotated[float, Meta(ge=0, description="a number, 0 (greedy) or more")]
TopP = Annotated[float, Meta(gt=0, le=1, description="a number, more than 0, up to 1")]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="a whole number below 2^31, 0 or -1 for all")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number, -2^63 to 2^63 - 1")]
Choices = Annotated[int, Meta(ge=1, le=128, description="a whole number, 1 to 128")]
Logprobs = Annotated[int, Meta(ge=0, le=20, description="a whole number, 0 to 20")]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Field: its values that have no effect. Null has none anywhere.
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "structural_tag": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}
_CHAT_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
_COMPLETION_UNSUPPORTED: dict[str, tuple[object, ...]] = {"suffix": ("",), "prompt_embeds": ([],)}
_NO_TEMPLATE_VARIABLES = {
    # Arguments of apply_chat_template that decide how it works, and are not for clients.
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
}


class StreamOptions(msgspec.Struct):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED
    input_field: ClassVar[str]
    """The field that holds the prompt, for messages."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    """0 and -1 keep all."""
    seed: Seed | None = None
    n: Choices | None = None
    best_of: int | None = None
    stop: str | Annotated[list[StopString], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """`n`."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage event."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(field, value) of the most tokens to generate."""
        return "max_tokens", self.max_tokens

    def check(self, model_vocab: int) -> None:
        """Rules between fields. Raises RequestError."""
        field, limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > max(limit, 1):
            raise invalid("min_tokens", self.min_tokens, f"at most {field} ({limit})")
        if self.stop == "":
            raise invalid("stop", "", "a string that is not empty, or an array of such strings")
        if isinstance(self.stop, str) and len(self.stop) > 1024:
            raise invalid("stop", self.stop, "strings of at most 1024 characters")
        if self.best_of is not None and self.best_of != self.choices:
            raise invalid("best_of", self.best_of, f"the value of n ({self.choices}), which has no effect")
        if self.stream_options is not None and not self.stream:
            given = {
                name: value
                for name, value in msgspec.structs.asdict(self.stream_options).items()
                if value is not None
            }
            raise invalid("stream_options", given, "null unless stream is true")
        if self.stream and self.prompt_logprobs:
            raise invalid("prompt_logprobs", self.prompt_logprobs, "null when stream is true")
        for token_id in self.stop_token_ids or ():
            if token_id >= model_vocab:
                raise invalid("stop_token_ids", token_id, f"token ids from 0 to {model_vocab - 1}")


class ChatBody(Body, kw_only=True):
    """`POST /v1/chat/completions`."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED | _CHAT_UNSUPPORTED
    input_field: ClassVar[str] = "messages"

    messages: list[Message]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The newer field wins, as in vLLM."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Tokens to generate when the client doesn't say; None: as many as there is room for."""
        return None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives to report per generated token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """Alternatives to report per prompt token; None: no logprobs of the prompt."""
        return self.prompt_logprobs

    @property
    def echo(self) -> bool:
        """A chat answer never repeats the prompt."""
        return False

    @property
    def echo_only(self) -> bool:
        """Nor is it nothing but the prompt."""
        return False

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        continued = bool(self.continue_final_message)
        add_prompt = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        variables: dict[str, Any] = {
            "tools": self.tools or None,
            "documents": self.documents,
            "add_generation_prompt": add_prompt,
            "continue_final_message": continued,
        }
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})

    def check(self, model_vocab: int) -> None:
        super().check(model_vocab)
        for name in self.chat_template_kwargs or ():
            if name in _NO_TEMPLATE_VARIABLES:
                raise invalid("chat_template_kwargs", name, "variables of the chat template")
        field, limit = self.token_limit
        if limit == 0:
            raise invalid(field, 0, "1 or more")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", self.top_logprobs, "null or 0 unless logprobs is true")
        if self.tools and self.tool_choice != "none":
            raise invalid(
                "tools", self.tools, "no tools, or tool_choice 'none': tool calls are not supported"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", self.tool_choice, "'none': tool calls are not supported")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", True, "false when continue_final_message is true")


class CompletionBody(Body, kw_only=True):
    """`POST /v1/completions`."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED | _COMPLETION_UNSUPPORTED
    input_field: ClassVar[str] = "prompt"

    prompt: Any = None
    """A string, token ids, or an array of either; see `prompts.split`."""
    logprobs: Logprobs | None = None
    echo: bool | None = None

    @property
    def default_tokens(self) -> int | None:
        """OpenAI's default for this endpoint."""
        return 16

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives to report per generated token; None: no logprobs at all."""
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """Alternatives to report per prompt token; an echo with logprobs needs them too."""
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((value for value in wanted if value is not None), default=None)

    @property
    def echo_only(self) -> bool:
        """The prompt itself is all the client wants, mostly for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self, model_vocab: int) -> None:
        super().check(model_vocab)
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", 0, "1 or more (0 with echo)")


AnyBody = ChatBody | CompletionBody
SomeBody = TypeVar("SomeBody", ChatBody, CompletionBody)


def parse(raw: bytes, kind: type[SomeBody], *, model_vocab: int) -> SomeBody:
    """A request body, checked. Raises RequestError naming the field, its value and what is allowed."""
    fields = decode_json(raw)
    if not isinstance(fields, dict):
        raise invalid("body", fields, "a JSON object")
    _refuse_unsupported(fields, kind.unsupported)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        wrong = misfit(error, fields, kind)
        raise RequestError(wrong.message("body", excerpt), param=wrong.field or "body") from error
    body.check(model_vocab)
    return body


def _refuse_unsupported(fields: dict[str, Any], table: dict[str, tuple[object, ...]]) -> None:
    for name, neutral in table.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            shown = " or ".join(["null", *map(excerpt, neutral)])
            raise invalid(name, value, f"{shown}: this engine does not support it")
