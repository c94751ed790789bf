"""What each path of a request is expected to cost: the cost model.

With `q` the tokens that an engine computes first, `n` those of this prompt that it computes itself, `m` those
whose KV moves forward, `h` those that return, and an engine's measured costs (`costs.py`):

    queue           q × compute_s, of its mean prompt           of the engine that computes the prompt
    compute         n × compute_s, at their middle
    return          pull_s + h × token_bytes × read_s           of the same, with the history fetched
    wire      pull  m × token_bytes × read_s                    of the decode engine
              push  of the last chunk, or of what can't be hidden behind computing if that is more
    coordination    pull  leg_s + pull_s      push  beside_s + push_s      local  nothing
    harm      local n × compute_s × requests on the decode engine, one at least

The first five add up to the expected time to the first token, less what all paths have in common. Harm is the
time by which running requests get their tokens later: while the decode engine computes a prompt they wait, or
take its steps at a prompt's pace. At least one is assumed, since a decode engine is there for the requests
that come meanwhile. A second that another request waits counts as much as one that this one waits.

What an engine has not been measured at is taken from those of its model that have, and else from the prior.
A queue counts from when it is known how fast tokens are computed: a prior is good for proportions only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import msgspec

from kvhandoff.router.policy.costs import EngineCosts
from kvhandoff.router.policy.estimates import Estimate
from kvhandoff.router.policy.requested import Path
from kvhandoff.router.policy.speed import BANDS, band
from kvhandoff.router.policy.views import EngineView, FleetView, History

CHUNK = 512
"""Tokens of a prefill chunk. The embedded engine's; vLLM's are larger, so that less of a write is hidden than
is assumed here, which the measured `push_s` makes good."""

Option = Literal["local", "local+return", "pull", "pull+return", "push", "push+return"]
Term = Literal["queue", "compute", "return", "wire", "coordination", "harm"]
TERMS: tuple[Term, ...] = get_args(Term)

PREFERENCE: tuple[Option, ...] = (
    "local",
    "local+return",
    "pull+return",
    "pull",
    "push+return",
    "push",
)
"""Of options that cost the same: the one with fewest engines; then the decode engine that is chosen later,
which is a better choice; then the one that computes less."""


class Cost(NamedTuple):
    """Seconds, by term."""

    queue: float = 0.0
    compute: float = 0.0
    returning: float = 0.0
    wire: float = 0.0
    coordination: float = 0.0
    harm: float = 0.0

    @property
    def total(self) -> float:
        """What the choice is by; whole microseconds, as stated in records."""
        return round(sum(self), 6)

    @property
    def ttft(self) -> float:
        return round(sum(self[:-1]), 6)


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What was expected of a request when its path was chosen."""

    prompt_tokens: int
    text_bytes: int | None
    """Of the prompt, where its tokens are only estimated from them."""
    ttft_s: dict[Option, float]
    """Seconds to the first token by each path that could be taken, less what is common to all of them."""
    harm_s: dict[Option, float]
    """Seconds by which requests on the decode engine would get their tokens later; absent: none."""
    won_by: Term | None
    """In what the chosen path is better than the next best one, most of all; None: there was no other, or
    the two cost the same."""


class Weighed(NamedTuple):
    """What the options of a request cost, and the one that was taken."""

    prompt_tokens: int
    text_bytes: int | None
    costs: Mapping[Option, Cost]
    taken: Option

    def expected(self) -> Expected:
        """As it stands in the record."""
        return Expected(
            prompt_tokens=self.prompt_tokens,
            text_bytes=self.text_bytes,
            ttft_s={name: cost.ttft for name, cost in self.costs.items()},
            harm_s={name: round(cost.harm, 6) for name, cost in self.costs.items() if cost.harm},
            won_by=won_by(self.costs, self.taken),
        )


def cheapest(costs: Mapping[Option, Cost]) -> Option:
    """The one that costs least; of several, the first in PREFERENCE. There is one at least."""
    best, least = PREFERENCE[0], math.inf
    for option in PREFERENCE:
        cost = costs.get(option)
        if cost is not None and (total := cost.total) < least:
            best, least = option, total
    return best


def won_by(costs: Mapping[Option, Cost], option: Option) -> Term | None:
    """The term in which it is furthest below the best of the others."""
    others = {name: cost for name, cost in costs.items() if name != option}
    if not others:
        return None
    ours, rival = costs[option], others[cheapest(others)]
    if rival.total == ours.total:
        return None
    gains = list(map(operator.sub, rival, ours))
    return TERMS[gains.index(max(gains))]


def expected_costs(
    fleet: FleetView,
    prefill: EngineView,
    decode: EngineView,
    tokens: int,
    history: History | None = None,
    *,
    cached: int = 0,
    paths: tuple[Path, ...] = ("local", "pull", "push"),
) -> dict[Option, Cost]:
    """Of a prompt of `tokens`, by these two engines; `cached`: how many of them the prefill engine is
    believed to have. Without a return, the history's holder still has it in its own cache."""
    model = _Model(fleet, prefill, decode, tokens, cached, history)
    costs: dict[Option, Cost] = {}
    for path in paths:
        can_return = model.can_return(path)
        if not (can_return and model.required):
            costs[path] = model.cost(path, returning=False)
        if can_return:
            costs[_with_return(path)] = model.cost(path, returning=True)
    return costs


