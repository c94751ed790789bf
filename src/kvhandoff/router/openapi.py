"""`GET /openapi.json`: the router's API as it describes itself, in OpenAPI 3.1.

The pages that a router has decide what is in its document, so that none is missing and none is made up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

import kvhandoff
from kvhandoff.router import wire
from kvhandoff.router.access import CLIENTS, OPEN
from kvhandoff.router.openapi_pages import COMPONENTS, OPERATIONS, TYPES, Operation, Page, Schema, ref

PATH: Final = "/openapi.json"
TITLE: Final = "kvhandoff router"


def with_description(routes: Iterable[wire.RouteDef], *, keys: bool) -> list[wire.RouteDef]:
    """These pages, and one that describes them all. `keys`: callers need one. Raises LookupError for a page
    of which nothing is known here."""
    routes = list(routes)
    pages = [*map(_page_of, routes), ("GET", PATH)]
    body = msgspec.json.encode(document(pages, keys=keys))

    async def description(request: wire.Request) -> wire.Response:
        return wire.Response(body=body, content_type="application/json")

    return [*routes, wire.get(PATH, description)]


def document(pages: Iterable[Page], *, keys: bool) -> dict[str, Any]:
    """The OpenAPI document of a router that has these pages. Raises LookupError."""
    paths: dict[str, Schema] = {}
    for method, path in pages:
        operation = OPERATIONS[method, path]
        paths.setdefault(path, {})[method.lower()] = _described(operation, path, keys)
    _, schemas = msgspec.json.schema_components(TYPES, ref_template="#/components/schemas/{name}")
    components: Schema = {"schemas": {**COMPONENTS, **schemas}}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": kvhandoff.__version__,
            "description": "OpenAI's API in front of prefill and decode engines.",
        },
        "paths": paths,
        "components": components,
    }


def _page_of(route: wire.RouteDef) -> Page:
    return route.method, re.sub(r":[^{}]*}", "}", route.path)  # "{id:.+}" is "{id}"


def _described(operation: Operation, path: str, keys: bool) -> Schema:
    keyed = keys and path not in OPEN
    refusals = {**operation.refusals, "500": "`internal_error`: a fault of the router's own; it is logged."}
    if keyed:
        refusals |= {"401": "`invalid_api_key`."}
        forbidden = "`model_not_allowed`." if path in CLIENTS else "`operator_only`."
        refusals["403"] = operation.refusals.get("403", forbidden)
        if operation.body is not None and path in CLIENTS:
            refusals["429"] = "`rate_limit_exceeded`: one of the tenant's limits."
    answers = {
        status: {"description": description, "content": content, "headers": operation.headers}
        for status, (description, content) in operation.answers.items()
    }
    described: Schema = {
        "summary": operation.summary,
        "description": operation.description,
        "parameters": list(operation.parameters),
        "responses": answers | {status: _refusal(status, why) for status, why in sorted(refusals.items())},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body}}
        described["requestBody"] = {"required": operation.needs_body, "content": content}
    if keyed:
        described["security"] = [{"key": []}]
    return {name: value for name, value in described.items() if value not in ("", [])}


_HEADERS_OF: Final[dict[str, Schema]] = {
    "401": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    "429": {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "string"}}},
}


def _refusal(status: str, why: str) -> Schema:
    error = ref("EngineError" if status == "4XX" else "Error")
    content = {"application/json": {"schema": error}}
    return {"description": why, "content": content, "headers": _HEADERS_OF.get(status, {})}
