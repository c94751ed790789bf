"""Spans, phases, ids, layouts, reasons, errors."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.errors import invalid
from kvhandoff.core.ids import completion_id, handoff_id_of, new_epoch, new_handoff_id
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.phases import Phase, PhaseTimer, cut
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.core.spans import coalesce, to_blocks, to_spans

blocks = st.lists(st.integers(0, 30), unique=True)


def test_neighbours_become_one_span() -> None:
    assert to_spans([7, 8, 9, 3, 5, 4]) == ((7, 3), (3, 1), (5, 1), (4, 1))


@given(blocks)
def test_spans_keep_the_list(ids: list[int]) -> None:
    assert to_blocks(to_spans(ids)) == tuple(ids)


@given(st.data())
def test_coalesced_copies_move_each_block_to_its_place(data: st.DataObject) -> None:
    source = data.draw(blocks)
    destination = data.draw(st.permutations(range(len(source))))
    copies = coalesce(source, destination)
    moved = {dst + i: src + i for src, dst, count in copies for i in range(count)}
    assert moved == dict(zip(destination, source, strict=True))


def test_coalesce_is_as_short_as_the_order_allows() -> None:
    assert coalesce([4, 5, 6, 9], [0, 1, 2, 3]) == [(4, 0, 3), (9, 3, 1)]
    with pytest.raises(ValueError, match=r"longer|shorter"):
        coalesce([1, 2], [1])


def test_phases_add_up_to_the_span() -> None:
    clock = ManualClock(10.0)
    timer = PhaseTimer(clock)
    clock.advance(1.0)
    timer.mark(Phase.ROUTE)
    clock.advance(2.0)
    timer.mark(Phase.BIND)
    clock.advance(0.5)
    timer.mark(Phase.ROUTE)
    assert timer.seconds == {Phase.ROUTE: 1.5, Phase.BIND: 2.0}
    assert timer.total == sum(timer.seconds.values()) == 3.5


@given(st.lists(st.tuples(st.sampled_from(Phase), st.none() | st.floats(0, 100)), unique_by=lambda m: m[0]))
def test_cut_adds_up_to_the_latest_mark(marks: list[tuple[Phase, float | None]]) -> None:
    seconds = cut(5.0, marks)
    latest = max([5.0, *(at for _, at in marks if at is not None)])
    assert sum(seconds.values()) == pytest.approx(latest - 5.0)
    assert all(value >= 0 for value in seconds.values())


def test_side_by_side_phases_are_charged_to_the_last() -> None:
    seconds = cut(0.0, [(Phase.WIRE, 5.0), (Phase.CLAIM, 3.0), (Phase.DETECT, 6.0)])
    assert seconds == {Phase.WIRE: 5.0, Phase.CLAIM: 0.0, Phase.DETECT: 1.0}


def test_completion_ids_lead_back_to_the_handoff() -> None:
    handoff_id = new_handoff_id()
    for chat in (True, False):
        assert handoff_id_of(completion_id(handoff_id, chat=chat)) == handoff_id
    assert handoff_id_of(handoff_id) == handoff_id
    assert new_epoch() != new_epoch()


def test_layout_differences_name_both_values() -> None:
    one = KVLayout(
        order="block", dtype="bfloat16", layers=2, kv_heads=1, head_dim=8, block_size=16, block_bytes=1024
    )
    other = KVLayout(
        order="block", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_size=16, block_bytes=2048
    )
    assert one.differences(other) == [
        "dtype: 'bfloat16' here, 'float32' there",
        "block_bytes: 1024 here, 2048 there",
    ]
    assert one.differences(one) == []
    assert one.fingerprint() != other.fingerprint()


def test_a_decline_is_not_a_failure() -> None:
    assert Reason.OFFER_EXPIRED.kind is ReasonKind.DECLINE
    assert Reason.TRANSFER_FAILED.kind is ReasonKind.FAILURE
    assert Reason.SHORT_PROMPT.kind is ReasonKind.CHOICE
    assert {reason.kind for reason in Reason} == set(ReasonKind)


def test_reasons_of_a_newer_version() -> None:
    known, newer = msgspec.json.decode(b'["revoked","of_a_newer_version"]', type=tuple[Reason, Reason])
    assert (known, newer, newer.kind) == (Reason.REVOKED, Reason.UNKNOWN, ReasonKind.FAILURE)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b"5", type=Reason)


def test_invalid_names_field_value_and_what_is_allowed() -> None:
    error = invalid("max_tokens", -1, "a whole number from 1")
    assert error.status == 400
    assert error.body() == {
        "error": {
            "message": "max_tokens: got -1, allowed is a whole number from 1",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": None,
        }
    }
    assert len(invalid("prompt", "x" * 10_000_000, "less").message) < 200
