"""Histograms show what prometheus_client's own would."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvhandoff.router.histograms import Histograms

BOUNDS = (0.001, 0.5, 1, 60)
AMOUNTS = st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0, 100))


def page(registry: CollectorRegistry) -> str:
    return re.sub(r"(_created\{.*\}) .*", r"\1 then", generate_latest(registry).decode())


@given(st.lists(st.tuples(st.sampled_from(["pull", 'a"b\\']), AMOUNTS)))
def test_the_page_is_the_library_s(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = Histograms("h_seconds", "How long.", "path", BOUNDS, ours)
    library = Histogram("h_seconds", "How long.", ["path"], buckets=BOUNDS, registry=theirs)
    for value, amount in observed:
        histograms.observe(value, amount)
        library.labels(value).observe(amount)
    assert page(ours) == page(theirs)
