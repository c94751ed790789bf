"""The waits of an engine that has nothing to do but to wait for a load."""

from __future__ import annotations

import threading

import pytest

from kvhandoff.vllm.idle import FIRST_WAIT_S, LONGEST_WAIT_S, IdleWait


class Clockless(threading.Event):
    """Writes its waits down, and passes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Clockless:
    made = Clockless()
    monkeypatch.setattr(threading, "Event", lambda: made)
    return made


def test_waits_grow_up_to_the_longest(event: Clockless) -> None:
    idle = IdleWait()
    for _ in range(6):
        idle.wait()
    assert event.waits == [FIRST_WAIT_S * factor for factor in (1, 2, 4, 8)] + [LONGEST_WAIT_S] * 2


@pytest.mark.parametrize("what", ["news", "busy"])
def test_whatever_happens_makes_the_next_wait_short(event: Clockless, what: str) -> None:
    idle = IdleWait()
    for _ in range(5):
        idle.wait()
    getattr(idle, what)()
    idle.wait()
    idle.wait()
    news = what == "news"
    # News end the very next wait, whatever is due; the one behind it is a short one.
    assert event.waits[5:] == ([LONGEST_WAIT_S, FIRST_WAIT_S] if news else [FIRST_WAIT_S, 2 * FIRST_WAIT_S])


def test_news_end_one_wait(event: Clockless) -> None:
    idle = IdleWait()
    idle.news()
    idle.wait()
    assert not event.is_set()
