"""What each page of the router takes and answers, as data for `openapi.py`.

Bodies that are read into types are described by these types. Of what is only passed on, the fields stand here
that this router reads, and those without which every engine refuses a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvhandoff.router.drain import DrainOrder
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.moves import Rebound
from kvhandoff.router.names import HEADERS as CONVERSATION_HEADERS
from kvhandoff.router.policy import PATH_CHOICES, PATH_HEADER, RETURN_CHOICES, RETURN_HEADER
from kvhandoff.router.rebind import RebindOrder
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.registrations import SignedRegistration

Schema = dict[str, Any]
"""A JSON Schema, or a part of an OpenAPI document."""
Page = tuple[str, str]
"""(method, path), e.g. ("GET", "/v1/models/{id}")."""

TYPES: Final = (DrainOrder, RebindOrder, Rebound, RequestRecord, SignedRegistration)
"""Whose schemas are components of the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One page."""

    summary: str
    description: str = ""
    parameters: tuple[Schema, ...] = ()
    body: Schema | None = None
    """Of JSON."""
    needs_body: bool = True
    answers: Mapping[str, tuple[str, Schema]]
    """By status: (description, content by media type)."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """By status: when. Those that any page may answer with come on top."""
    headers: Schema = field(default_factory=dict)
    """Of its answers."""


def ref(name: str) -> Schema:
    """A component of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(kind: str, description: str = "") -> Schema:
    return {"type": [kind, "null"]} | ({"description": description} if description else {})


def _header(name: str, description: str, **schema: Any) -> Schema:
    return {
        "name": name,
        "in": "header",
        "description": description,
        "schema": {"type": "string", **schema},
    }


_ERROR_TEXTS: Final = {"message": {"type": "string"}, "type": {"type": "string"}}

COMPONENTS: Final[Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    **_ERROR_TEXTS,
                    "param": _nullable("string", "The field, or header, that can't be used."),
                    "code": _nullable("string", "One word for programs."),
                },
                *("message", "type", "param", "code"),
                additionalProperties=False,
            )
        },
        "error",
        additionalProperties=False,
        description="An error, as OpenAI clients read it.",
    ),
    "EngineError": _object(
        {"error": _object(_ERROR_TEXTS, "message")},
        "error",
        description="An engine's own error, as it is.",
    ),
    "Model": _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer", "description": "Tokens of prompt and answer together."},
        },
        *("id", "object", "created", "owned_by"),
    ),
    "Engine": _object(
        {
            "url": {"type": "string"},
            "engine_id": _nullable("string"),
            "role": {"enum": ["prefill", "decode"]},
            "healthy": {"type": "boolean"},
            "problem": _nullable("string", "Why it gets no legs."),
            "rests": {"type": "boolean", "description": "It is avoided for a while, as its legs failed."},
            "transfer_mode": _nullable("string", "Of upstream's connectors: what the engine says it runs."),
            "draining": {"type": "boolean", "description": "It gets no new legs."},
            "drained": {"type": "boolean", "description": "It can be stopped."},
            "legs": {"type": "integer", "description": "Of this router, under way."},
        },
        *("url", "role", "healthy", "problem"),
    ),
}
"""Beside those of `TYPES`."""


# ---- requests for an answer ----

_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_FIELDS: Final[Schema] = {
    "model": {"type": "string", "description": "One of GET /v1/models."},
    "stream": {"type": ["boolean", "null"], "description": "Server-sent events instead of one body."},
    "cache_salt": _TEXT_OR_NULL | {"description": "KV is reused only under the same salt."},
    "conversation_id": _TEXT_OR_NULL | {"description": "Names the conversation; engines never see it."},
    "prompt_cache_key": _TEXT_OR_NULL | {"description": "The same, OpenAI's field."},
    "kv_transfer_params": {"description": "Dropped: a client can't steer a transfer."},
}
_MESSAGES: Final = _array({"type": "object"}) | {"minItems": 1}
_PROMPT: Final[Schema] = {
    "description": "A text, token ids, or several of either.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        *(_array(item) | {"minItems": 1} for item in ({"type": "string"}, {"type": "integer", "minimum": 0})),
        _array(_array({"type": "integer", "minimum": 0}) | {"minItems": 1}) | {"minItems": 1},
    ],
}
_NOT_KEPT: Final = "Allowed is null: no response is stored."
_RESPONSE_FIELDS: Final[Schema] = {
    "input": {"anyOf": [{"type": "string", "minLength": 1}, _MESSAGES]},
    "previous_response_id": {"type": "null", "description": _NOT_KEPT},
    "conversation": {"type": "null", "description": _NOT_KEPT},
    "background": {"enum": [None, False], "description": _NOT_KEPT},
}
_INPUTS: Final[Mapping[Endpoint, Schema]] = {
    Endpoint.CHAT: {"messages": _MESSAGES},
    Endpoint.COMPLETIONS: {"prompt": _PROMPT},
    Endpoint.RESPONSES: _RESPONSE_FIELDS,
}
_OBJECTS: Final = {
    Endpoint.CHAT: "chat.completion",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "response",
}

_ROUTING: Final = (
    _header(PATH_HEADER, "The path that this request takes.", enum=list(PATH_CHOICES)),
    _header(RETURN_HEADER, "Whether its conversation's history is fetched and kept.", enum=[*RETURN_CHOICES]),
    *(_header(name, "Names the conversation.") for name in CONVERSATION_HEADERS),
)
_REQUEST_ID: Final[Schema] = {
    "X-Request-Id": {
        "description": "The handoff's id; under it is the record, GET /v1/handoffs/{id}.",
        "schema": {"type": "string"},
    }
}


