"""A metric of histograms that takes what requests observe a dozen of each."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histograms(Collector):
    """A histogram for each value of one label, shown as prometheus_client's own are.

    Those take two locks for an observation, and go through their buckets. These are used on the event loop's
    thread only.
    """

    def __init__(
        self, name: str, documentation: str, label: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`bounds`: of the buckets, ascending; each has its own."""
        self._name = name
        self._documentation = documentation
        self._labelnames = (label,)
        self._bounds = bounds
        self._of: dict[str, _Histogram] = {}
        registry.register(self)

    def observe(self, value: str, amount: float) -> None:
        """One more, under this value of the label."""
        histogram = self._of.get(value)
        if histogram is None:
            histogram = self._of[value] = _Histogram(len(self._bounds) + 1)
        histogram.counts[bisect_left(self._bounds, amount)] += 1
        histogram.sum += amount

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What the page shows."""
        family = self._family()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for value, histogram in self._of.items():
            buckets = list(zip(names, accumulate(histogram.counts), strict=True))
            family.add_metric([value], buckets, histogram.sum)
            family.add_sample(
                f"{self._name}_created", dict(zip(self._labelnames, [value], strict=True)), histogram.created
            )
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """What the registry knows its names by."""
        yield self._family()

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)


class _Histogram:
    __slots__ = ("counts", "created", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        """By bucket, the smaller ones' not included."""
        self.sum = 0.0
        self.created = time.time()
