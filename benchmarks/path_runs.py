"""What is asked of a deployment: rounds in which contestants take turns, with prompts that share nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Literal, NamedTuple

from benchmarks.deployment import Answer, Deployment, Question
from benchmarks.path_figures import require
from benchmarks.report import in_turn
from kvhandoff.router.policy import Path

PATHS: tuple[Path, ...] = ("pull", "push", "local")
"""The others are compared with the first."""
Return = Literal["off", "on"]
RETURNS: tuple[Return, ...] = ("off", "on")

TRAIN_TOKENS = 8000
"""Prompt tokens of one train, about: of long prompts it has fewer."""
TRAIN = (2, 4)
"""Requests of a train: at least, at most."""
MAX_TOKENS = 4
"""Of a measured answer: more than one, should the first token alone be no text."""
ANSWER_TOKENS = 16
"""Of a conversation's first turn."""
NEW_TOKENS = 100
"""Of a conversation's second turn, after the history."""


class Cell(NamedTuple):
    """One comparison of the paths."""

    tokens: int
    rate: float | None
    """Requests a second, sent whether or not those before have been answered; None: lone ones."""

    @property
    def requests(self) -> int:
        """Requests of one round and path."""
        if self.rate is None:
            return 1
        least, most = TRAIN
        return min(most, max(least, TRAIN_TOKENS // self.tokens))


class Prompts:
    """Random tokens."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._ids = range(vocab_size // 50, vocab_size)  # special tokens come first
        self._conversations = count()

    def fresh(self, tokens: int) -> list[int]:
        """So many that nobody has seen."""
        return self._rng.choices(self._ids, k=tokens)

    def conversation(self) -> str:
        """A new one's name."""
        return f"conversation-{next(self._conversations)}"


def warm_up(served: Deployment, prompts: Prompts, tokens: int) -> None:
    """One request of each path: connections are up, and the peers' memory is mapped."""
    for path in PATHS:
        require(served.ask(Question(prompt=prompts.fresh(tokens), path=path, max_tokens=MAX_TOKENS)), path)


def measure_paths(
    served: Deployment, prompts: Prompts, cell: Cell, rounds: int, advance: Callable[[], None]
) -> dict[Path, list[Answer]]:
    """The answers by path, in the order that they were asked for.

    Raises RuntimeError when a lone request was not served as asked. One of a train may have fallen back.
    """
    answers: dict[Path, list[Answer]] = {path: [] for path in PATHS}
    for turn in range(rounds):
        for path in in_turn(PATHS, turn):
            questions = [
                Question(prompt=prompts.fresh(cell.tokens), path=path, max_tokens=MAX_TOKENS)
                for _ in range(cell.requests)
            ]
            answers[path] += served.train(questions, 1 / cell.rate if cell.rate else 0.0)
            if cell.rate is None:
                require(answers[path][-1], path)
            advance()
    return answers


def measure_return(
    served: Deployment, prompts: Prompts, history: int, rounds: int, advance: Callable[[], None]
) -> dict[Return, list[Answer]]:
    """The answers of second turns, in the order that they were asked for: one of each kind after the same
    first turn, whose prompt and answer have `history` tokens.

    Raises RuntimeError when one was not served as asked; when the history came back though it should not; and
    when not all of its full blocks did.
    """
    answers: dict[Return, list[Answer]] = {choice: [] for choice in RETURNS}
    for turn in range(rounds):
        conversation, prompt = prompts.conversation(), prompts.fresh(history - ANSWER_TOKENS)
        first = Question(
            prompt=prompt, path="pull", max_tokens=ANSWER_TOKENS, conversation=conversation, fetch=True
        )
        transcript = prompt + served.answer_tokens(first)
        for choice in in_turn(RETURNS, turn):
            question = Question(
                prompt=transcript + prompts.fresh(NEW_TOKENS),
                path="pull",
                max_tokens=MAX_TOKENS,
                conversation=conversation,
                fetch=choice == "on",
            )
            answer = require(served.ask(question), "pull")
            _check_returned(answer, served.setup.kept(history) if choice == "on" else 0)
            answers[choice].append(answer)
            advance()
    return answers


def _check_returned(answer: Answer, expected: int) -> None:
    returned = answer.record.reused_tokens.returned
    if returned != expected:
        raise RuntimeError(f"{returned} tokens of the history came back, not {expected}: {answer.record}")
