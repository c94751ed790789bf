"""Conversations in memory: which turn is found, and how much is kept of it."""

from __future__ import annotations

from typing import Any

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.handoff.messages import HistoryRef
from kvhandoff.router.conversations import Conversations, Found, Place
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.index import Answer, LocalIndex, Turn
from kvhandoff.router.names import Names
from tests.router.engines import key_of
from tests.router.test_names import names

D = Identity(EngineId("d"), Epoch("1"))
E = Identity(EngineId("e"), Epoch("1"))
HERE = Place("tcp://h:1", 4096)


def index(limit: int = 10) -> Conversations:
    return Conversations(LocalIndex(limit), limit)


def named(conversation: str) -> Names:
    """Of a completion, whose prompt doesn't name it."""
    return names(endpoint=Endpoint.COMPLETIONS, conversation_id=conversation)


def turn(handoff_id: str, source: Identity = D) -> Turn:
    return Turn(key_of(handoff_id), source)


def found(handoff_id: str, source: Identity = D, n_tokens: int = 4096) -> Found:
    history = HistoryRef(
        key=key_of(handoff_id), source=source, control_address=HERE.control_address, n_tokens=n_tokens
    )
    return Found(history, None)


NOTHING = Found(None, None)


def account(handoff_id: str, engine: Identity = D, **fields: Any) -> LegRecord:
    values = {"attempt": 0, "leg": "decode"} | fields
    return LegRecord(handoff_id=handoff_id, engine_id=engine.engine_id, epoch=engine.epoch, **values)


def everybody(life: Identity) -> Place | None:
    return HERE


async def test_longest_beginning_first() -> None:
    known = index()
    known.remember(names(messages=["a"]).of_this_turn(), turn("1"))
    known.remember(names(messages=["a", "b"]).of_this_turn(), turn("2"))
    assert await known.find(names(messages=["a", "b", "c"]), everybody) == found("2")
    assert await known.find(names(messages=["a", "x", "c"]), everybody) == found("1")
    assert await known.find(names(messages=["a", "b"]), everybody) == found("1")
    assert await known.find(names(messages=["a"]), everybody) == NOTHING
    assert await known.find(names(messages=["x", "a", "b"]), everybody) == NOTHING


async def test_bounded_and_least_recently_used_first() -> None:
    local = LocalIndex(3)
    known = Conversations(local, 3)
    for number in range(3):
        known.remember(named(str(number)).of_this_turn(), turn(str(number)))
    assert await known.find(named("0"), everybody) == found("0")
    known.remember(named("3").of_this_turn(), turn("3"))
    kept = [await known.find(named(str(n)), everybody) != NOTHING for n in range(4)]
    assert kept == [True, False, True, True]
    for number in range(100):
        known.remember(
            names(messages=[number], conversation_id=str(number)).of_this_turn(), turn(str(number))
        )
    assert len(local) == 3


async def test_ended_lives_are_passed_over() -> None:
    """A life that is only out of sight is found again when it is back."""
    known = index()
    known.remember(names(messages=["a"]).of_this_turn(), turn("1", E))
    known.remember(names(messages=["a", "b"]).of_this_turn(), turn("2"))
    asked = names(messages=["a", "b", "c"])
    assert await known.find(asked, lambda life: HERE if life == E else None) == found("1", E)
    assert await known.find(asked, lambda life: None) == NOTHING
    assert await known.find(asked, everybody) == found("2")


async def test_the_address_is_the_fleets() -> None:
    """What an index says of a turn leads nowhere but to an engine of this fleet."""
    known = index()
    known.remember(named("1").of_this_turn(), turn("1"))
    result = await known.find(named("1"), lambda life: Place("tcp://moved:2", 100))
    assert result.history is not None
    assert (result.history.control_address, result.history.n_tokens) == ("tcp://moved:2", 100)


async def test_accounts() -> None:
    known = index()
    known.remember(names(messages=["a"]).of_this_turn(), turn("1"))
    asked = names(messages=["a", "b"])
    # Of another life, of another leg, of another turn: none of them says anything of this one.
    known.account(account("1", Identity(EngineId("d"), Epoch("2"))))
    known.account(account("1", leg="prefill"))
    known.account(account("1", attempt=1))
    known.account(account("2"))
    assert await known.find(asked, everybody) == found("1")
    known.account(account("1", retained_tokens=48))
    assert await known.find(asked, everybody) == found("1", n_tokens=48)
    known.account(account("1", retained_tokens=0))
    assert await known.find(asked, everybody) == NOTHING


async def test_a_turn_of_which_nothing_is_kept_hides_no_earlier_one() -> None:
    known = index()
    known.remember(names(messages=["a"]).of_this_turn(), turn("1"))
    known.remember(names(messages=["a", "b"]).of_this_turn(), turn("2"))
    known.account(account("2", retained_tokens=0))
    assert await known.find(names(messages=["a", "b", "c"]), everybody) == found("1")


async def test_an_account_may_come_first() -> None:
    """Another replica may still be writing the turn down when the engine's account is here."""
    known = index()
    known.account(account("1", retained_tokens=48))
    known.remember(named("1").of_this_turn(), turn("1"))
    assert await known.find(named("1"), everybody) == found("1", n_tokens=48)


async def test_accounts_are_bounded() -> None:
    known = index(limit=3)
    for number in range(5):
        known.account(account(str(number), retained_tokens=48))
    for number in (1, 2):
        known.remember(named(str(number)).of_this_turn(), turn(str(number)))
    assert await known.find(named("1"), everybody) == found("1")  # forgotten: at most all that fits
    assert await known.find(named("2"), everybody) == found("2", n_tokens=48)


async def test_a_later_turn_takes_the_name() -> None:
    known = index()
    known.remember(named("1").of_this_turn(), turn("1"))
    known.remember(named("1").of_this_turn(), turn("2"))
    assert await known.find(named("1"), everybody) == found("2")


async def test_an_index_that_says_less_says_why() -> None:
    class Failing(LocalIndex):
        answer = Answer((), Reason.INDEX_FAILED)

        async def look_up(self, names: object) -> Answer:
            return self.answer

    failing = Failing(1)
    known = Conversations(failing, 1)
    assert await known.find(named("1"), everybody) == Found(None, Reason.INDEX_FAILED)
    failing.answer = Answer([None, turn("1")], Reason.INDEX_FOREIGN)
    asked = names(messages=["a", "b", "c"])
    result = await known.find(asked, everybody)
    assert result == Found(found("1").history, Reason.INDEX_FOREIGN)
