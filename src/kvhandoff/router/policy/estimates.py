"""A running estimate of one positive quantity, such as seconds per token: a value; observing gives another.

It is a weighted mean of logarithms, so that a factor of two up and one down weigh the same and no scale has
to be known. Three things make it usable on engines that are never measured alone:

- each observation counts at least ALPHA, so that old ones fade exponentially and a changed engine is learned
  again within some 1/ALPHA legs; the first ones count more, and a prior stands for PRIOR_WEIGHT of them;
- an observation is taken for no more than CLIP times, or a CLIP-th of, the present value: a leg that was
  held up for a minute is one clipped observation;
- then, one above the estimate counts a quarter of one below it (an expectile; Newey and Powell, "Asymmetric
  least squares estimation and testing", Econometrica 55, 1987). What other requests add to a leg's time is
  the queue's account, which the cost model has already; the estimate is to be near what a leg takes
  undisturbed.
"""

from __future__ import annotations

import math

import msgspec

ALPHA = 0.1
PRIOR_WEIGHT = 1
CLIP = 8.0
ABOVE = 0.25
"""Weight of an observation above the estimate, against one below it."""
_FLOOR = 1e-12


class Estimate(msgspec.Struct, frozen=True):
    """`value`, from `n` observations; of none, it is the prior."""

    value: float
    n: int = 0
    above: float = ABOVE
    """Weight of an observation above it; 1 for what nothing disturbs."""

    def observe(self, value: float) -> Estimate:
        """The estimate with one more observation, 0 or more; 0 counts as a CLIP-th of the estimate."""
        lowest, highest = self.value / CLIP, self.value * CLIP
        clipped = max(min(value, highest), lowest, _FLOOR)
        share = 1 / (self.n + 1 + PRIOR_WEIGHT)
        if share < ALPHA:
            share = ALPHA * self.above if clipped > self.value else ALPHA
        value = self.value * math.exp(share * math.log(clipped / self.value))
        return Estimate(value, self.n + 1, self.above)