def _ask(endpoint: Endpoint, summary: str, **refusals: str) -> Operation:
    whole = _object({"id": {"type": "string"}, "object": {"type": "string"}}, "id")
    return Operation(
        summary=summary,
        description="Fields that are not listed here are the engines' and passed on, vLLM's too.",
        parameters=_ROUTING,
        body=_object(
            {**_FIELDS, **_INPUTS[endpoint]},
            *("model", endpoint.input_field),
            additionalProperties=True,
        ),
        answers={
            "200": (
                f"The engine's answer, byte for byte: OpenAI's `{_OBJECTS[endpoint]}`, or its events.",
                {**_json(whole), "text/event-stream": {}},
            )
        },
        refusals={
            "400": "A field that can't be used.",
            "404": "`model_not_found`.",
            "408": "The body did not come in time.",
            "413": "The body is too large.",
            "415": "The body is compressed.",
            "4XX": "An engine refuses the request.",
            "502": "An engine broke off, and no other could take over.",
            "503": "No engine can take it now.",
            "504": "An engine did not answer in time.",
            **refusals,
        },
        headers=_REQUEST_ID,
    )


_HANDOFF_ID: Final[Schema] = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The id of a response, or its header X-Request-Id.",
    "schema": {"type": "string"},
}
_NO_HANDOFF: Final = "`handoff_not_found`: no such record, or another tenant's."
_ORDER_REFUSALS: Final = {
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
}

OPERATIONS: Final[Mapping[Page, Operation]] = {
    ("POST", Endpoint.CHAT.path): _ask(Endpoint.CHAT, "Answer a conversation"),
    ("POST", Endpoint.COMPLETIONS.path): _ask(Endpoint.COMPLETIONS, "Continue a prompt"),
    ("POST", Endpoint.RESPONSES.path): _ask(
        Endpoint.RESPONSES,
        "Answer a conversation, in the form of OpenAI's responses",
        **{"501": "The model's engines don't serve it."},
    ),
    ("GET", "/v1/models"): Operation(
        summary="The models that are served",
        answers={
            "200": (
                "All that the caller may use.",
                _json(_object({"object": {"const": "list"}, "data": _array(ref("Model"))}, "object", "data")),
            )
        },
    ),
    ("GET", "/v1/models/{id}"): Operation(
        summary="One model",
        parameters=(
            {
                "name": "id",
                "in": "path",
                "required": True,
                "description": "Its name, which may have slashes.",
                "schema": {"type": "string"},
            },
        ),
        answers={"200": ("The model.", _json(ref("Model")))},
        refusals={"404": "`model_not_found`."},
    ),
    ("GET", "/v1/handoffs"): Operation(
        summary="The records of the requests under way",
        answers={
            "200": (
                "The caller's own ones; all, for an operator.",
                _json(_object({"running": _array(ref("RequestRecord"))}, "running")),
            )
        },
    ),
    ("GET", "/v1/handoffs/{id}"): Operation(
        summary="The record of a request",
        description="Waits a moment for what the engines have not told yet.",
        parameters=(_HANDOFF_ID,),
        answers={"200": ("Where its time went, which path it took, and why.", _json(ref("RequestRecord")))},
        refusals={"404": _NO_HANDOFF},
    ),
    ("POST", "/v1/handoffs/{id}/rebind"): Operation(
        summary="Move a request to another decode engine before its answer begins",
        parameters=(_HANDOFF_ID,),
        body=ref("RebindOrder"),
        needs_body=False,
        answers={"200": ("Where it goes on.", _json(ref("Rebound")))},
        refusals={
            "400": "The body can't be used, or `engine_not_found`.",
            "404": _NO_HANDOFF,
            "409": "`not_rebound`, or `no_decode_engine`: it can't be moved, or not any more.",
            **_ORDER_REFUSALS,
        },
    ),
    ("POST", "/v1/engines/drain"): Operation(
        summary="Give an engine no new legs, or give it some again",
        body=ref("DrainOrder"),
        answers={"200": ("The engine.", _json(ref("Engine")))},
        refusals={"400": "The body can't be used, or `engine_not_found`.", **_ORDER_REFUSALS},
    ),
    ("POST", "/internal/engines"): Operation(
        summary="For engines: register, stay, or leave",
        description="Signed with the cluster key; it asks for no other.",
        body=ref("SignedRegistration"),
        answers={"200": ("Taken.", _json({"type": "object"}))},
        refusals={
            "400": "The body can't be used.",
            "403": "`bad_registration`: another cluster's key, or it was here before.",
            **_ORDER_REFUSALS,
        },
    ),
    ("GET", "/health"): Operation(
        summary="The process is up",
        answers={"200": ("It is.", _json(_object({"status": {"const": "ok"}}, "status")))},
    ),
    ("GET", "/ready"): Operation(
        summary="Whether requests can be served, and what is wrong with which engine",
        answers={
            status: (
                what,
                _json(
                    _object(
                        {"status": {"type": "string"}, "engines": _array(ref("Engine"))},
                        *("status", "engines"),
                    )
                ),
            )
            for status, what in (("200", "They can."), ("503", "No decode engine takes requests."))
        },
    ),
    ("GET", "/metrics"): Operation(
        summary="Metrics",
        answers={"200": ("Prometheus' text format.", {"text/plain": {"schema": {"type": "string"}}})},
    ),
    ("GET", "/openapi.json"): Operation(
        summary="This description",
        answers={"200": ("OpenAPI 3.1.", _json(_object({"openapi": {"type": "string"}}, "openapi")))},
    ),
}
