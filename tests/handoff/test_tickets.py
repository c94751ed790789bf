from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.handoff.tickets import BadTicket, Ticket, TicketGate, TicketKey

ME = Identity(EngineId("d"), Epoch("1"))
KEY = TicketKey(b"cluster")


def ticket(**other: object) -> Ticket:
    facts = {"leg": "decode", "audience": ME, "not_after": 50.0, "key": HandoffKey(HandoffId("h"), 0)}
    return Ticket(**{**facts, **other})  # type: ignore[arg-type]


def test_a_signed_ticket_is_obeyed_once() -> None:
    gate, signed = TicketGate(KEY, ME), KEY.sign(ticket(cache_salt="tenant"))
    assert gate.admit(signed, 49.0) == ticket(cache_salt="tenant")
    with pytest.raises(BadTicket, match="used before"):
        gate.admit(signed, 49.5)


def test_each_leg_and_attempt_has_its_own_ticket() -> None:
    gate = TicketGate(KEY, ME)
    for one in (ticket(), ticket(leg="prefill"), ticket(key=HandoffKey(HandoffId("h"), 1))):
        assert gate.admit(KEY.sign(one), 1.0) == one


@pytest.mark.parametrize(
    ("signed", "now", "why"),
    [
        (TicketKey(b"other").sign(ticket()), 1.0, "not signed with this cluster's key"),
        (KEY.sign(ticket(audience=Identity(EngineId("d"), Epoch("0")))), 1.0, "is for d@0"),
        (KEY.sign(ticket()), 50.1, "ran out"),
        (None, 1.0, "payload.signature"),
        ({"ticket": 1}, 1.0, "payload.signature"),
        ("a.b.c", 1.0, "payload.signature"),
        ("!.?", 1.0, "not base64url|not signed"),
    ],
)
def test_others_are_refused(signed: object, now: float, why: str) -> None:
    with pytest.raises(BadTicket, match=why) as refused:
        TicketGate(KEY, ME).admit(signed, now)
    assert (refused.value.status, refused.value.code) == (403, "bad_ticket")


@given(st.text(max_size=80) | st.binary(max_size=80))
def test_garbage_is_refused(garbage: object) -> None:
    with pytest.raises(BadTicket):
        TicketGate(KEY, ME).admit(garbage, 1.0)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(position: int, flip: int) -> None:
    signed = KEY.sign(ticket()).encode()
    position %= len(signed)
    changed = bytearray(signed)
    changed[position] ^= flip
    try:
        text = bytes(changed).decode()
    except UnicodeDecodeError:
        return
    try:
        opened = KEY.open(text)
    except BadTicket:
        return
    assert opened == ticket()  # base64 ignores some bits; what is signed can't have changed
