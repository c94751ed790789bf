"""An engine id is one process at a time: peers take its next life as proof that the former has ended."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.engine import names
from kvhandoff.engine.names import await_further_ranks, hold_name, rank_name

KEY = f"cluster key of the tests, {os.getpid()}".encode()


def test_a_name_is_one_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "PREDECESSOR_S", 0.0)
    with hold_name("prefill-0", KEY):
        with pytest.raises(ConfigError, match="engine-id: got 'prefill-0', allowed is a name that no other"):
            hold_name("prefill-0", KEY)
        hold_name("prefill-1", KEY).close()
        hold_name("prefill-0", b"another cluster's " + KEY).close()
    hold_name("prefill-0", KEY).close()


async def test_a_predecessor_that_ends_is_waited_for() -> None:
    predecessor = hold_name("prefill-0", KEY)
    successor = asyncio.create_task(asyncio.to_thread(hold_name, "prefill-0", KEY))
    await asyncio.sleep(0)
    assert not successor.done()
    predecessor.close()
    (await asyncio.wait_for(successor, 30.0)).close()


def test_an_engine_with_fewer_ranks_waits_for_all_of_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "PREDECESSOR_S", 0.0)
    with hold_name(rank_name("decode-0", 0), KEY):  # its own
        await_further_ranks("decode-0", 1, KEY)
        with (
            hold_name(rank_name("decode-0", 3), KEY),
            pytest.raises(ConfigError, match="engine-id: got 'decode-0#3'"),
        ):
            await_further_ranks("decode-0", 1, KEY)
        await_further_ranks("decode-0", 1, KEY)
