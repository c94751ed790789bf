"""Response bodies and stream events, as OpenAI and vLLM send them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvhandoff.core.ids import completion_id
from kvhandoff.embedded.api import TokenLogprob
from kvhandoff.embedded.generation import Piece, Run, TokenAt
from kvhandoff.embedded.openai import AnyBody, ChatBody
from kvhandoff.embedded.text import TextProcessor

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM's stand-in."""

_encode = msgspec.json.Encoder().encode


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


class Answer:
    """The response to one request: all at once, or event by event."""

    def __init__(self, body: AnyBody, runs: Sequence[Run], text: TextProcessor, model: str) -> None:
        self._body = body
        self._runs = runs
        self._text = text
        self._chat = isinstance(body, ChatBody)
        self._model = model
        self._id = completion_id(runs[0].leg.handoff_id, chat=self._chat)
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The body of a response that is not streamed, from all pieces in any order of choices."""
        choices: dict[int, Piece] = {}
        for piece in pieces:
            if piece.index in choices:
                choices[piece.index].extend(piece)
            else:
                choices[piece.index] = piece
        body = self._envelope("chat.completion" if self._chat else "text_completion")
        body["choices"] = [self._whole_choice(choices[index]) for index in sorted(choices)]
        body["usage"] = self.usage()
        if self._chat:
            body |= self._prompt_details(self._runs[0])
        return body

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events of some pieces. A chat choice's first one is preceded by its role."""
        return b"".join([self._events(piece) for piece in pieces])

    def last_events(self) -> bytes:
        """The usage event, if asked for, and the end of the stream."""
        if not self._body.include_usage:
            return DONE
        chunk = self._envelope("chat.completion.chunk" if self._chat else "text_completion")
        return event(chunk | {"choices": [], "usage": self.usage()}) + DONE

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once for all its choices."""
        prompt = sum(len(run.token_ids) for run in self._runs)
        completion = sum(run.completion_tokens for run in self._runs)
        cached = sum(run.leg.cached_tokens() for run in self._runs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _run_of(self, piece: Piece) -> Run:
        return self._runs[piece.index // self._body.choices]

    def _prompt_details(self, run: Run) -> dict[str, Any]:
        """What vLLM adds about the prompt: in a chat's envelope, in a completion's choices."""
        details: dict[str, Any] = {}
        if self._body.return_token_ids:
            details["prompt_token_ids"] = list(run.token_ids)
        if self._body.prompt_logprobs is not None and run.prompt_logprobs is not None:
            details["prompt_logprobs"] = [
                None if logprob is None else self._ranked(logprob) for logprob in run.prompt_logprobs
            ]
        return details

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        if self._chat:
            content = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
            return self._choice(piece, content)
        return self._choice(piece, {"text": piece.text}) | self._prompt_details(self._run_of(piece))

    def _events(self, piece: Piece) -> bytes:
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        if not self._chat:
            choice = self._choice(piece, {"text": piece.text})
            if first:
                choice |= self._prompt_details(self._run_of(piece))
            return event(self._chunk("text_completion", choice))
        chunk = self._chunk("chat.completion.chunk", self._choice(piece, {"delta": {"content": piece.text}}))
        if not first:
            return event(chunk)
        role = self._choice(Piece(piece.index), {"delta": {"role": "assistant", "content": ""}})
        opening = self._chunk("chat.completion.chunk", role)
        return event(opening | self._prompt_details(self._runs[0])) + event(chunk)

    def _chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(kind) | {"choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = self.usage() if self._body.continuous_usage else None
        return chunk

    def _choice(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            **content,
            "logprobs": self._logprobs(piece.tokens) if piece.tokens else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, tokens: list[TokenAt]) -> dict[str, Any]:
        return self._chat_logprobs(tokens) if self._chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: list[TokenAt]) -> dict[str, Any]:
        content = []
        for token in tokens:
            if token.logprob is None:
                raise AssertionError("a chat answer has no prompt tokens")
            top = [self._token_entry(*each) for each in token.logprob.top]
            chosen = self._token_entry(token.token_id, token.logprob.logprob)
            content.append(chosen | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._text.token_bytes[token_id])
        return {"token": self._token_text(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": raw}

    def _completion_logprobs(self, tokens: list[TokenAt]) -> dict[str, Any]:
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [
                None if token.logprob is None else max(token.logprob.logprob, LEAST_LOGPROB)
                for token in tokens
            ],
            "tokens": [self._token_text(token.token_id) for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else self._top_by_text(token.logprob) for token in tokens
            ],
        }

    def _top_by_text(self, logprob: TokenLogprob) -> dict[str, float]:
        """The best alternatives, and the chosen token. Of tokens with equal text the likeliest stays."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._token_text(token_id), max(value, LEAST_LOGPROB))
        return top

    def _ranked(self, logprob: TokenLogprob) -> dict[str, Any]:
        """vLLM's form of a prompt token's logprobs: by token id, with rank."""
        entries = {logprob.token_id: (logprob.rank, logprob.logprob)}
        for rank, (token_id, value) in enumerate(logprob.top, 1):
            entries.setdefault(token_id, (rank, value))
        return {
            str(token_id): {
                "logprob": max(value, LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": self._text.token_bytes.text(token_id),
            }
            for token_id, (rank, value) in entries.items()
        }

    def _token_text(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._text.token_bytes.text(token_id)
