"""Prompts to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from kvhandoff.core.errors import invalid
from kvhandoff.embedded.chat import template_messages
from kvhandoff.embedded.limits import check_token_ids
from kvhandoff.embedded.openai import ChatBody, CompletionBody
from kvhandoff.embedded.params import check_length
from kvhandoff.embedded.text import TextProcessor

MAX_SEQUENCES = 1024
"""Prompts × n in one body."""

INLINE_BYTES = 4096
"""Tokenizing so much takes about as long (1 ms) as a thread's turn; more goes to a thread."""


def split(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body, each a text or token ids. Raises RequestError for anything else."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        allowed = "a string, an array of strings, an array of token ids, or an array of such arrays"
        raise invalid("prompt", prompt, allowed)
    if type(prompt[0]) is int:
        return [_token_ids("prompt", prompt)]
    if len(prompt) * body.choices > MAX_SEQUENCES:
        raise invalid("prompt", f"{len(prompt)} prompts × {body.choices}", f"at most {MAX_SEQUENCES}")
    return [_one_of_several(index, item) for index, item in enumerate(prompt)]


def _one_of_several(index: int, item: Any) -> str | list[int]:
    where = f"prompt[{index}]"
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(where, item)
    # The first item decides what the array holds: after one prompt come others, not token ids.
    number = "" if index else ", a token id"
    raise invalid(where, item, f"a string{number} or an array of token ids")


def _token_ids(where: str, items: list[Any]) -> list[int]:
    """Checks that they are whole numbers; the range is checked once the length is known to fit."""
    if set(map(type, items)) <= {int}:  # without a loop in Python: there may be millions
        return items
    index = next(index for index, item in enumerate(items) if type(item) is not int)
    raise invalid(f"{where}[{index}]", items[index], "a token id, a whole number, in an array of token ids")


class PromptReader:
    """Turns what a client sent into token ids that the engine can run. All errors are RequestErrors."""

    def __init__(self, text: TextProcessor, max_model_len: int, executor: Executor) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._executor = executor

    async def chat(self, body: ChatBody, size: int) -> list[int]:
        """The conversation through the chat template. `size`: bytes of the whole body."""
        messages = template_messages(body.messages)

        def work() -> list[int]:
            text = self._text.render_chat(messages, body.template_variables)
            # Templates write the special tokens themselves.
            return self._encode(text, bool(body.add_special_tokens), body.input_field)

        return self.checked(await self._run(work, size), body.input_field)

    async def completion(self, body: CompletionBody, prompt: str | list[int], size: int) -> list[int]:
        """One prompt of a completion. `size`: bytes of the whole body."""
        if isinstance(prompt, list):
            return self.checked(prompt, body.input_field)

        def work() -> list[int]:
            return self._encode(prompt, body.add_special_tokens is not False, body.input_field)

        token_ids = await self._run(work, size)
        if not token_ids:
            raise invalid(body.input_field, prompt, "a text of at least one token")
        return self.checked(token_ids, body.input_field)

    def checked(self, token_ids: Sequence[int], field: str) -> list[int]:
        """The token ids, if the model can take them."""
        # The length first: a huge prompt is refused without a look at its tokens.
        check_length(len(token_ids), self._max_model_len, field)
        check_token_ids(field, token_ids, self._text.vocab_size)
        return list(token_ids)

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        # A text far too long is refused by its size: tokenizing megabytes takes seconds.
        at_least = len(text.encode()) // self._text.max_token_bytes
        check_length(at_least, self._max_model_len, field, at_least=True)
        return self._text.encode(text, add_special_tokens=add_special_tokens)

    async def _run(self, work: Callable[[], list[int]], size: int) -> list[int]:
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
