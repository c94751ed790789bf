"""What holds of the policies whatever the fleet and the request are."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import (
    BINDING_CHOICES,
    DECODE_POLICIES,
    PATH_CHOICES,
    PREFILL_POLICIES,
    BindingChoice,
    EngineCosts,
    EngineView,
    Estimate,
    FleetView,
    History,
    Policies,
    RequestSummary,
    Speed,
    expected_costs,
    tokens_of,
)
from kvhandoff.router.policy.options import PREFERENCE, Option, Term
from kvhandoff.router.policy.rebinding import choose_rebind
from tests.router.fleets import EqualEngines

MODELS = ("m", "other")


def estimates(low: float, high: float) -> st.SearchStrategy[Estimate]:
    return st.builds(Estimate, st.floats(low, high), st.integers(0, 50))


COSTS = st.builds(
    EngineCosts,
    compute_s=st.builds(Speed.same, estimates(1e-6, 1e-2)),
    read_s=estimates(1e-11, 1e-7),
    token_bytes=estimates(1e3, 1e6),
    pull_s=estimates(1e-6, 1),
    push_s=estimates(1e-6, 1),
    leg_s=estimates(1e-6, 1),
    beside_s=estimates(1e-6, 1),
)
COUNT = st.integers(0, 20)
TOKENS = st.integers(0, 100_000)


@st.composite
def engines(draw: st.DrawFn, prefix: str) -> list[EngineView]:
    made = []
    for i in range(draw(st.integers(0, 4))):
        made.append(
            EngineView(
                url=f"{prefix}{i}",
                model=draw(st.sampled_from(MODELS)),
                healthy=draw(st.booleans()),
                block_size=draw(st.sampled_from([1, 16, 128])),
                load=draw(TOKENS),
                chosen=draw(COUNT),
                waiting=draw(st.integers(0, 1)),
                room=draw(TOKENS),
                queue=draw(TOKENS),
                running=draw(COUNT),
                costs=draw(COSTS),
            )
        )
    return made


FLEETS = st.builds(FleetView, engines("p"), engines("d"), st.floats(0.01, 1.0))
URLS = st.sampled_from([f"{role}{i}" for role in "pd" for i in range(4)])
AVOID = st.sets(URLS, max_size=4)
REQUESTS = st.builds(
    RequestSummary,
    model=st.sampled_from(MODELS),
    endpoint=st.sampled_from(Endpoint),
    stream=st.booleans(),
    prompts=st.sampled_from([1, 1, 1, 2]),
    prompt_bound=TOKENS,
    prompt_exact=st.booleans(),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    cache_salt=st.just(""),
)
HISTORIES = st.none() | st.builds(History, URLS, TOKENS, st.booleans())
POLICIES = st.builds(
    Policies,
    prefill=st.sampled_from(sorted(PREFILL_POLICIES)),
    decode=st.sampled_from(sorted(DECODE_POLICIES)),
    binding=st.sampled_from(BINDING_CHOICES),
)
CACHED = st.dictionaries(URLS, TOKENS, max_size=4)


def fits(engine: EngineView, model: str) -> bool:
    return engine.healthy and engine.model == model


@given(POLICIES, FLEETS, REQUESTS, AVOID, st.none() | URLS, TOKENS, CACHED)
def test_only_healthy_engines_of_the_model(
    policies: Policies,
    fleet: FleetView,
    request: RequestSummary,
    avoid: set[str],
    holder: str | None,
    tokens: int,
    cached: dict[str, int],
) -> None:
    model = request.model
    p = policies.choose_prefill(fleet, model, avoid, tokens=tokens, cached=cached)
    free = [engine for engine in fleet.prefill if fits(engine, model) and engine.url not in avoid]
    assert p in free if free else p is Reason.NO_PREFILL_ENGINE
    d = policies.choose_decode(fleet, model, avoid, holder, tokens=tokens)
    able = [engine for engine in fleet.decode if fits(engine, model)]
    preferred = [engine for engine in able if engine.url not in avoid] or able
    assert d in preferred if preferred else d is Reason.NO_DECODE_ENGINE
    other = choose_rebind(fleet, model, "d0", tokens, avoid)
    assert other is None or (fits(other, model) and other.url not in avoid | {"d0"})


def heavier(fleet: FleetView, url: str, more: int) -> FleetView:
    def load(engines: Any) -> list[EngineView]:
        return [replace(e, load=e.load + more, queue=e.queue + more) if e.url == url else e for e in engines]

    return replace(fleet, prefill=load(fleet.prefill), decode=load(fleet.decode))


@given(FLEETS, st.none() | URLS, TOKENS, CACHED, URLS, st.integers(1, 10**6))
def test_more_load_makes_no_engine_more_attractive(
    fleet: FleetView, holder: str | None, tokens: int, cached: dict[str, int], url: str, more: int
) -> None:
    policies, after = Policies(), heavier(fleet, url, more)

    def choices(fleet: FleetView) -> set[str]:
        p = policies.choose_prefill(fleet, "m", tokens=tokens, cached=cached)
        d = policies.choose_decode(fleet, "m", (), holder, tokens=tokens)
        return {engine.url for engine in (p, d) if isinstance(engine, EngineView)}

    assert url not in choices(after) - choices(fleet)


@given(FLEETS, st.integers(1, 10**5), HISTORIES, st.integers(1, 10**5), st.integers(1, 9))
def test_more_work_makes_no_path_cheaper(
    fleet: FleetView, tokens: int, history: History | None, queue: int, running: int
) -> None:
    """A queue costs those who stand in it; each request that D runs makes a local one dearer. At one speed:
    more tokens in as many prompts are longer prompts."""
    if not fleet.prefill or not fleet.decode:
        return
    p, d = fleet.prefill[0], fleet.decode[0]
    before = expected_costs(fleet, p, d, tokens, history)
    slower = expected_costs(fleet, replace(p, queue=p.queue + queue), d, tokens, history)
    fuller = expected_costs(
        fleet, p, replace(d, queue=d.queue + queue, running=d.running + running), tokens, history
    )
    for option, cost in before.items():
        local = option.startswith("local")
        assert (slower[option].total == cost.total) if local else (slower[option].total >= cost.total)
        assert (fuller[option].total >= cost.total) if local else (fuller[option].total == cost.total)


@given(POLICIES, st.sampled_from(PATH_CHOICES), REQUESTS, FLEETS, HISTORIES, CACHED)
def test_the_choice_is_the_least_of_the_stated_costs(
    policies: Policies,
    requested: Any,
    request: RequestSummary,
    fleet: FleetView,
    history: History | None,
    cached: dict[str, int],
) -> None:
    decision = policies.choose_path(requested, request, fleet, history, cached)
    if decision.expected is None:
        return
    stated = decision.expected
    total = {name: ttft + stated.harm_s.get(name, 0.0) for name, ttft in stated.ttft_s.items()}
    assert set(total) <= set(PREFERENCE)
    returning: Option = f"{decision.path}+return"  # type: ignore[assignment]
    taken = returning if decision.returns and returning in total else decision.path
    least = min(total.values())
    assert total[taken] - least <= 2e-6  # ttft, harm and their sum are rounded apart
    assert stated.won_by is None or stated.won_by in get_args(Term)
    assert stated.prompt_tokens == tokens_of(request, fleet)
    if history is not None and history.required and returning in total:
        assert decision.returns


@given(POLICIES, st.sampled_from(PATH_CHOICES), REQUESTS, FLEETS, HISTORIES)
def test_a_path_that_hands_nothing_over_has_a_reason(
    policies: Policies, requested: Any, request: RequestSummary, fleet: FleetView, history: History | None
) -> None:
    decision = policies.choose_path(requested, request, fleet, history)
    path, reason, expected = decision.path, decision.reason, decision.expected
    if path == "local":
        assert isinstance(reason, Reason)
    assert reason is None or reason.kind is ReasonKind.CHOICE
    if path != "local":
        assert any(fits(engine, request.model) for engine in fleet.prefill)
    if expected is not None:
        barred = {"late": "push", "early": "pull", "rebind": "pull"}.get(policies.binding, "neither")
        assert not any(option.startswith(barred) for option in expected.ttft_s)


@given(
    st.integers(2, 6),
    st.lists(st.integers(1, 4000), min_size=1, max_size=40),
    st.sampled_from(["prefill", "decode"]),
)
def test_simultaneous_requests_spread(n: int, sizes: list[int], role: str) -> None:
    """Each is reserved when it is decided: none has more than another by more than one request."""
    engines, policies = EqualEngines(n), Policies()
    for tokens in sizes:
        views = engines.views()
        if role == "prefill":
            choice = policies.choose_prefill(FleetView(views, []), "m", tokens=tokens)
        else:
            choice = policies.choose_decode(FleetView([], views), "m", tokens=tokens)
        assert isinstance(choice, EngineView)
        engines.give(choice, tokens)
        assert max(engines.load) - min(engines.load) <= max(sizes)


@given(FLEETS, st.integers(1, 4000), URLS)
def test_a_move_is_not_undone_by_the_next_look(fleet: FleetView, tokens: int, present: str) -> None:
    """Under a load that stays as it is but for the move itself."""
    target = choose_rebind(fleet, "m", present, tokens)
    if target is None:
        return
    moved = [
        replace(engine, load=engine.load + tokens * ((engine.url == target.url) - (engine.url == present)))
        for engine in fleet.decode
    ]
    back = choose_rebind(replace(fleet, decode=moved), "m", target.url, tokens)
    assert back is None or back.url != present


def rebinding(waiting: int, load: int, **other: Any) -> str | None:
    fields: dict[str, Any] = {"model": "m", "healthy": True, "block_size": 16, "chosen": 0}
    here = EngineView(url="here", load=load, waiting=waiting, room=0, **fields)
    there = EngineView(url="there", **({"load": 0, "waiting": 0, "room": 100} | fields | other))
    choice = choose_rebind(FleetView([], [here, there]), "m", "here", 100)
    return choice.url if choice is not None else None


def test_when_another_decode_engine_is_clearly_better() -> None:
    assert rebinding(waiting=1, load=101) == "there"
    assert rebinding(waiting=1, load=100) is None  # it would be as busy
    assert rebinding(waiting=0, load=501) == "there"
    assert rebinding(waiting=0, load=500) is None  # its KV would be written again for too little
    assert rebinding(waiting=1, load=501, room=6) is None  # 96 tokens
    assert rebinding(waiting=1, load=501, healthy=False) is None
    assert rebinding(waiting=1, load=501, model="other") is None


def test_bindings_are_named() -> None:
    assert get_args(BindingChoice) == BINDING_CHOICES == ("auto", "early", "late", "rebind")
