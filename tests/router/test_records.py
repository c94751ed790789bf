"""Joining the legs' accounts: phases that add up, and what is said when an account is missing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.phases import Phase
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.limits import Limits, Meter
from kvhandoff.router.records import Draft, LegRef, Records, RequestRecord

P = Identity(EngineId("p"), Epoch("1"))
D = Identity(EngineId("d"), Epoch("2"))
ID = HandoffId("h")
KEY = HandoffKey(ID, 0)


class Log:
    def __init__(self, limit: int = 10) -> None:
        self.reasons: list[Reason] = []
        self.closed: list[int | None] = []
        self.settled: list[RequestRecord] = []
        self.records = Records(
            limit,
            on_reason=self.reasons.append,
            on_closed=lambda draft: self.closed.append(draft.status),
            on_settled=lambda _, record: self.settled.append(record),
        )

    def open(self, handoff_id: str = ID, *, pull: bool = True) -> Draft:
        draft = self.records.open(HandoffId(handoff_id), endpoint=Endpoint.CHAT, requested_path="auto")
        key = HandoffKey(HandoffId(handoff_id), 0)
        draft.path = "pull" if pull else "local"
        draft.prefill = LegRef(key, P) if pull else None
        draft.decode = LegRef(key, D)
        return draft


def leg(engine: Identity, role: Any, **fields: Any) -> LegRecord:
    values = {"handoff_id": ID, "attempt": 0, "leg": role} | fields
    return LegRecord(engine_id=engine.engine_id, epoch=engine.epoch, **values)


seconds = st.floats(0, 100)
phases = st.dictionaries(st.sampled_from([phase.value for phase in Phase]), seconds)


@given(phases, phases, seconds, seconds, seconds, seconds, seconds, st.booleans(), st.booleans())
def test_phases_add_up(
    p: dict[str, float],
    d: dict[str, float],
    route: float,
    bind: float,
    retry: float,
    prefill_extra: float,
    decode_extra: float,
    streamed: bool,
    pull: bool,
) -> None:
    """Their sum is the TTFT, whatever the engines account for, and the network's part is what is left."""
    log = Log()
    draft = log.open(pull=pull)
    p_wall, d_wall = sum(p.values()) + prefill_extra, sum(d.values()) + decode_extra
    draft.walls = {Phase.ROUTE: route, Phase.RETRY: retry, Phase.DECODE_NETWORK: d_wall}
    if pull:
        draft.walls |= {Phase.PREFILL_NETWORK: p_wall, Phase.BIND: bind}
    generating = 7.0
    ttft = sum(draft.walls.values())
    if streamed:
        draft.first_content_s = ttft
    else:
        draft.walls[Phase.DECODE_NETWORK] += generating
    log.records.close(draft, 200, 1.0)
    log.records.add_legs(
        [
            leg(P, "prefill", phases=p, total_s=p_wall),
            leg(D, "decode" if pull else "local", phases=d, total_s=sum(d.values()) + generating),
        ]
    )
    record = draft.record()
    assert record.ttft_s == pytest.approx(ttft, abs=1e-6)
    assert sum(record.phases.values()) == pytest.approx(record.ttft_s, abs=1e-6)
    if Phase.DECODE_NETWORK not in d and Phase.DECODE_NETWORK not in p:
        assert record.phases[Phase.DECODE_NETWORK] == pytest.approx(decode_extra, abs=1e-6)
    known = [phase.value for phase in Phase]
    assert list(record.phases) == sorted(record.phases, key=known.index)
    assert not record.incomplete


@given(phases, phases, seconds, seconds, seconds, seconds, st.booleans(), st.booleans())
def test_phases_of_a_push_add_up(
    p: dict[str, float],
    d: dict[str, float],
    route: float,
    retry: float,
    prefill_extra: float,
    decode_extra: float,
    streamed: bool,
    fell_to_pull: bool,
) -> None:
    """The client waits for the decode leg alone; the prefill leg's phases add up to its own wall time."""
    log = Log()
    draft = log.open()
    draft.path = "pull" if fell_to_pull else "push"
    draft.prefill_wall_s = sum(p.values()) + prefill_extra
    draft.walls = {
        Phase.ROUTE: route,
        Phase.RETRY: retry,
        Phase.DECODE_NETWORK: sum(d.values()) + decode_extra,
    }
    if fell_to_pull:
        draft.walls[Phase.BIND] = 0.5
    ttft = sum(draft.walls.values())
    if streamed:
        draft.first_content_s = ttft
    else:
        draft.walls[Phase.DECODE_NETWORK] += 7.0
    log.records.close(draft, 200, 1.0)
    log.records.add_legs(
        [
            leg(P, "prefill", phases=p, total_s=1.0),
            leg(D, "decode", phases=d, total_s=sum(d.values()) + 7.0),
        ]
    )
    record = draft.record()
    assert record.ttft_s == pytest.approx(ttft, abs=1e-6)
    assert sum(record.phases.values()) == pytest.approx(record.ttft_s, abs=1e-6)
    assert sum(record.prefill_phases.values()) == pytest.approx(draft.prefill_wall_s, abs=1e-6)
    known = [phase.value for phase in Phase]
    for shown in (record.phases, record.prefill_phases):
        assert list(shown) == sorted(shown, key=known.index)


