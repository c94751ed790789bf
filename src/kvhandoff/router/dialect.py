"""What engines of each integration are sent: the rewriting table, and what only some of them understand.

A vLLM engine differs from an embedded one in this:

- Its prefix cache is salted with the `cache_salt` of the body, before its connector sees the ticket. So the
  body has the ticket's salt; an empty one would be refused, and is left out.
- It takes the prefill engine's token ids for a chat only (`kv_transfer_params.prompt_token_ids`), and then
  renders nothing: not media, not an echo, and it cuts nothing off. Where that would change the prompt or the
  answer, it renders the messages itself. A completion's prompt is sent as the client wrote it, which its echo
  needs; for a response it knows no such ids.
- Some chat templates write the response format into the prompt, so that both legs need it.
- A response gets its id from the body, the other answers from the header X-Request-Id.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec

from kvhandoff.router.answers import TicketParams
from kvhandoff.router.body import Fields
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.engine import Integration
from kvhandoff.router.legs import DROP, KEEP, RESPONSES_ROWS, ROWS, Rewriting, Row, Rows, leg_body

VLLM_ROWS: Rows = {
    "response_format": Row(KEEP),
    # Its CPU build dies of a seeded request whose prompt takes several steps. The prefill leg's token is
    # thrown away, and the decode leg's prompt is there.
    "seed": Row(DROP),
}
"""Instead of those of the table."""

_RENDERED_ANEW = ("echo", "truncate_prompt_tokens", "return_token_offsets", "return_prompt_text")
"""Fields of a chat that vLLM can't do with token ids alone."""
_TEXT_PARTS = frozenset({"text", "refusal", "thinking"})
"""Parts of a message's content that are text; whatever else may be media."""


class _Part(msgspec.Struct):
    type: str


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


class Unsealed(NamedTuple):
    """A leg's body, which lacks its ticket."""

    fields: Fields
    takes_ids: bool
    """Whether the engine understands the prefill engine's token ids, and they say all."""

    def sealed(self, ticket: str | None, prompt_token_ids: msgspec.Raw | None) -> bytes:
        """What is sent. Without a ticket the engine serves it like anybody's."""
        if ticket is None:
            return leg_body(self.fields, None)
        return leg_body(self.fields, TicketParams(ticket, prompt_token_ids if self.takes_ids else None))


class Dialect:
    """The bodies of the legs of requests to one endpoint, for engines of one integration."""

    def __init__(self, integration: Integration, endpoint: Endpoint) -> None:
        rows = RESPONSES_ROWS if endpoint is Endpoint.RESPONSES else ROWS
        self._vllm = integration == "vllm"
        self._endpoint = endpoint
        self._rewriting = Rewriting({**rows, **VLLM_ROWS} if self._vllm else rows)

    def prefill(self, client: Fields, handoff_id: str, cache_salt: str, ticket: str) -> bytes:
        """The body of a prefill leg; `cache_salt`: the ticket's."""
        fields = self._named(self._rewriting.prefill(client), handoff_id, cache_salt)
        return leg_body(fields, TicketParams(ticket))

    def decode(self, client: Fields, handoff_id: str, cache_salt: str) -> Unsealed:
        """The body of a decode or local leg."""
        fields = self._named(self._rewriting.decode(client), handoff_id, cache_salt)
        return Unsealed(fields, not self._vllm or (self._endpoint is Endpoint.CHAT and _is_text(client)))

    def _named(self, fields: Fields, handoff_id: str, cache_salt: str) -> Fields:
        if self._endpoint is Endpoint.RESPONSES:
            fields["request_id"] = _raw(self._endpoint.response_id(handoff_id))
        if self._vllm:
            if cache_salt:
                fields["cache_salt"] = _raw(cache_salt)
            elif fields.get("cache_salt") == _EMPTY:
                del fields["cache_salt"]  # of another type it stays, for the engine to refuse
        return fields


@cache
def dialect_of(integration: Integration, endpoint: Endpoint) -> Dialect:
    """How to ask engines of this integration at this endpoint."""
    return Dialect(integration, endpoint)


def _is_text(client: Fields) -> bool:
    """Whether a chat's token ids say all that its answer depends on."""
    if any(bytes(client[name]) not in (b"null", b"false") for name in _RENDERED_ANEW if name in client):
        return False
    try:
        messages = _messages.decode(client.get("messages", b"[]"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return all(
        isinstance(part, str) or part.type in _TEXT_PARTS
        for message in messages
        for part in message.content or ()
    )


def _raw(value: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


_EMPTY = _raw("")
