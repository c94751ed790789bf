"""How long a token takes to compute, learned apart for each length of what stands before it: a value.

Attention reads all of it, so that a token late in a long prompt costs several times an early one: with
SmolLM2-135M on two cores 1.3 ms a token over a prompt of 1,000 tokens, 3.6 ms over one of 8,000, and 7 ms for
a turn of 100 after those. A short prompt pays for its steps more than for its tokens. One figure for all
lengths is wrong for most of them. The bands double, as what is to be told apart does; of a band that has not
been measured, the nearest one that has speaks.
"""

from __future__ import annotations

import msgspec

from kvhandoff.router.policy.estimates import Estimate

FIRST = 64
"""Tokens: the first band ends here, each other one at twice the end of the one before it."""
BANDS = 12
"""The last has no end."""


class Speed(msgspec.Struct, frozen=True):
    """Seconds per token by band."""

    bands: tuple[Estimate, ...]
    measured: tuple[int, ...] = ()
    """Those that have been, in order."""
    speaks: tuple[int, ...] = tuple(range(BANDS))
    """For each band: the one that speaks for it."""

    @classmethod
    def same(cls, estimate: Estimate) -> Speed:
        """Whatever stands before."""
        return cls((estimate,) * BANDS, tuple(range(BANDS)) if estimate.n else ())

    @property
    def n(self) -> int:
        """Observations in all."""
        return sum(estimate.n for estimate in self.bands)

    def at(self, context: float) -> Estimate:
        """For a token with so many before it; over a run of tokens, take those before the middle one."""
        return self.of(band(context))

    def of(self, number: int) -> Estimate:
        """For a token of this band."""
        return self.bands[self.speaks[number]]

    def observe(self, context: float, value: float) -> Speed:
        """With one more observation; the first one of a band starts from what was thought of it."""
        number = band(context)
        known = self.bands[number]
        start, measured, speaks = known, self.measured, self.speaks
        if not known.n:
            start = Estimate(self.of(number).value, 0, known.above)
            measured = tuple(sorted((*measured, number)))
            speaks = tuple(min(measured, key=lambda each: abs(each - other)) for other in range(BANDS))
        bands = (*self.bands[:number], start.observe(value), *self.bands[number + 1 :])
        return Speed(bands, measured, speaks)


def band(context: float) -> int:
    """Where a token with so many before it belongs."""
    return min(int(context // FIRST).bit_length(), BANDS - 1)
