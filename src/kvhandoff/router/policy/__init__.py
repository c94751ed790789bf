"""Which path, which engines: pure functions of what is known of the fleet and of the request.

    views       what a policy may know            estimates, speed    what is learned of an engine
                                                  costs               and all of it together
    prefill     choice of P                       options             what each path is expected to cost
    decode      choice of D                       path                the choice of path and return
    rebinding   another D before the answer       registry            all of them by name

A simulator calls the same ones. Each returns its choice and, where the request takes another path than it
might have, the reason; where no engine can be chosen, the reason is the answer. What has been learned is part
of the view, as a value.
"""

from kvhandoff.router.policy.costs import UNMEASURED, EngineCosts, learn, learn_leg
from kvhandoff.router.policy.estimates import Estimate
from kvhandoff.router.policy.options import Expected, Weighed, expected_costs
from kvhandoff.router.policy.path import PathDecision, choose_return
from kvhandoff.router.policy.registry import DECODE_POLICIES, PREFILL_POLICIES, Policies
from kvhandoff.router.policy.requested import (
    BINDING_CHOICES,
    PATH_CHOICES,
    PATH_HEADER,
    RETURN_CHOICES,
    RETURN_HEADER,
    BindingChoice,
    Path,
    PathChoice,
    ReturnChoice,
    requested_path,
    requested_return,
)
from kvhandoff.router.policy.speed import Speed
from kvhandoff.router.policy.views import (
    TYPICAL_TOKENS,
    EngineView,
    FleetView,
    History,
    RequestSummary,
    tokens_of,
)

__all__ = [
    "BINDING_CHOICES",
    "DECODE_POLICIES",
    "PATH_CHOICES",
    "PATH_HEADER",
    "PREFILL_POLICIES",
    "RETURN_CHOICES",
    "RETURN_HEADER",
    "TYPICAL_TOKENS",
    "UNMEASURED",
    "BindingChoice",
    "EngineCosts",
    "EngineView",
    "Estimate",
    "Expected",
    "FleetView",
    "History",
    "Path",
    "PathChoice",
    "PathDecision",
    "Policies",
    "RequestSummary",
    "ReturnChoice",
    "Speed",
    "Weighed",
    "choose_return",
    "expected_costs",
    "learn",
    "learn_leg",
    "requested_path",
    "requested_return",
    "tokens_of",
]
