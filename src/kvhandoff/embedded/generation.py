"""One HTTP request's sequences: from the engine's tokens to pieces of its answers.

Generation ─┬─ Run (a prompt and its leg) ─┬─ Choice 0   the leg's own sequence
            │                              └─ Choice 1…  siblings, once choice 0 has its first token
            └─ Run …
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from kvhandoff.core.errors import RequestError, unavailable
from kvhandoff.embedded.api import Agent, EngineRequest, Leg, SamplingParams, TokenLogprob, TokenOutput
from kvhandoff.embedded.detokenize import StopMatcher, StopStrings
from kvhandoff.embedded.openai import AnyBody
from kvhandoff.embedded.params import sibling_seed
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.web import ClientGone

MAX_BATCH = 256
"""Tokens put together into the pieces of one turn, so that no turn takes long."""

PromptLogprobs = tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TokenAt:
    """A token for the logprobs of an answer."""

    token_id: int
    logprob: TokenLogprob | None
    """None for the first token of a prompt."""
    offset: int
    """Characters of the choice's text before this token; before its first byte, if that is inside one."""


@dataclass(slots=True)
class Piece:
    """The next part of one choice: one token's, or several when the reader was behind."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenAt] = field(default_factory=list)
    """Empty unless logprobs were asked for."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    """The stop string, or the token id of `stop_token_ids`, that ended it."""

    def extend(self, later: Piece) -> None:
        """Put a later piece of the same choice behind this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class Run:
    """One prompt, its leg, and how it went."""

    leg: Leg
    prompt: str | None = None
    """As the client wrote it; None when it came as token ids or messages."""
    token_ids: Sequence[int] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.n_tokens for choice in self.choices)


@contextmanager
def open_leg(agent: Agent, kv_transfer_params: object | None) -> Iterator[Run]:
    """A leg that is finished exactly once, whatever happens: what still runs of it is aborted then.

    Raises BadTicket.
    """
    run = Run(agent.leg(kv_transfer_params))
    outcome: str | None = None
    try:
        yield run
        outcome = run.choices[0].finish_reason if run.choices else None
    except (asyncio.CancelledError, ClientGone):
        outcome = "abort"
        raise
    except Exception:
        outcome = "error"
        raise
    finally:
        run.leg.finished(outcome, run.completion_tokens)


class Choice:
    """One sequence of one prompt: detokenized, cut at its stop strings, counted."""

    def __init__(
        self, index: int, run: Run, body: AnyBody, text: TextProcessor, stops: StopStrings | None
    ) -> None:
        self.index = index
        self.run = run
        # Unique in the engine: the same handoff may come again while its last attempt is still ending.
        self.request_id = f"{run.leg.handoff_id}-{index}-{secrets.token_hex(4)}"
        self.n_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self._body = body
        self._text = text
        self._detokenizer = text.detokenizer(skip_special=body.skip_special_tokens is not False)
        self._show_stop = bool(body.include_stop_str_in_output)
        self._matcher = StopMatcher(stops, include=self._show_stop) if stops else None
        self._characters = 0
        self.begun = False

    def accept(self, output: TokenOutput) -> Piece:
        """The piece that this output adds. After it has a finish_reason the choice takes no more."""
        piece = Piece(self.index)
        if self._body.echo and not self.begun:
            self._repeat_prompt(piece)
        self.begun = True
        if self._body.echo_only:
            # The engine has to make a token; the client asked for none.
            piece.finish_reason = self.finish_reason = "length"
            return piece
        text = ""
        if output.token_id is not None:
            self.n_tokens += 1
            piece.token_ids.append(output.token_id)
            if output.logprob is not None:
                piece.tokens.append(TokenAt(output.token_id, output.logprob, self._characters))
            if output.stop_token is None or self._show_stop:
                text = self._detokenizer.feed(output.token_id)
        if output.finish_reason in ("stop", "length"):
            piece.finish_reason = output.finish_reason
            if output.stop_token in self.run.params.stop_token_ids:
                piece.stop_reason = output.stop_token
            text += self._detokenizer.flush()
        self._characters += len(text)
        if self._matcher is not None:
            text = self._match(text, piece, self._matcher)
        piece.text += text
        self.finish_reason = piece.finish_reason
        return piece

    def _match(self, text: str, piece: Piece, matcher: StopMatcher) -> str:
        # vLLM's rule: a stop string counts if it ends after the first `min_tokens` tokens.
        sure, stop = matcher.feed(text, armed=self.n_tokens > self.run.params.min_tokens)
        if stop is not None:
            piece.finish_reason, piece.stop_reason = "stop", stop
        elif piece.finish_reason is not None:
            sure += matcher.flush()
        return sure

    def _repeat_prompt(self, piece: Piece) -> None:
        run = self.run
        piece.text = run.prompt if run.prompt is not None else self._text.decode(run.token_ids)
        self._characters = len(piece.text)
        if run.prompt_logprobs is not None and self._body.top_logprobs_wanted is not None:
            detokenizer = self._text.detokenizer(skip_special=True, at_start=True)
            offset = 0
            for token_id, logprob in zip(run.token_ids, run.prompt_logprobs, strict=True):
                piece.tokens.append(TokenAt(token_id, logprob, offset))
                offset += len(detokenizer.feed(token_id))


