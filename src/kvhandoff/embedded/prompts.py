"""Prompts to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kvhandoff.core.errors import invalid
from kvhandoff.embedded.chat import template_messages
from kvhandoff.embedded.openai import ChatBody, CompletionBody
from kvhandoff.embedded.params import check_length
from kvhandoff.embedded.text import TextProcessor

INLINE_BYTES = 4096
"""Tokenizing so much takes about as long (1 ms) as a thread's turn; more goes to a thread."""


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

        return self.checked(await self._run(work, size), body.input_field)

    def checked(self, token_ids: Sequence[int], field: str) -> list[int]:
        """The token ids, if the model can take them."""
        if not token_ids:
            raise invalid(field, token_ids, "at least one token")
        check_length(len(token_ids), self._max_model_len, field)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._text.vocab_size:
                raise invalid(field, token_id, f"token ids 0 to {self._text.vocab_size - 1}")
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
