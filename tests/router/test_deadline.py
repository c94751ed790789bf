"""A bound on the time of a leg: when it rings, what comes of other cancellations, and how it is moved."""

from __future__ import annotations

import asyncio

import pytest

from kvhandoff.router.deadline import Deadlines

LONG_S = 60.0


async def test_the_wait_ends_with_a_timeout() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(TimeoutError), Deadlines().within(0):
        await asyncio.Event().wait()
    assert task.cancelling() == 0


async def test_in_time() -> None:
    with Deadlines().within(0):
        pass
    with Deadlines().within(0) as deadline:
        deadline.lift()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_moved() -> None:
    async def wait() -> None:
        with Deadlines().within(LONG_S) as deadline:
            deadline.move(0)
            deadline.move(0)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()


async def test_moved_out_of_the_way() -> None:
    with Deadlines().within(0) as deadline:
        deadline.move(LONG_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_no_move_after_its_end() -> None:
    with Deadlines().within(LONG_S) as deadline:
        pass
    deadline.move(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_cancellation_for_another_cause_goes_through() -> None:
    """Also when the time is over at the same moment."""
    entered = asyncio.Event()

    async def wait(seconds: float) -> None:
        with Deadlines().within(LONG_S) as deadline:
            deadline.move(seconds)
            entered.set()
            await asyncio.Event().wait()

    for seconds in (LONG_S, 0.0):
        entered.clear()
        task = asyncio.create_task(wait(seconds))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_error_at_the_same_moment_is_the_error() -> None:
    async def break_off() -> None:
        with Deadlines().within(0):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise ValueError("broken") from error

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ValueError, match="broken"):
        await break_off()
    assert task.cancelling() == 0


async def test_waits_share_a_timer_and_each_ends_in_its_time() -> None:
    """Whatever the order in which they were entered, and are over."""
    deadlines, ended = Deadlines(), []

    async def wait(name: str, seconds: float, entered: asyncio.Event) -> None:
        try:
            with deadlines.within(seconds):
                entered.set()
                await asyncio.Event().wait()
        except TimeoutError:
            ended.append(name)

    tasks = []
    for name, seconds in (("last", 0.12), ("first", 0.0), ("second", 0.06)):
        entered = asyncio.Event()
        tasks.append(asyncio.create_task(wait(name, seconds, entered)))
        await entered.wait()
    with deadlines.within(0.0) as lifted:
        lifted.lift()
        await asyncio.gather(*tasks)
    assert ended == ["first", "second", "last"]


async def test_what_is_lifted_is_not_moved() -> None:
    """Something may be about to move it when the answer begins."""
    deadlines = Deadlines()
    with deadlines.within(LONG_S) as deadline:
        deadline.lift()
        deadline.move(0)
        assert deadline not in deadlines._running