def test_record_of_a_push_with_return() -> None:
    log = Log()
    draft = log.open()
    draft.path, draft.requested_return, draft.history = "push", "auto", D
    draft.walls = {Phase.ROUTE: 0.1, Phase.DECODE_NETWORK: 0.3}
    draft.bound_again()
    draft.bound_again()
    log.records.close(draft, 200, 2.0)
    log.records.add_legs(
        [
            leg(P, "prefill", phases={Phase.PREFILL_COMPUTE: 0.2}, transferred_tokens=64, bytes=640),
            leg(
                D,
                "decode",
                phases={Phase.AWAIT_PREFILL: 0.2, Phase.WRITE_TAIL: 0.05},
                total_s=0.3,
                cached_tokens=16,
                transferred_tokens=32,
                bytes=320,
                early_bytes=300,
                blocks=2,
                grants=1,
                write_chunks=3,
                first_token_reused=True,
                retained_tokens=96,
            ),
        ]
    )
    record = draft.record()
    assert (record.binding, record.rebound, record.reasons) == ("early", 2, [Reason.REBOUND])
    assert (record.requested_return, record.history) == ("auto", D)
    reused = record.reused_tokens
    assert (reused.decode_cache, reused.transferred, reused.returned) == (16, 32, 64)
    assert (record.bytes, record.early_bytes, record.return_bytes) == (320, 300, 640)
    assert (record.blocks, record.grants, record.write_chunks) == (2, 1, 3)
    assert record.first_token_reused
    assert record.retained_tokens == 96
    assert record.kv_source == "transferred"
    # Its end was not seen, so its network's part isn't known.
    assert record.prefill_phases == {"prefill_compute": 0.2}
    assert list(record.phases) == ["route", "decode_network", "await_prefill", "write_tail"]


def test_record_of_a_local_leg_with_return() -> None:
    """What came from another decode engine was returned, and nothing went forward."""
    log = Log()
    draft = log.open(pull=False)
    log.records.close(draft, 200, 1.0)
    log.records.add_legs([leg(D, "local", transferred_tokens=64, bytes=640, blocks=4, descriptors=1)])
    record = draft.record()
    assert (record.reused_tokens.transferred, record.reused_tokens.returned) == (0, 64)
    assert (record.bytes, record.return_bytes, record.blocks) == (0, 640, 0)
    assert (record.binding, record.kv_source) == (None, "transferred")


def test_record() -> None:
    log = Log()
    draft = log.open()
    draft.model, draft.attempts = "m", 1
    draft.walls = {Phase.ROUTE: 0.1, Phase.PREFILL_NETWORK: 0.5, Phase.BIND: 0.1, Phase.DECODE_NETWORK: 0.3}
    draft.first_content_s, draft.first_byte_s = 1.0, 0.9
    log.records.close(draft, 200, 2.0)
    assert log.closed == [200]
    assert log.settled == []
    log.records.add_legs(
        [
            leg(
                P,
                "prefill",
                phases={Phase.PREFILL_COMPUTE: 0.4},
                prompt_tokens=9,
                cached_tokens=4,
                computed_tokens=5,
            )
        ]
    )
    assert draft.record().incomplete
    log.records.add_legs(
        [
            leg(
                D,
                "decode",
                phases={Phase.WIRE: 0.1, Phase.FIRST_STEP: 0.1},
                prompt_tokens=9,
                transferred_tokens=8,
                computed_tokens=1,
                completion_tokens=3,
                bytes=100,
                blocks=2,
                descriptors=1,
                reasons=[Reason.LEASE_LAPSED],
                finish_reason="length",
            )
        ]
    )
    record = draft.record()
    assert log.settled == [record]
    assert record.id == "chatcmpl-h"
    assert record.phases == {
        "route": 0.1,
        "prefill_network": pytest.approx(0.1),
        "prefill_compute": 0.4,
        "bind": 0.1,
        "decode_network": pytest.approx(0.1),
        "wire": 0.1,
        "first_step": 0.1,
    }
    assert record.ttft_s == pytest.approx(1.0)
    assert (record.prompt_tokens, record.completion_tokens) == (9, 3)
    assert (record.reused_tokens.prefill_cache, record.reused_tokens.transferred) == (4, 8)
    assert (record.computed_tokens.prefill, record.computed_tokens.decode) == (5, 1)
    assert (record.bytes, record.blocks, record.descriptors) == (100, 2, 1)
    assert (record.binding, record.rebound, record.prefill_phases) == ("late", 0, {})
    assert record.kv_source == "transferred"
    assert (record.prefill, record.decode) == (P, D)
    assert record.reasons == log.reasons == [Reason.LEASE_LAPSED]
    assert record.finish_reason == "length"
    # A repeated report changes nothing.
    log.records.add_legs([leg(D, "decode", bytes=5, reasons=[Reason.PEER_LOST])])
    assert draft.record() == record
    assert len(log.settled) == 1


