"""From records to figures: which of a request's seconds are put down to what.

A request's parts add up to its TTFT at the client. Each part is a sum of durations, every one of which one
process measured on its own clock; `rest` is the TTFT less all others. No two clocks are compared.

    part      pull                            push                           local
    queue     prefill_queue                   prefill_queue, of the leg      decode_queue
                                              beside
    return    return                          return, of the leg beside      return
    compute   prefill_compute                 prefill_compute, of the leg    recompute
                                              beside
    wait      prefill_offer, bind,            write_tail, detect             (none)
              decode_network,
              decode_tokenize, decode_queue,
              post, wire, claim, detect
    first     recompute, first_step           recompute, first_step          first_step
    rest      route, the prefill leg's network and tokenizing, the client's way to the router and back;
              pushed: the decode leg's network too, and two ways of messages: from the prefill engine's thread
              to the offer being complete, and of the commit to the decode engine

`wait` is the post-prefill wait: from the prompt's last chunk computed to the decode engine running the
request. `beyond` is all that comes on top of the prefill, wherever it was put down: wait + first + rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.deployment import Answer
from benchmarks.report import Goal, at_least, at_most, paired_ratio
from kvhandoff.core.phases import Phase
from kvhandoff.router.policy import Path
from kvhandoff.router.records import RequestRecord

PARTS = ("queue", "return", "compute", "wait", "first", "rest")
BEYOND = ("wait", "first", "rest")
PULL_WAIT = (
    Phase.PREFILL_OFFER,
    Phase.BIND,
    Phase.DECODE_NETWORK,
    Phase.DECODE_TOKENIZE,
    Phase.DECODE_QUEUE,
    Phase.POST,
    Phase.WIRE,
    Phase.CLAIM,
    Phase.DETECT,
)
PUSH_WAIT = (Phase.WRITE_TAIL, Phase.DETECT)
FIRST = (Phase.RECOMPUTE, Phase.FIRST_STEP)

EARLY_GOAL = 7 / 8
EARLY_CHUNKS = 8
"""The last chunk can't be early: of fewer chunks than these, less than EARLY_GOAL could be."""
WAIT_GOAL = 0.5
RETURN_GOAL = 5.0


def split(answer: Answer) -> dict[str, float]:
    """Seconds by part; they add up to the client's TTFT."""
    record = answer.record
    phases, prefill = record.phases, record.prefill_phases or record.phases
    if record.path == "local":
        parts = {
            "queue": _sum(phases, [Phase.DECODE_QUEUE]),
            "return": _sum(phases, [Phase.RETURN]),
            "compute": _sum(phases, [Phase.RECOMPUTE]),
            "wait": 0.0,
            "first": _sum(phases, [Phase.FIRST_STEP]),
        }
    else:
        parts = {
            "queue": _sum(prefill, [Phase.PREFILL_QUEUE]),
            "return": _sum(prefill, [Phase.RETURN]),
            "compute": _sum(prefill, [Phase.PREFILL_COMPUTE]),
            "wait": _sum(phases, PUSH_WAIT if record.path == "push" else PULL_WAIT),
            "first": _sum(phases, FIRST),
        }
    return parts | {"rest": answer.ttft_s - sum(parts.values())}


def _sum(phases: Mapping[str, float], names: Sequence[Phase]) -> float:
    return sum(phases.get(name, 0.0) for name in names)


def as_asked(record: RequestRecord, path: Path) -> bool:
    """Whether the request took this path to its end, and what it was to move was moved."""
    source = "local" if path == "local" else "transferred"
    return (record.status, record.path, record.attempts, record.kv_source) == (200, path, 1, source)


def require(answer: Answer, path: Path) -> Answer:
    """The same answer. Raises RuntimeError when its request was not served as asked."""
    if not as_asked(answer.record, path):
        raise RuntimeError(f"{path} was asked for, and this came of it: {answer.record}")
    return answer


def early_median(pushed: Sequence[Answer]) -> float:
    """The part of a pushed prompt's bytes that had landed before its last chunk was computed."""
    records = [answer.record for answer in pushed]
    return statistics.median(record.early_bytes / record.bytes for record in records)


@dataclass(frozen=True)
class Medians:
    """Of requests of one kind, in seconds."""

    ttft: float
    parts: dict[str, float]
    beyond: float
    phases: dict[str, float]
    """Every phase of the records; `beside.` those of a pushed prompt's prefill leg."""
    requests: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Medians:
        """A phase that a request has not is no time."""
        splits = [split(answer) for answer in answers]
        records = [
            answer.record.phases
            | {f"beside.{name}": value for name, value in answer.record.prefill_phases.items()}
            for answer in answers
        ]
        names = list(dict.fromkeys(name for phases in records for name in phases))
        return cls(
            ttft=statistics.median(answer.ttft_s for answer in answers),
            parts={part: statistics.median(each[part] for each in splits) for part in PARTS},
            beyond=statistics.median(sum(each[part] for part in BEYOND) for each in splits),
            phases={name: statistics.median(each.get(name, 0.0) for each in records) for name in names},
            requests=len(answers),
        )

    def detail(self, answers: Sequence[Answer], **what: Any) -> dict[str, Any]:
        """All of it, for the file, with every single TTFT."""
        singles = [round(answer.ttft_s, 6) for answer in answers]
        return {
            **what,
            "ttft_s": singles,
            "median_s": {"ttft": self.ttft, "beyond": self.beyond, **self.parts, **self.phases},
        }


def early_goal(tokens: int, chunk: int, pushed: Sequence[Answer]) -> Goal | None:
    """Of lone pushes of so many tokens; None for prompts of too few chunks to reach it."""
    if -(-tokens // chunk) < EARLY_CHUNKS:
        return None
    name = f"push, {tokens} tokens: part of the bytes moved before prefill ends"
    return at_least(name, early_median(pushed), EARLY_GOAL)


def wait_goal(tokens: int, pulled: Sequence[Answer], pushed: Sequence[Answer]) -> Goal:
    """Of lone requests of so many tokens, in the order of their rounds."""
    push, pull = ([split(answer)["wait"] for answer in answers] for answers in (pushed, pulled))
    name = f"post-prefill wait, {tokens} tokens: push by pull"
    return at_most(name, paired_ratio(push, pull), WAIT_GOAL)


def return_goal(history: int, off: Sequence[Answer], on: Sequence[Answer]) -> Goal:
    """Of next turns after so many tokens, without and with return, in the order of their rounds."""
    ratio = paired_ratio([answer.ttft_s for answer in off], [answer.ttft_s for answer in on])
    return at_least(f"next turn's TTFT, {history} tokens of history: off by on", ratio, RETURN_GOAL)
