from __future__ import annotations

import gc
import logging
import os
import queue
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport.api import TransportError
from kvhandoff.vllm import rank_channel
from kvhandoff.vllm.rank_channel import (
    Attached,
    Connect,
    Connected,
    Disconnect,
    Ended,
    Left,
    Move,
    RankChannel,
    Report,
    encode,
)
from tests.vllm_plugin.ranks import (
    DEADLINE,
    PEER,
    PlainDriver,
    ScriptedMover,
    ScriptedRank,
    moved,
    scripted_ranks,
)


@pytest.fixture
def rank() -> Iterator[ScriptedRank]:
    with scripted_ranks(1) as (only,):
        yield only


@pytest.fixture
def stranger(rank: ScriptedRank) -> Iterator[PlainDriver]:
    client = PlainDriver(rank.channel.address)
    yield client
    client.close()


@pytest.fixture
def driver(rank: ScriptedRank, stranger: PlainDriver) -> Iterator[PlainDriver]:
    """Attached; `stranger` was there before the file went."""
    client = PlainDriver(rank.channel.address)
    client.attach(rank.channel.token)
    assert client.hears() == Attached()
    yield client
    client.close()


@pytest.fixture
def logged() -> Iterator[queue.SimpleQueue[str]]:
    """What the channel logs, as it comes."""
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    handler = logging.Handler()
    handler.emit = lambda record: messages.put(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(rank_channel.__name__)
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def directory_of(rank: ScriptedRank) -> Path:
    return Path(rank.channel.address.removeprefix("ipc://")).parent


def test_commands_reach_the_mover_and_its_news_the_driver(rank: ScriptedRank, driver: PlainDriver) -> None:
    driver.send(Connect(1, PEER, b"facts"))
    *asked, done = rank.mover.next()
    assert asked == ["connect", PEER, b"facts"]
    done(None)
    assert driver.hears() == Connected(1, None)
    driver.send(Move(2, "read", PEER, ((0, 3, 2), (7, 1, 1))))
    *asked, done = rank.mover.next()
    assert asked == ["read", PEER, ((0, 3, 2), (7, 1, 1))]
    done(moved(posted=3.0, done=4.5, size=1536))
    assert driver.hears() == Ended(2, None, 3.0, 4.5, 1, 1536)
    driver.send(Move(3, "write", PEER, ((1, 1, 1),)))
    rank.mover.next()[-1](moved("peer gone"))
    assert driver.hears() == Ended(3, "peer gone", 1.0, 2.0, 1, 0)
    driver.send(Disconnect(PEER))
    assert rank.mover.next() == ("disconnect", PEER)
    driver.send(Connect(4, PEER, b"facts"))
    rank.mover.next()[-1](TransportError("unreachable"))
    assert driver.hears() == Connected(4, "unreachable")


def test_reports_come_out_as_they_went_in(rank: ScriptedRank, driver: PlainDriver) -> None:
    driver.send(Report("cmpl-1", True, (4, 5)))
    assert rank.reports.get(timeout=DEADLINE) == Report("cmpl-1", True, (4, 5))


def test_only_the_user_may_enter_and_nobody_needs_to_once_the_driver_is_there(rank: ScriptedRank) -> None:
    directory = directory_of(rank)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    driver = PlainDriver(rank.channel.address)
    driver.attach(rank.channel.token)
    assert driver.hears() == Attached()
    assert not directory.exists()
    driver.close()


def test_a_channel_that_nobody_came_to_leaves_nothing_behind() -> None:
    with scripted_ranks(1) as (rank,):
        directory = directory_of(rank)
        assert directory.exists()
    assert not directory.exists()


def test_without_the_token_nothing_is_obeyed(
    rank: ScriptedRank, stranger: PlainDriver, logged: queue.SimpleQueue[str]
) -> None:
    stranger.send(Move(1, "write", PEER, ((0, 0, 1),)))
    assert logged.get(timeout=DEADLINE) == "a stranger's message to a rank's channel"
    stranger.send(b"\xc1")
    assert logged.get(timeout=DEADLINE) == "a stranger's message to a rank's channel"
    stranger.attach(b"x" * 16)
    assert logged.get(timeout=DEADLINE) == "a driver with another token was refused by a rank's channel"
    driver = PlainDriver(rank.channel.address)
    driver.attach(rank.channel.token)
    assert driver.hears() == Attached()
    stranger.attach(rank.channel.token)  # there is a driver already
    stranger.send(Move(2, "write", PEER, ((0, 0, 1),)))
    for _ in range(2):
        said = "a message of 1 frames from a stranger to a rank's channel"
        assert logged.get(timeout=DEADLINE) == said
    driver.send(Disconnect(PEER))
    assert rank.mover.next() == ("disconnect", PEER)
    assert rank.mover.asked.empty()
    assert stranger.hears(within=0) is None
    driver.close()


def test_a_command_that_cant_be_read_ends_the_channel(
    rank: ScriptedRank, driver: PlainDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.send(b"\xc1")
    assert driver.hears() == Left("its channel has failed")
    assert "a rank's channel has failed" in caplog.text
    rank.channel.close()


def test_a_mover_that_has_ended_is_told_of_once_and_reports_go_on(
    rank: ScriptedRank, driver: PlainDriver
) -> None:
    rank.mover.alive = False
    assert driver.hears() == Left("its data plane has ended")  # with no command that would have shown it
    driver.send(Report("cmpl-1", True, ()))
    assert rank.reports.get(timeout=DEADLINE).request_id == "cmpl-1"
    driver.send(Move(9, "read", PEER, ((0, 0, 1),)))
    assert driver.hears() == Ended(9, "the mover is closed", 1.0, 2.0, 1, 0)
    rank.channel.close()
    assert driver.hears() == Left("its worker is closed")


def test_what_has_ended_before_the_close_is_said(driver: PlainDriver, rank: ScriptedRank) -> None:
    driver.send(Move(1, "read", PEER, ((0, 0, 1),)))
    rank.mover.next()[-1](moved())
    rank.channel.close()
    assert driver.hears() == Ended(1, None, 1.0, 2.0, 1, 64)
    assert driver.hears() == Left("its worker is closed")


def test_news_after_the_close_are_dropped(rank: ScriptedRank, driver: PlainDriver) -> None:
    driver.send(Move(1, "read", PEER, ((0, 0, 1),)))
    done = rank.mover.next()[-1]
    rank.channel.close()
    done(moved())
    rank.channel.close()


def test_nothing_but_the_file_descriptors_of_the_test_stay_open() -> None:
    def run() -> None:
        with scripted_ranks(2) as ranks:
            for rank in ranks:
                driver = PlainDriver(rank.channel.address)
                driver.attach(rank.channel.token)
                assert driver.hears() == Attached()
                driver.close()

    run()
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    run()
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_have_a_bound() -> None:
    with pytest.raises(TransportError, match=r"^Move to a rank: \d+ bytes, allowed are 16777216$"):
        encode(Move(1, "read", PEER, ((2**20, 2**20, 1),) * 1_500_000))


def test_a_message_beyond_the_bound_is_not_taken(stranger: PlainDriver) -> None:
    stranger.send(bytes(rank_channel.MAX_MESSAGE_BYTES + 1))
    assert stranger.is_dropped()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(rank_channel.tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"rank channel: ipc://.* can't be bound .*is TMPDIR too long\?"):
        RankChannel(ScriptedMover(), lambda _: None).start()
    assert list(deep.iterdir()) == []


def test_a_rank_says_hello_in_plain_values() -> None:
    with scripted_ranks(1) as (rank,):
        values = {name: getattr(rank.hello, name) for name in rank.hello.__slots__}
        assert {type(value) for value in values.values()} <= {str, int, bytes, dict}
        assert rank.hello.kv_layout.block_bytes == 1536
