"""The engine core on its own thread. Every wait is for an event, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep, TokenOutput
from kvhandoff.embedded.core import EngineCore
from kvhandoff.embedded.outlet import EngineFault
from tests.embedded.fakes import FakeHooks, FakeRunner, greedy
from tests.embedded.test_core import prompt_of

DEADLINE_S = 20.0


class Waiter:
    """Collects one request's outputs on the engine thread; `wait` is the test thread's."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self.threads: set[str] = set()
        self.last = threading.Event()

    def __call__(self, output: TokenOutput) -> None:
        self.threads.add(threading.current_thread().name)
        self.outputs.append(output)
        if output.finish_reason:
            self.last.set()

    def wait(self) -> str | None:
        assert self.last.wait(DEADLINE_S), f"no end after {self.outputs}"
        assert self.threads == {"kvhandoff-engine"}
        return self.outputs[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id is not None]


class CountingCore(EngineCore):
    """Counts its steps."""

    steps = 0

    def step(self) -> bool:
        self.steps += 1
        return super().step()


class Gate:
    """Holds the model inside a forward until opened."""

    def __init__(self, runner: FakeRunner) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        runner.before = self

    def __call__(self, steps: Sequence[SequenceStep]) -> None:
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)


class Engine:
    """A started core on fakes."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.runner, self.hooks = FakeRunner(num_blocks), FakeHooks()
        self.core = CountingCore(self.runner, self.hooks, num_blocks=num_blocks)

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, **options: bool) -> Waiter:
        waiter = Waiter()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.submit(EngineRequest(name, prompt, params, waiter, **options))
        return waiter

    def join(self) -> None:
        assert self.core._thread is not None
        self.core._thread.join(DEADLINE_S)
        assert not self.core._thread.is_alive()


@pytest.fixture
def engine():
    engine = Engine()
    engine.core.start()
    yield engine
    engine.core.close()


def test_requests_from_many_threads(engine: Engine):
    answers: dict[str, list[int]] = {}

    def client(number: int) -> None:
        for turn in range(4):
            prompt = prompt_of(5 + number, turn)
            waiter = engine.submit(f"{number}-{turn}", prompt, 6)
            waiter.wait()
            answers[f"{number}-{turn}"] = waiter.tokens

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == {
        f"{number}-{turn}": greedy(prompt_of(5 + number, turn), 6, eos=None)
        for number in range(4)
        for turn in range(4)
    }
    counts = engine.core.load()
    assert (counts["running"], counts["waiting"], counts["loading"]) == (0, 0, 0)
    assert counts["blocks_free"] + counts["blocks_cached"] == 64


def test_an_idle_engine_takes_no_steps(engine: Engine):
    for number in range(20):
        engine.submit(f"r{number}", prompt_of(5), 3).wait()
    # Three steps each, and at most one more after each step, submit and end that finds nothing to do.
    assert engine.core.steps <= 20 * 5
    engine.core.close()
    assert engine.core.steps <= 20 * 5


def test_a_load_ends_from_another_thread(engine: Engine):
    told = threading.Event()
    allocated = engine.hooks.load_allocated

    def tell(request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        allocated(request_id, blocks, cached_blocks)
        told.set()

    engine.hooks.load_allocated = tell  # type: ignore[method-assign]
    waiter = engine.submit("a", prompt_of(9), 4, load=True)
    assert told.wait(DEADLINE_S)
    engine.core.load_failed("a", Reason.READ_TIMEOUT)
    assert waiter.wait() == "length"
    assert waiter.tokens == greedy(prompt_of(9), 4, eos=None)


def test_retained_blocks_come_from_another_thread_when_they_are_needed():
    engine = Engine(num_blocks=8)
    short = threading.Semaphore(0)
    engine.hooks.memory_short = lambda blocks: short.release()  # type: ignore[method-assign]
    engine.core.start()
    for number in range(3):
        engine.submit(f"turn{number}", prompt_of(8, number), 1, retain=True).wait()
    waiter = engine.submit("a", prompt_of(30, 9), 2)
    while engine.hooks.turns:
        assert short.acquire(timeout=DEADLINE_S)  # as often as it is not enough
        engine.core.release_blocks(engine.hooks.turns.popitem()[1][1])
    assert waiter.wait() == "length"
    assert waiter.tokens == greedy(prompt_of(30, 9), 2, eos=None)
    engine.core.close()


def test_an_idle_engine_says_again_that_it_is_short():
    """All its blocks are under plain offers, of which the handoff side alone knows when they end."""
    engine = Engine(num_blocks=8)
    short = threading.Semaphore(0)
    engine.hooks.memory_short = lambda blocks: short.release()  # type: ignore[method-assign]
    engine.core.start()
    engine.submit("offer", prompt_of(30, 1), 1, offer=True).wait()
    waiter = engine.submit("a", prompt_of(20, 9), 2)
    for _ in range(4):
        assert short.acquire(timeout=DEADLINE_S)
    [blocks] = engine.hooks.offers.values()
    engine.core.release_blocks(blocks)
    assert waiter.wait() == "length"
    assert waiter.tokens == greedy(prompt_of(20, 9), 2, eos=None)
    engine.core.close()


def test_an_abort_during_a_step_takes_effect_after_it(engine: Engine):
    gate = Gate(engine.runner)
    waiter = engine.submit("a", prompt_of(9), 40)
    assert gate.entered.wait(DEADLINE_S)
    engine.core.abort("a")
    gate.opened.set()
    assert waiter.wait() == "abort"
    assert waiter.tokens == greedy(prompt_of(9), 1, eos=None)
    assert engine.core.load()["running"] == 0


def test_close_ends_everything_with_abort():
    engine = Engine(num_blocks=8)
    gate = Gate(engine.runner)
    running = engine.submit("a", prompt_of(8, 1), 20)
    loading = engine.submit("b", prompt_of(4, 2), 4, load=True)
    waiting = engine.submit("c", prompt_of(20, 3), 4)
    engine.core.start()
    assert gate.entered.wait(DEADLINE_S)
    late = engine.submit("d", prompt_of(4, 4), 4)
    closing = threading.Thread(target=engine.core.close)
    closing.start()
    with engine.core._wake:
        assert engine.core._wake.wait_for(lambda: not engine.core.healthy, DEADLINE_S)
    gate.opened.set()
    closing.join(DEADLINE_S)
    engine.join()
    assert [one.wait() for one in (running, loading, waiting, late)] == ["abort"] * 4
    assert ("load_abandoned", "b") in engine.hooks.calls
    counts = engine.core.load()
    assert (counts["running"], counts["waiting"], counts["loading"]) == (0, 0, 0)
    assert counts["blocks_free"] + counts["blocks_cached"] == 7  # b's block awaits its fence
    assert not engine.core.healthy
    with pytest.raises(RequestError) as caught:
        engine.submit("e", [1], 1)
    assert (caught.value.status, caught.value.code) == (503, "engine_stopped")
    engine.core.abort("a")
    engine.core.release_blocks([0])
    engine.core.close()


def test_close_without_a_thread_ends_everything_too():
    runner = FakeRunner(8)
    core = EngineCore(runner, num_blocks=8)
    outputs: list[TokenOutput] = []
    core.submit(EngineRequest("a", [1, 2], SamplingParams(), outputs.append))
    core.close()
    assert [output.finish_reason for output in outputs] == ["abort"]
    with pytest.raises(EngineFault, match="started or closed before"):
        core.start()


def _hook_raises(engine: Engine) -> None:
    def refuse(request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        raise LookupError("no such leg")

    engine.hooks.load_allocated = refuse  # type: ignore[method-assign]


def _offer_raises(engine: Engine) -> None:
    def refuse(request_id: str, blocks: Sequence[int], first_token: int) -> None:
        raise LookupError("no such leg")

    engine.hooks.offered = refuse  # type: ignore[method-assign]


def _runner_breaks_its_contract(engine: Engine) -> None:
    engine.runner.forward = lambda steps: []  # type: ignore[method-assign]


@pytest.mark.parametrize("harm", [_hook_raises, _offer_raises, _runner_breaks_its_contract])
def test_a_fault_stops_the_engine_and_nobody_hangs(
    harm: Callable[[Engine], None], caplog: pytest.LogCaptureFixture
):
    engine = Engine(num_blocks=16)
    harm(engine)
    waiters = [
        engine.submit("a", prompt_of(9), 1, offer=True),
        engine.submit("b", prompt_of(9, 1), 4, load=True),
        engine.submit("c", prompt_of(15, 2), 40),
        engine.submit("d", prompt_of(15, 3), 40),
    ]
    engine.core.start()
    assert [one.wait() for one in waiters] == ["error"] * 4
    for one in waiters:
        error = one.outputs[-1].error
        assert error is not None
        assert (error.status, error.code) == (503, "engine_stopped")
    engine.join()
    assert not engine.core.healthy
    assert "the engine stops: running" in caplog.text
    with pytest.raises(RequestError, match="the engine has stopped"):
        engine.submit("e", [1], 1)
    engine.core.close()


def test_a_model_that_raises_leaves_the_thread_running(engine: Engine):
    calls: list[int] = []

    def fail_once(steps: Sequence[SequenceStep]) -> None:
        calls.append(len(steps))
        if len(calls) == 1:
            raise ArithmeticError

    engine.runner.before = fail_once
    assert engine.submit("a", prompt_of(9), 4).wait() == "error"
    again = engine.submit("b", prompt_of(9), 4)
    assert again.wait() == "length"
    assert again.tokens == greedy(prompt_of(9), 4, eos=None)
    assert engine.core.healthy
