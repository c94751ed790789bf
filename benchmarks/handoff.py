"""From the prefill engine's last layer to the decode engine running, beside a plain copy of the same bytes.

Two engine processes hand over a prompt's KV in the layout of SmolLM2 (bf16, 16 tokens a block) by a verified
pull; the model computes nothing, since 16k tokens are more than SmolLM2's context. Everything else is the
engine's own code and threads. Not in it: HTTP and the router, whose ticket goes over a pipe from the prefill
process to the decode process; the prompt's token ids, which come with the ticket as JSON, are there already.

Both processes read one clock of one host, so that differences between them mean something here; the
product itself never compares two processes' clocks. The phases are those of the engine's own records:

    offer    last layer computed → the offer is made and described              prefill engine
    ticket   signed, sent over the pipe, received                               (the router's place)
    queue    ticket checked, chain computed, blocks allocated                   decode engine
    post     read is handed to the mover's thread, which posts it
    wire     until the transfer is reported done
    claim    until the source's answer is in, beyond the transfer
    detect   until the engine thread calls the model for the request

The copy is one memmove by one thread between two pools of the same kind of memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_pair import SMOLLM2, EnginePair, Landed, Offered, Shape, engine_pair, preload
from benchmarks.report import Report, alternate, at_most, progress_bar
from kvhandoff.core.phases import Phase

SIZES = {"1k": 64, "4k": 256, "16k": 1024}
"""Tokens → blocks."""
FACTOR = 1.3
EXTRA_MS = 3.0
WARM_UP = 3
"""Rounds before the measured ones: the connection is up, and the peer's memory mapped."""
QUEUE = (Phase.DECODE_TOKENIZE, Phase.DECODE_QUEUE)
PHASES = ("offer", "ticket", "queue", "post", "wire", "claim", "detect")


@dataclass
class Contest:
    """One shape's handoffs and copies: each call is one round, and gives its milliseconds."""

    pair: EnginePair
    shape: Shape

    def __post_init__(self) -> None:
        self.phases: list[dict[str, float]] = []
        self.descriptors = 0

    def handoff(self) -> float:
        """Raises RuntimeError when the prompt's KV was not handed over whole."""
        offered, landed = self.pair.handoff()
        record = landed.record
        if record.reasons or record.transferred_tokens != self.shape.prompt_tokens:
            raise RuntimeError(f"{record.transferred_tokens} tokens were transferred: {record.reasons}")
        phases = split(offered, landed)
        if min(phases.values()) < 0:
            raise RuntimeError(f"a phase that ends before it begins: {phases}")
        self.phases.append(phases)
        self.descriptors = record.descriptors
        return 1e3 * (landed.running_at - offered.computed_at)

    def copy(self) -> float:
        return 1e3 * self.pair.copy()

    def copy_by_blocks(self) -> float:
        return 1e3 * self.pair.copy(by_blocks=True)


def split(offered: Offered, landed: Landed) -> dict[str, float]:
    """Milliseconds by phase; their sum is the handoff."""
    recorded = landed.record.phases
    seconds = {
        "offer": offered.sent_at - offered.computed_at,
        "ticket": landed.opened_at - offered.sent_at,
        "queue": sum(recorded[phase] for phase in QUEUE),
        "post": recorded[Phase.POST],
        "wire": recorded[Phase.WIRE],
        "claim": recorded[Phase.CLAIM],
    }
    seconds["detect"] = landed.running_at - offered.computed_at - sum(seconds.values())
    return {phase: 1e3 * value for phase, value in seconds.items()}


def measure(shape: Shape, rounds: int, advance: Any) -> tuple[Mapping[str, Sequence[float]], Contest]:
    """Milliseconds of each contestant by round, and the handoffs' phases."""
    with engine_pair(shape) as pair:
        contest = Contest(pair, shape)
        contestants = {"handoff": contest.handoff, "copy": contest.copy}
        if shape.fragmented:
            contestants["copy by blocks"] = contest.copy_by_blocks
        alternate(contestants, WARM_UP)
        contest.phases.clear()
        return alternate(contestants, rounds, after_round=advance), contest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", nargs="*", default=["nixl", "shm"], choices=("nixl", "shm"))
    parser.add_argument("--tokens", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, allowed is 1 or more")

    preload()
    report = Report(
        name="handoff",
        title="From the prefill engine's last layer to the decode engine running; SmolLM2's KV in bf16.\n"
        f"In ms, medians of {options.rounds} rounds (minima). Not in it: HTTP and the router, see ticket.",
        columns=(
            *("transport", "tokens", "pool", "MB", "pieces"),
            *PHASES,
            *("handoff", f"goal: {FACTOR}×copy+{EXTRA_MS:g}", "copy", "copy by blocks"),
        ),
        conditions={
            "layout": "SmolLM2-135M bf16",
            "block_bytes": SMOLLM2.block_bytes,
            "rounds": options.rounds,
        },
    )
    shapes = [
        (tokens, Shape(transport, SIZES[tokens], fragmented))
        for transport in options.transport
        for tokens in options.tokens
        for fragmented in (False, True)
    ]
    with progress_bar("measuring", options.rounds * len(shapes)) as advance:
        for tokens, shape in shapes:
            measured, contest = measure(shape, options.rounds, advance)
            add(report, tokens, shape, measured, contest)
    report.finish()


def add(
    report: Report, tokens: str, shape: Shape, measured: Mapping[str, Sequence[float]], contest: Contest
) -> None:
    """One line of the table, one goal."""
    pool = "fragmented" if shape.fragmented else "contiguous"
    handoff = statistics.median(measured["handoff"])
    bound = FACTOR * statistics.median(measured["copy"]) + EXTRA_MS
    report.row(
        *(shape.transport, tokens, pool),
        f"{shape.blocks * SMOLLM2.block_bytes / 1e6:.1f}",
        str(contest.descriptors),
        *(f"{statistics.median(each[phase] for each in contest.phases):.2f}" for phase in PHASES),
        _cell(measured["handoff"]),
        f"{bound:.2f}",
        _cell(measured["copy"]),
        _cell(measured["copy by blocks"]) if shape.fragmented else "",
    )
    report.goals.append(at_most(f"handoff in ms, {shape.transport}, {tokens} tokens, {pool}", handoff, bound))


def _cell(milliseconds: Sequence[float]) -> str:
    return f"{statistics.median(milliseconds):.2f} ({min(milliseconds):.2f})"


if __name__ == "__main__":
    main()
