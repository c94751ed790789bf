from __future__ import annotations

import pytest

from kvhandoff.vllm.leg import VllmKVRequest
from kvhandoff.vllm.requests import IN_PLACE, TABLE, LoadAction, LoadEvent, LoadState, Tracked
from tests.vllm_plugin.fake_vllm import BLOCK, FakeRequest

REPORTS = {
    LoadAction.REPORT_LOADED,
    LoadAction.REPORT_FAILED,
    LoadAction.REPORT_ENDED,
    LoadAction.ABANDON,
}


def test_a_load_is_reported_once_if_it_was_allocated_and_never_else() -> None:
    """Along every way through the table."""
    found = {(LoadState.PLAIN, 0, 0), (LoadState.WANTED, 0, 0)}
    ahead = list(found)
    while ahead:
        state, allocated, reported = ahead.pop()
        assert reported <= allocated <= 1
        assert (state is LoadState.ENDED) <= (reported == allocated)
        for (before, event), (action, after) in [*TABLE.items(), *IN_PLACE.items()]:
            come = (after, allocated + (event is LoadEvent.ALLOCATED), reported + (action in REPORTS))
            if before is state and come not in found:
                found.add(come)
                ahead.append(come)
    assert {state for state, *_ in found} == set(LoadState)


def test_every_state_comes_to_an_end() -> None:
    for state in set(LoadState) - {LoadState.ENDED}:
        assert TABLE[state, LoadEvent.FINISHED][1] is LoadState.ENDED


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (LoadState.PLAIN, LoadEvent.ALLOCATED),
        (LoadState.ALLOCATED, LoadEvent.ALLOCATED),
        (LoadState.ALLOCATED, LoadEvent.RAN),
        (LoadState.REPORTED, LoadEvent.ALLOCATED),
        (LoadState.ENDED, LoadEvent.FINISHED),
    ],
)
def test_what_cannot_happen_is_an_error(state: LoadState, event: LoadEvent) -> None:
    tracked = Tracked(FakeRequest("r", [1, 2]))
    tracked.state = state
    with pytest.raises(ValueError, match=rf"request r: {event} in state {state}"):
        tracked.take(event)
    assert tracked.state is state


@pytest.mark.parametrize(
    ("prompt", "load_tokens", "load_gain", "local", "external"),
    [
        (10, None, 1, 0, 10),
        (10, None, 1, 8, 2),
        (9, None, 1, 8, 0),  # the last token is computed here in any case
        (10, 9, 1, 0, 8),  # whole blocks of a history
        (10, 9, 1, 8, 0),
        (8, 8, 1, 0, 4),  # and never the whole prompt
        (20, 19, 8, 8, 8),
        (20, 19, 9, 8, 0),  # too little to be worth it
        (10, 3, 1, 0, 0),
    ],
)
def test_what_a_load_could_bring(
    prompt: int, load_tokens: int | None, load_gain: int, local: int, external: int
) -> None:
    kv = VllmKVRequest("r", list(range(prompt)), load=True, load_tokens=load_tokens, load_gain=load_gain)
    tracked = Tracked(FakeRequest("r", list(range(prompt))), kv)
    assert tracked.external_tokens(local, BLOCK) == 0
    tracked.want()
    assert tracked.external_tokens(local, BLOCK) == external
    tracked.take(LoadEvent.MISSED)
    assert tracked.external_tokens(local, BLOCK) == 0