class Generation:
    """All sequences of one HTTP request, read through one queue. Lives on the asyncio thread."""

    def __init__(self, body: AnyBody, runs: Sequence[Run], text: TextProcessor, *, silence_s: float) -> None:
        """`silence_s`: how long the engine may give no token at all before the request is given up."""
        self.runs = runs
        self._body = body
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._open: dict[str, Choice] = {}
        stops = StopStrings(body.stops) if body.stops else None
        for number, run in enumerate(runs):
            first = number * body.choices
            indices = range(first, first + body.choices)
            run.choices = [Choice(index, run, body, text, stops) for index in indices]
            self._open |= {choice.request_id: choice for choice in run.choices}

    def start(self) -> None:
        """Submit the first sequence of each prompt. Raises RequestError."""
        for run in self.runs:
            run.leg.submit(self._request(run.choices[0], run.params))

    async def pieces(self) -> list[Piece]:
        """What has come since the last call, at most one piece per choice; waits for something.

        Empty: all choices are complete. Raises RequestError when the engine ends a sequence with an error.
        """
        while self._open:
            merged: dict[int, Piece] = {}
            for output in await self._arrived():
                choice = self._open.get(output.request_id)
                if choice is None:
                    continue  # made after its stop string
                piece = self._accept(choice, output)
                if choice.index in merged:
                    merged[choice.index].extend(piece)
                else:
                    merged[choice.index] = piece
            if merged:
                return list(merged.values())
        return []

    def _accept(self, choice: Choice, output: TokenOutput) -> Piece:
        if output.error is not None:
            raise output.error
        if output.finish_reason in ("abort", "error"):
            raise unavailable("the engine ended this request before it was complete", code="engine_aborted")
        run = choice.run
        if output.prompt_logprobs is not None:
            run.prompt_logprobs = output.prompt_logprobs
        is_first = choice is run.choices[0] and not choice.begun
        piece = choice.accept(output)
        if choice.finish_reason is not None:
            del self._open[choice.request_id]
            if output.finish_reason is None:
                run.leg.abort(choice.request_id)
        if is_first:
            for sibling in run.choices[1:]:
                seed = sibling_seed(run.params.seed, sibling.index - choice.index)
                params = replace(run.params, seed=seed, prompt_logprobs=None)
                run.leg.submit_sibling(self._request(sibling, params))
            if output.token_id is not None:
                run.leg.first_token()
        return piece

    async def _arrived(self) -> list[TokenOutput]:
        """At least one output, and those that are there already, up to a bound."""
        if self._outputs.empty():
            try:
                async with asyncio.timeout(self._silence_s):
                    outputs = [await self._outputs.get()]
            except TimeoutError as error:
                raise RequestError(
                    f"the engine gave no token for {self._silence_s:g} s; the request is given up",
                    status=504,
                    code="engine_timeout",
                    kind="server_error",
                ) from error
        else:
            # A backlog, since the client was behind: the other requests get their turn in between.
            await asyncio.sleep(0)
            outputs = []
        while not self._outputs.empty() and len(outputs) < MAX_BATCH:
            outputs.append(self._outputs.get_nowait())
        return outputs

    def _request(self, choice: Choice, params: SamplingParams) -> EngineRequest:
        run = choice.run
        return EngineRequest(choice.request_id, run.token_ids, params, self._put, cache_salt=run.cache_salt)

    def _put(self, output: TokenOutput) -> None:
        """On the engine thread: hand the output over, never wait, never raise."""
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)
        except RuntimeError:
            # A closed loop has nobody left who reads.
            if not self._loop.is_closed():
                raise
