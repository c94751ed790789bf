"""The text side of a model directory: tokenizer, chat template, and what its generation_config asks for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jinja2
import msgspec
from msgspec import Meta

from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.embedded.detokenize import Detokenizer, TokenBytes

logger = logging.getLogger(__name__)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request gets for fields it leaves out. As in vLLM, the model's generation_config.json decides;
    what that leaves out too is temperature 1, top_p 1, all tokens."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1 keep all."""
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Caps the default length of chat answers."""

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> SamplingDefaults:
        """Only what the file says; `do_sample` has no say, as in vLLM. Raises ConfigError."""
        for name, neutral in (("repetition_penalty", 1.0), ("min_p", 0.0)):
            if config.get(name) not in (None, neutral):
                logger.warning(
                    "generation_config.json: %s %s is not supported and not applied", name, config[name]
                )
        given = {name: value for name, value in config.items() if value is not None}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"generation_config.json: {error}") from error


class TextProcessor:
    """Text to token ids and back, exactly as transformers does it. Thread-safe once made."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, defaults: SamplingDefaults) -> None:
        """`tokenizer`: a transformers tokenizer on the `tokenizers` library; ConfigError for any other.
        `vocab_size`: the model's."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"tokenizer: {type(tokenizer).__name__} is not supported; "
                "allowed are tokenizers of the `tokenizers` library (tokenizer.json)"
            )
        # A tokenizer.json may ask for truncation or padding; a prompt is served as it is.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self.vocab_size = vocab_size
        """Token ids of the model are 0 … vocab_size − 1."""
        self.defaults = defaults
        self.token_bytes = TokenBytes(backend)
        self.max_token_bytes = max(len(token.encode()) for token in backend.get_vocab())
        """No token stands for more bytes of text; so a text of b bytes has at least b / this many tokens."""
        self._check_template()

    @classmethod
    def load(cls, model_dir: Path) -> TextProcessor:
        """Read a model directory; nothing is downloaded and no code of the model's is run.

        Raises ConfigError for files that are missing or can't be used.
        """
        from transformers import AutoTokenizer

        try:
            # transformers builds many tokenizers anew from several files, so it does the reading.
            tokenizer = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"model {model_dir}: its tokenizer can't be loaded ({error})") from error
        config = _read_json(model_dir / "config.json")
        vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        generation = model_dir / "generation_config.json"
        defaults = SamplingDefaults.from_generation_config(
            _read_json(generation) if generation.exists() else {}
        )
        return cls(tokenizer, vocab_size=vocab_size or len(tokenizer), defaults=defaults)

    @property
    def has_chat_template(self) -> bool:
        """Whether the chat endpoint can be served."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Releases the GIL while it works."""
        # `encode` itself holds the GIL for the whole text; the batched form doesn't.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole prompt."""
        detokenizer = self.detokenizer(skip_special=skip_special, at_start=True)
        return "".join([detokenizer.feed(token_id) for token_id in token_ids]) + detokenizer.flush()

    def detokenizer(self, *, skip_special: bool, at_start: bool = False) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return Detokenizer(self.token_bytes, skip_special=skip_special, at_start=at_start)

    def render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt text of a conversation.

        `variables` are apply_chat_template's (add_generation_prompt, continue_final_message, tools,
        documents) and the template's own. Raises RequestError when there is no template, or when the
        template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "messages: this model has no chat template, so it can't take messages; "
                "allowed is /v1/completions with a prompt",
                param="messages",
                code="no_chat_template",
            )
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **variables))
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"messages: the model's chat template refuses them ({error})", param="messages"
            ) from error

    def _check_template(self) -> None:
        """Compile the template once, now: a broken one is the operator's to know, not the clients'."""
        if not self.has_chat_template:
            return
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template: {error}") from error
        except _TEMPLATE_ERRORS as error:
            logger.info("the chat template refuses a single user message: %s", error)


_TEMPLATE_ERRORS = (
    # A template is the model's own little program, run on the client's data: any of its errors is the
    # client's to read, `raise_exception('roles must alternate')` and a division by zero alike.
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: got {type(value).__name__}, allowed is a JSON object")
    return value
