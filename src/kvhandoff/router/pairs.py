"""Which prefill and decode engines really hand over (field case 21): every pair is tested when its engines
come up, in the background, and the pairs that fail are given no handoff.

    untested ──▶ passed                 until one of the engines begins another life
        └──────▶ failed ──▶ tested again every RETEST_S

A pair that is untested is used like any other: what goes wrong there costs a recompute, as it always did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.ids import Identity
from kvhandoff.router.config import PairTestChoice
from kvhandoff.router.engine import Engine
from kvhandoff.router.probe import Untested

log = logging.getLogger(__name__)

AUTO_PAIRS = 64
"""Pairs up to which `auto` tests. 8 by 8 engines: a few seconds of tests, each as long as a short request."""
TOGETHER = 4
"""Tests at a time."""
TEST_S = 30.0
"""One test; then nothing is known of the pair, until it is tested again."""
RETEST_S = 60.0
"""Between two tests of a pair that has failed, or could not be tested."""
TRIES = 2
"""Tests that have to fail, one right after the other, until a pair has failed: one of them may have met a
passing fault."""

Test = Callable[[Engine, Engine, float], Awaitable[str | None]]
"""See `Probe.test`."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    result: Literal["passed", "failed", "untested"]
    why: str | None
    at: float


class FailedPair(msgspec.Struct, frozen=True, kw_only=True):
    """One pair that does not hand over."""

    prefill: str
    decode: str
    problem: str


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `/ready` says of the pairs of the engines that are up."""

    passed: int
    untested: int
    failed: list[FailedPair]


class PairTests:
    """Tests the pairs of a fleet. Used on the event loop's thread only."""

    def __init__(
        self,
        test: Test,
        engines: Callable[[], tuple[Sequence[Engine], Sequence[Engine]]],
        clock: Clock,
        choice: PairTestChoice,
    ) -> None:
        """`engines`: the prefill and the decode engines there are now."""
        self._test = test
        self._engines = engines
        self._clock = clock
        self._limit = {"auto": AUTO_PAIRS, "on": None, "off": 0}[choice]
        self._verdicts: dict[tuple[Identity, Identity], _Verdict] = {}
        self._failed: set[tuple[Identity | None, Identity | None]] = set()
        """The pairs of `_verdicts` that get no handoff."""
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """An engine has come up."""
        self._wake.set()

    async def run(self) -> None:
        """Test what is to be tested, until cancelled."""
        if self._limit == 0:
            return
        turn = asyncio.Semaphore(TOGETHER)
        while True:
            self._wake.clear()
            await asyncio.gather(*(self._settle(p, d, turn) for p, d in self._due()))
            try:
                async with asyncio.timeout(RETEST_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def hands_over(self, p: Engine, d: Engine) -> bool:
        """Whether a handoff from `p` to `d` may be tried."""
        return (p.identity, d.identity) not in self._failed

    @property
    def all_hand_over(self) -> bool:
        """Whether `hands_over` says so of every pair, as it should be."""
        return not self._failed

    def report(self) -> PairReport:
        """What is known of the engines that get legs."""
        pairs = self._pairs()
        verdicts = [(p, d, self._verdict(p, d)) for p, d in pairs]
        failed = [
            FailedPair(prefill=p.url, decode=d.url, problem=verdict.why or "")
            for p, d, verdict in verdicts
            if verdict is not None and verdict.result == "failed"
        ]
        passed = sum(verdict is not None and verdict.result == "passed" for *_, verdict in verdicts)
        return PairReport(passed=passed, untested=len(pairs) - passed - len(failed), failed=failed)

    def _verdict(self, p: Engine, d: Engine) -> _Verdict | None:
        if p.identity is None or d.identity is None:
            return None
        return self._verdicts.get((p.identity, d.identity))

    def _pairs(self) -> list[tuple[Engine, Engine]]:
        prefill, decode = self._engines()
        return [
            (p, d)
            for p in prefill
            for d in decode
            if p.obstacle is None and d.obstacle is None and p.view().model == d.view().model
        ]

    def _due(self) -> list[tuple[Engine, Engine]]:
        pairs = self._pairs()
        living = {engine.identity for engines in self._engines() for engine in engines}
        self._verdicts = {
            lives: verdict for lives, verdict in self._verdicts.items() if living.issuperset(lives)
        }
        self._note_failed()
        if self._limit is not None and len(pairs) > self._limit:
            return []
        due = []
        for p, d in pairs:
            verdict = self._verdict(p, d)
            if verdict is None or (verdict.result != "passed" and self._clock() - verdict.at >= RETEST_S):
                due.append((p, d))
        return due

    async def _settle(self, p: Engine, d: Engine, turn: asyncio.Semaphore) -> None:
        async with turn:
            p_life, d_life = p.identity, d.identity
            if p_life is None or d_life is None:
                return
            result, why = await self._result(p, d)
        before = self._verdicts.get((p_life, d_life))
        self._verdicts[p_life, d_life] = _Verdict(result, why, self._clock())
        self._note_failed()
        if before is None or (before.result, before.why) != (result, why):
            level = logging.INFO if result == "passed" else logging.WARNING
            log.log(level, "handoff test from %s to %s: %s%s", p, d, result, f": {why}" if why else "")

    def _note_failed(self) -> None:
        self._failed = {lives for lives, verdict in self._verdicts.items() if verdict.result == "failed"}

    async def _result(
        self, p: Engine, d: Engine
    ) -> tuple[Literal["passed", "failed", "untested"], str | None]:
        why = None
        for _ in range(TRIES):
            try:
                why = await self._test(p, d, TEST_S)
            except Untested as error:
                return "untested", str(error)
            if why is None:
                return "passed", None
        return "failed", why
