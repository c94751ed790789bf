"""The path of a request: local if nothing can be handed over, else the one asked for, else the cheapest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvhandoff.core.reasons import Reason
from kvhandoff.router.policy import decode as decode_policies
from kvhandoff.router.policy import prefill as prefill_policies
from kvhandoff.router.policy.decode import DecodePolicy
from kvhandoff.router.policy.options import Expected, Option, Weighed, cheapest, expected_costs
from kvhandoff.router.policy.prefill import NOTHING_CACHED, PrefillPolicy
from kvhandoff.router.policy.rebinding import has_room
from kvhandoff.router.policy.requested import BindingChoice, Path, PathChoice
from kvhandoff.router.policy.views import EngineView, FleetView, History, RequestSummary, tokens_of

MIN_RETURN_TOKENS = 64
"""A history of fewer tokens is computed again: what engines fetch by default."""


class PathDecision(NamedTuple):
    """A path, and why it is this one."""

    path: Path
    reason: Reason | None
    """None when it is the usual one: the cheaper of the two that hand over."""
    returns: bool = True
    """Whether the history, if there is one, is fetched."""
    weighed: Weighed | None = None
    """What the options cost, where that decided."""
    source: EngineView | None = None
    """The prefill engine that was chosen on the way."""

    @property
    def expected(self) -> Expected | None:
        """What the options were expected to cost, where that decided."""
        return self.weighed.expected() if self.weighed is not None else None


def choose_path(
    requested: PathChoice,
    request: RequestSummary,
    fleet: FleetView,
    history: History | None = None,
    *,
    binding: BindingChoice = "auto",
    cached: Mapping[str, int] = NOTHING_CACHED,
    choose_prefill: PrefillPolicy = prefill_policies.least_work,
    choose_decode: DecodePolicy = decode_policies.least_work,
) -> PathDecision:
    """The path of a request; `cached`: tokens of its prompt that a prefill engine (URL) is believed to have.

    `auto` takes the option that costs least (`options.py`), by the engines that would be chosen now. A prompt
    of one block stays local without more ado: only whole blocks are handed over.
    """
    if request.prompts > 1:
        # A handoff moves one prompt's KV.
        return PathDecision("local", Reason.SEVERAL_PROMPTS)
    if request.prompt_logprobs:
        # They come out of computing every token of the prompt on the engine that answers.
        return PathDecision("local", Reason.PROMPT_LOGPROBS)
    if requested == "local":
        return PathDecision("local", Reason.FORCED)
    tokens = tokens_of(request, fleet)
    source = choose_prefill(fleet, request.model, tokens=tokens, cached=cached)
    if isinstance(source, Reason):
        return PathDecision("local", source)
    if requested != "auto":
        return PathDecision(requested, Reason.FORCED, source=source)
    if tokens <= source.block_size:
        return PathDecision("local", Reason.SHORT_PROMPT)
    holder = history.holder if history is not None else None
    target = choose_decode(fleet, request.model, holder=holder, tokens=tokens)
    if isinstance(target, Reason):
        # One may be up when it is bound, which is tried until then.
        return PathDecision("push" if binding in ("early", "rebind") else "pull", None, source=source)
    paths = _paths(binding, target, tokens)
    costs = expected_costs(
        fleet, source, target, tokens, history, cached=cached.get(source.url, 0), paths=paths
    )
    weighed = Weighed(tokens, None if request.prompt_exact else request.prompt_bound, costs, cheapest(costs))
    return _decide(weighed, source, history)


def _paths(binding: BindingChoice, target: EngineView, tokens: int) -> tuple[Path, ...]:
    """Those that the binding allows."""
    if binding == "late":
        return ("local", "pull")
    if binding in ("early", "rebind"):
        return ("local", "push")
    # An engine without room could not grant its blocks in time; by the end of prefill there may be some.
    return ("local", "pull", "push") if has_room(target, tokens) else ("local", "pull")


def _decide(weighed: Weighed, source: EngineView, history: History | None) -> PathDecision:
    path = _PATHS[weighed.taken]
    # The history stays where it is if fetching it was an option, and the same path without it costs less.
    declined = weighed.taken == path and f"{path}+return" in weighed.costs
    returns = history is None or not declined
    reason = Reason.LOCAL_CHEAPER if path == "local" else None
    return PathDecision(path, reason, returns, weighed, source)


_PATHS: dict[Option, Path] = {
    "local": "local",
    "local+return": "local",
    "pull": "pull",
    "pull+return": "pull",
    "push": "push",
    "push+return": "push",
}


def choose_return(requested: str, n_tokens: int) -> Reason | None:
    """Why a history of at most `n_tokens` tokens is not fetched; None: it may be."""
    too_short = requested == "auto" and n_tokens < MIN_RETURN_TOKENS
    return Reason.RETURN_TOO_SHORT if too_short else None