def test_account_of_another_life_does_not_count() -> None:
    log = Log()
    draft = log.open(pull=False)
    log.records.close(draft, 200, 1.0)
    log.records.add_legs([leg(Identity(D.engine_id, Epoch("old")), "local")])
    assert draft.record().incomplete


def test_account_of_a_failed_attempt_gives_its_reasons_only() -> None:
    log = Log()
    draft = log.open(pull=False)
    draft.decode = LegRef(HandoffKey(ID, 1), D)
    log.records.add_legs(
        [
            leg(D, "decode", attempt=0, bytes=7, reasons=[Reason.PEER_LOST]),
            leg(D, "local", attempt=1, computed_tokens=4),
        ]
    )
    record = draft.record()
    assert (record.bytes, record.computed_tokens.decode) == (0, 4)
    assert record.reasons == [Reason.PEER_LOST]


def test_streamed_answer_without_account_keeps_its_ttft() -> None:
    log = Log()
    draft = log.open(pull=False)
    draft.walls = {Phase.ROUTE: 0.25, Phase.DECODE_NETWORK: 0.5}
    draft.first_content_s = 0.75
    log.records.close(draft, 502, 1.0)
    record = draft.record()
    assert (record.incomplete, record.ttft_s, record.kv_source) == (True, 0.75, None)
    assert sum(record.phases.values()) == record.ttft_s


def test_json_answer_without_account_has_no_ttft() -> None:
    """The first token was somewhere within the leg: nobody knows where."""
    log = Log()
    draft = log.open(pull=False)
    draft.walls = {Phase.ROUTE: 0.25, Phase.DECODE_NETWORK: 5.0}
    log.records.close(draft, 200, 5.25)
    assert (draft.record().incomplete, draft.record().ttft_s) == (True, None)


def test_account_that_is_closed_a_moment_late() -> None:
    """An engine's total may end after its last byte is at the router: nothing is left for the network."""
    log = Log()
    draft = log.open(pull=False)
    draft.walls = {Phase.ROUTE: 0.25, Phase.DECODE_NETWORK: 5.0}
    log.records.close(draft, 200, 5.25)
    log.records.add_legs([leg(D, "local", phases={Phase.FIRST_STEP: 1.0}, total_s=5.5)])
    record = draft.record()
    assert record.phases == {"route": 0.25, "decode_network": 0.0, "first_step": 1.0}
    assert record.ttft_s == 1.25


def test_running_and_refused_requests() -> None:
    log = Log()
    draft = log.records.open(ID, endpoint=Endpoint.COMPLETIONS, requested_path="auto")
    assert draft.record().status is None
    assert draft.record().incomplete
    draft.walls = {Phase.ROUTE: 0.25}
    log.records.close(draft, 404, 0.5)
    record = draft.record()
    assert (record.status, record.path, record.ttft_s, record.incomplete) == (404, None, None, False)
    assert record.id == "cmpl-h"


def test_bounded() -> None:
    log = Log(limit=3)
    for index in range(10):
        log.open(f"h{index}")
    assert [index for index in range(10) if log.records.get(f"h{index}")] == [7, 8, 9]
    log.records.add_legs([leg(D, "decode", handoff_id="h0"), leg(D, "decode", handoff_id="unknown")])


def test_found_by_any_of_its_names() -> None:
    log = Log()
    draft = log.open()
    for name in ("h", "cmpl-h", "chatcmpl-h", "resp_h"):
        assert log.records.get(name) is draft
    assert log.records.get("other") is None


def test_reasons_count_once() -> None:
    log = Log()
    draft = log.open()
    for _ in range(2):
        draft.because(Reason.DECODE_FAILED)
    assert log.reasons == [Reason.DECODE_FAILED]


async def test_a_record_that_makes_room_is_freed_at_once() -> None:
    """By its references alone: the router looks for cycles so seldom that its memory would grow."""
    log = Log(limit=1)
    draft = log.open("a")
    draft.charge = await Meter("tenant", Limits(), lambda: 0.0).open(draft.because)
    log.records.close(draft, 200, 1.0)
    gone = weakref.ref(draft)
    del draft
    gc.disable()
    try:
        log.open("b")
        assert gone() is None
    finally:
        gc.enable()
