"""The endpoints of the OpenAI API that requests come in by, and how each names its input and its answers."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """One way to ask for an answer. Its value is its name in metrics."""

    COMPLETIONS = "completions"
    CHAT = "chat_completions"
    RESPONSES = "responses"

    @property
    def path(self) -> str:
        """Where it is, on engines as on the router."""
        return _PATHS[self]

    @property
    def input_field(self) -> str:
        """The field of a body that holds the prompt."""
        return _INPUT_FIELDS[self]

    def response_id(self, handoff_id: str) -> str:
        """The `id` that the answer carries for this handoff, the way vLLM builds it."""
        return _ID_PREFIXES[self] + handoff_id


_PATHS = {
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.RESPONSES: "/v1/responses",
}
_INPUT_FIELDS = {Endpoint.COMPLETIONS: "prompt", Endpoint.CHAT: "messages", Endpoint.RESPONSES: "input"}
_ID_PREFIXES = {Endpoint.COMPLETIONS: "cmpl-", Endpoint.CHAT: "chatcmpl-", Endpoint.RESPONSES: "resp_"}
