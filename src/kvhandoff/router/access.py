"""Who calls, and what of the router that caller may have.

    /health                                        anybody
    registrations                                  engines: each is signed with the cluster key
    what a worker has been told                    its siblings, at its side door
    completions, models, records of one's own      a tenant's key
    all else: rebind, /ready, /metrics, …          an operator's key; the file may open the last two

A page that has no row here needs an operator's key, so that a new one is not open by oversight. Without a
file of tenants everything is open: everybody is an operator, of the tenant "".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.router import wire
from kvhandoff.router.body import Fields
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.limits import Charge, Limits, Meter, SharedCounts
from kvhandoff.router.security import Security
from kvhandoff.router.tenants import Tenant, Tenants, read_tenants, salted
from kvhandoff.router.watched import Watched

_Value = TypeVar("_Value")

OPEN = frozenset({"/health", "/openapi.json", "/internal/engines", "/internal/worker"})
CLIENTS = frozenset(
    {
        *(endpoint.path for endpoint in Endpoint),
        "/v1/models",
        "/v1/models/{id}",
        "/v1/handoffs",
        "/v1/handoffs/{id}",
    }
)
"""Pages for tenants: each answers with what is the tenant's own."""


class Caller:
    """Whoever sent a request."""

    def __init__(self, tenant: Tenant | None, meter: Meter) -> None:
        self.name = tenant.name if tenant is not None else ""
        """The tenant's."""
        self.operator = tenant is None or tenant.role == "operator"
        self._tenant = tenant
        self._meter = meter

    def sees(self, name: str) -> bool:
        """Whether a tenant's records are for this caller."""
        return self.operator or name == self.name

    def models(self, served: Mapping[str, _Value]) -> Mapping[str, _Value]:
        """Those that it may use."""
        allowed = self._allowed
        if allowed is None:
            return served
        return {name: value for name, value in served.items() if name in allowed}

    def check_model(self, name: str) -> None:
        """Raises RequestError (403) for a model that it may not use, whether there is one or not."""
        allowed = self._allowed
        if allowed is not None and name not in allowed:
            raise RequestError(
                f"model: got {name[:80]!r}, allowed for {self.name} is {', '.join(allowed) or 'none'}",
                status=403,
                param="model",
                code="model_not_allowed",
                kind="permission_error",
            )

    def salted(self, fields: Fields) -> Fields:
        """The body with the tenant's salt in it. Raises RequestError."""
        return fields if self._tenant is None else salted(fields, self._tenant)

    def charge(self, on_reason: Callable[[Reason], None]) -> Awaitable[Charge]:
        """For one more request; see `Meter.open`."""
        return self._meter.open(on_reason)

    @property
    def _allowed(self) -> tuple[str, ...] | None:
        return self._tenant.models if self._tenant is not None else None


CALLER = wire.Key("caller", Caller)
"""In every request that a handler gets."""


class _Known(NamedTuple):
    """What the file says."""

    tenants: Tenants
    callers: Mapping[str, Caller]
    """By their tenants' names."""


class Access:
    """Asks every request for its key. Used on the event loop's thread only."""

    def __init__(
        self,
        security: Security,
        clock: Clock,
        on_refused: Callable[[str], None],
        shared: SharedCounts | None = None,
        *,
        share: int = 1,
    ) -> None:
        """`shared`: what tenants use of all routers; without it, `share` says of how many processes this is
        one, and each has that part of every limit. Raises ConfigError when the file of tenants can't be used.
        """
        self._share = 1 if shared is not None else share
        self._clock = clock
        self._shared = shared
        self._on_refused = on_refused
        self._meters: dict[str, Meter] = {}
        self._anybody = Caller(None, Meter("", Limits(), clock))
        path = security.tenants
        self.file = (
            None
            if path is None
            else Watched("tenants", [path], lambda contents: self._know(read_tenants(path, *contents)))
        )

    def admit(self, request: wire.Request) -> None:
        """Note in the request who its caller is, who may have its page. Raises RequestError: 401, or 403."""
        try:
            request[CALLER] = self._admit(request)
        except RequestError as error:
            self._on_refused(error.code or "")
            raise

    def _admit(self, request: wire.Request) -> Caller:
        if request.method == "POST" and request.page not in CLIENTS and "Origin" in request.headers:
            # A browser sends simple requests for any page that it shows, and says so with this header.
            why = "Origin: got one, allowed is none: orders to a router are not taken from web pages"
            raise RequestError(why, status=403, code="cross_origin")
        if self.file is None:
            return self._anybody
        tenants, callers = self.file.value
        page = request.page
        if page in OPEN or (page is not None and page.removeprefix("/") in tenants.open_pages):
            return self._anybody
        caller = callers[_tenant_of(request, tenants).name]
        if not caller.operator and page is not None and page not in CLIENTS:
            raise RequestError(
                f"{request.method} {request.path}: got the key of {caller.name}, allowed is an operator's",
                status=403,
                code="operator_only",
                kind="permission_error",
            )
        return caller

    def _know(self, tenants: Tenants) -> _Known:
        """A tenant's use goes on under its new limits; one that is gone is forgotten."""
        before, self._meters, callers = self._meters, {}, {}
        for tenant in tenants:
            limits = Limits(tenant.max_concurrency, tenant.tokens_per_minute)
            meter = before.get(tenant.name) or Meter(
                tenant.name, limits, self._clock, self._shared, processes=self._share
            )
            meter.limits = limits
            self._meters[tenant.name] = meter
            callers[tenant.name] = Caller(tenant, meter)
        return _Known(tenants, callers)


def _tenant_of(request: wire.Request, tenants: Tenants) -> Tenant:
    """By the key in `Authorization: Bearer KEY`. Raises RequestError (401), which shows nothing of it."""
    given = request.headers.getall("Authorization", [])
    scheme, _, key = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("no API key: allowed is one header `Authorization: Bearer KEY`")
    tenant = tenants.of(key.strip())
    if tenant is None:
        raise _unauthorized("the API key is not known here")
    return tenant


def _unauthorized(message: str) -> RequestError:
    return RequestError(
        message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": 'Bearer realm="kvhandoff"'}
    )