def _with_return(path: Path) -> Option:
    names: dict[Path, Option] = {"local": "local+return", "pull": "pull+return", "push": "push+return"}
    return names[path]


class _Model:
    """One request and its two engines."""

    def __init__(
        self,
        fleet: FleetView,
        prefill: EngineView,
        decode: EngineView,
        tokens: int,
        cached: int,
        history: History | None,
    ) -> None:
        model = decode.model
        every = (*fleet.prefill, *fleet.decode)
        alike = tuple([engine.costs for engine in every if engine.healthy and engine.model == model])
        self._prefill, self._at_p = prefill, _figures(prefill.costs, alike)
        self._decode, self._at_d = decode, _figures(decode.costs, alike)
        self._tokens = tokens
        kept = min(history.tokens, tokens - 1) if history is not None else 0
        held = history is not None and history.holder == decode.url
        self._kept = kept
        self.required = history is not None and history.required
        # Tokens that need no computing and no moving where they are; the last one is always computed.
        self._in_decode = kept if held else 0
        self._in_prefill = min(cached, tokens - 1)

    def can_return(self, path: Path) -> bool:
        """Whether the engine that computes the prompt gains by the history."""
        return self._kept > (self._in_decode if path == "local" else self._in_prefill)

    def cost(self, path: Path, *, returning: bool) -> Cost:
        engine, figures, own = self._prefill, self._at_p, self._in_prefill
        if path == "local":
            engine, figures, own = self._decode, self._at_d, self._in_decode
        returned = self._kept - own if returning else 0
        computed = self._tokens - own - returned
        computing = computed * figures.token_s[band(own + returned + computed / 2)]
        queue = _queue_s(engine, figures) if engine.queue else 0.0
        return_s = figures.pull_s + returned * figures.kv_s if returning else 0.0
        if path == "local":
            return Cost(queue, computing, return_s, harm=computing * max(1, engine.running))
        there, moved = self._at_d, self._tokens - self._in_decode
        if path == "pull":
            return Cost(queue, computing, return_s, moved * there.kv_s, figures.leg_s + there.pull_s)
        exposed = max(min(moved, CHUNK) * there.kv_s, moved * there.kv_s - computing)
        return Cost(queue, computing, return_s, exposed, figures.beside_s + there.push_s)


def _queue_s(engine: EngineView, figures: _Figures) -> float:
    """Until it has computed what it has yet to, where it is known how fast it does."""
    if not figures.measured:
        return 0.0
    return engine.queue * figures.token_s[band(engine.queue / max(1, engine.running) / 2)]


class _Figures(NamedTuple):
    """What an engine takes, as far as anybody knows; seconds."""

    token_s: Sequence[float]
    """To compute a token, by band: as it was measured, or else engines like it."""
    measured: bool
    """Whether any of them has been."""
    kv_s: float
    """For a token's KV to be read into it."""
    pull_s: float
    push_s: float
    leg_s: float
    beside_s: float


@lru_cache(maxsize=64)
def _figures(own: EngineCosts, alike: tuple[EngineCosts, ...]) -> _Figures:
    """`alike`: the costs of the engines of its model. They change with the engines' reports, and many
    requests are weighed between two."""

    def known(quantity: _Quantity) -> float:
        if quantity(own).n:
            return quantity(own).value
        theirs = [quantity(costs).value for costs in alike if quantity(costs).n]
        return _mean(theirs) if theirs else quantity(own).value

    speeds = [costs.compute_s for costs in alike if costs.compute_s.measured]
    if own.compute_s.measured or not speeds:
        speeds = [own.compute_s]
    return _Figures(
        [_mean([speed.of(number).value for speed in speeds]) for number in range(BANDS)],
        bool(speeds[0].measured),
        known(_TOKEN_BYTES) * known(_READ_S),
        known(_PULL_S),
        known(_PUSH_S),
        known(_LEG_S),
        known(_BESIDE_S),
    )


def _mean(known: Sequence[float]) -> float:
    """The geometric one."""
    return known[0] if len(known) == 1 else math.exp(sum(map(math.log, known)) / len(known))


_Quantity = Callable[[EngineCosts], Estimate]

_LEG_S: _Quantity = operator.attrgetter("leg_s")
_BESIDE_S: _Quantity = operator.attrgetter("beside_s")
_PULL_S: _Quantity = operator.attrgetter("pull_s")
_PUSH_S: _Quantity = operator.attrgetter("push_s")
_READ_S: _Quantity = operator.attrgetter("read_s")
_TOKEN_BYTES: _Quantity = operator.attrgetter("token_bytes")
