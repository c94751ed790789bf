"""What a client's request has to pass before anything is chosen for it, whatever connector the engines have:
its tenant is charged, its body read and taken apart, its model known and the tenant's to use, and what it may
use at most set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvhandoff.core.errors import unavailable
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.body import Fields, check_stateless, parse_body, read_model, summarize, unknown_model
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import RequestSummary
from kvhandoff.router.records import Draft
from kvhandoff.router.token_bound import UNKNOWN_CONTEXT, token_bound
from kvhandoff.router.upstream_config import UpstreamConfig


class Serving(Protocol):
    """A fleet, of engines with whatever connector."""

    @property
    def decode(self) -> Sequence[object]:
        """Its decode engines."""

    def models(self) -> Mapping[str, int | None]:
        """Those that decode engines serve, and their contexts in tokens."""


class ReadRequest(NamedTuple):
    """What a request says."""

    fields: Fields
    """With the tenant's salt."""
    summary: RequestSummary


async def read_request(
    request: wire.Request,
    draft: Draft,
    fleet: Serving,
    config: RouterConfig | UpstreamConfig,
) -> ReadRequest:
    """Read the body, and charge the tenant for it; `draft` gets the charge and the model. `fleet`: its
    models are those by the time the body is here.

    Raises RequestError.
    """
    caller = request[CALLER]
    draft.charge = await caller.charge(draft.because)
    raw = await wire.read_body(request, config.max_body_bytes, config.timeouts.body_s)
    fields = caller.salted(parse_body(raw))
    if draft.endpoint is Endpoint.RESPONSES:
        check_stateless(fields)
    summary = summarize(fields, draft.endpoint)
    every = fleet.models()
    if not every:
        why = "no decode engine has answered as one yet; GET /ready tells operators what is wrong with each"
        if not fleet.decode:
            why = "the fleet has no decode engine"
        raise unavailable(why, code=Reason.NO_DECODE_ENGINE)
    served, model = caller.models(every), summary.model
    if model not in served:
        model = read_model(fields, ", ".join(sorted(served)))
        caller.check_model(model)
        raise unknown_model(model, served)
    draft.model = model
    if draft.charge.counts_tokens:
        await draft.charge.reserve(token_bound(fields, summary, served[model] or UNKNOWN_CONTEXT))
    return ReadRequest(fields, summary)
