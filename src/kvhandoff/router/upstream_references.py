"""What decode engines have answered about their blocks, for the next turn of the same conversation.

Only with `bidirectional_kv_xfer`, and only of answers that are not streamed: a stream has no place for it. A
reference is good once, since the engine frees the blocks when they have been read, and for as long as the
engine keeps them.

An engine reads whatever a reference names, as the KV of whatever prompt it is given. So a reference is used
only for a request that repeats the whole turn, question and answer, at its beginning, as far as a router can
see: the same messages and the same answer, which is nothing but text; or a prompt that begins with the last
one's prompt and answer, in a conversation that the client has named. Fields that shape the prompt have to be
equal, and a field that may cut the prompt, or isn't known here, leaves the request without a reference. That
the engine makes the same tokens of it again is not known, and nobody checks it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.router.body import Fields
from kvhandoff.router.names import given_name
from kvhandoff.router.policy import RequestSummary


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and nothing that a template could render beside it."""

    role: str
    content: str


class _Choice(msgspec.Struct):
    message: dict[str, msgspec.Raw] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    stop_reason: str | int | None = None
    """A text that ended the answer, and is not in it though it has been computed; or a token's id."""


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer = msgspec.json.Decoder(_Answer)
_messages = msgspec.json.Decoder(list[msgspec.Raw])
_prompt = msgspec.json.Decoder(str | list[int])

_INPUT = frozenset({"messages", "prompt", "model", "cache_salt"})
"""Compared one by one."""
_HARMLESS = frozenset(
    {
        # How the answer is sampled, ends and is reported.
        *("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stop", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "logit_bias", "bad_words"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids"),
        "return_tokens_as_token_ids",
        # Names, and what the router doesn't pass on.
        *("user", "metadata", "priority", "conversation_id", "prompt_cache_key", "request_id"),
        *("kv_transfer_params", "ec_transfer_params"),
    }
)
"""These neither shape the prompt nor make the answer's text another than what was computed."""
_SHAPING = frozenset(
    {
        *(
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "chat_template",
            "chat_template_kwargs",
            "documents",
        ),
        *("reasoning_effort", "response_format", "structured_outputs", "add_special_tokens"),
    }
)
"""Templates render these, alike in each turn if they are equal."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What one decode engine has answered about one turn."""

    holder: str
    """The engine's URL."""
    params: msgspec.Raw
    """`kv_transfer_params` of the next turn's prefill leg."""
    not_after: float
    """On the router's clock; the engine's own end of it is later, since it counts from its answer."""
    prompt: _Prompt | None = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The beginning that a completion's next prompt must have."""

    length: int
    """Characters, or token ids."""
    digest: bytes

    @classmethod
    def of(cls, prompt: str | list[int]) -> _Prompt:
        return cls(len(prompt), _digest(msgspec.json.encode(prompt)))

    def begins(self, prompt: str | list[int]) -> bool:
        return len(prompt) > self.length and _Prompt.of(prompt[: self.length]) == self


class References:
    """The last turns' references, bounded. Used on the event loop's thread only."""

    def __init__(self, limit: int, kept_s: float, clock: Clock) -> None:
        self._limit = limit
        self._kept_s = kept_s
        self._clock = clock
        self._turns: OrderedDict[bytes, Reference] = OrderedDict()

    def keep(
        self,
        turn: Turn,
        holder: str,
        params: msgspec.Raw,
        answer: bytes,
        asked: float,
    ) -> None:
        """A turn has been answered by the engine at `holder`; `asked`: when it was, on the router's clock."""
        name, prompt = turn.after(answer)
        if name is None:
            return
        self._turns[name] = Reference(holder, params, asked + self._kept_s, prompt)
        self._turns.move_to_end(name)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def take(self, turn: Turn) -> Reference | None:
        """The reference that this turn may use. It is given away: nobody else can use it."""
        now = self._clock()
        for name in turn.before():
            found = self._turns.get(name)
            if found is None:
                continue
            if found.not_after <= now:
                del self._turns[name]
            elif found.prompt is None or turn.repeats(found.prompt):
                return self._turns.pop(name)
        return None


class Turn:
    """One request, as a turn of a conversation."""

    def __init__(self, fields: Fields, headers: Mapping[str, str], summary: RequestSummary) -> None:
        name = given_name(fields, headers)
        self._explicit = None if name is None else _digest(name)
        root = msgspec.json.encode((summary.cache_salt, summary.model, summary.endpoint))
        shaping = sorted(_SHAPING & fields.keys())
        self._root = _digest(root, *(_digest(name.encode(), b"=", bytes(fields[name])) for name in shaping))
        known = fields.keys() <= _INPUT | _HARMLESS | _SHAPING
        self._messages = _read_messages(fields) if known else []
        self._prompt = _read_prompt(fields) if known else None

    def before(self) -> Iterable[bytes]:
        """Names of former turns that this one repeats, the longest first."""
        fingerprint, names = self._root, []
        for message in self._messages:
            text = _assistant_text(message)
            if text is not None:
                names.append(_digest(fingerprint, b"answer", text.encode()))
            fingerprint = _digest(fingerprint, bytes(message))
        yield from reversed(names)
        if self._prompt is not None and self._explicit is not None:
            yield _digest(self._root, self._explicit)

    def after(self, answer: bytes) -> tuple[bytes | None, _Prompt | None]:
        """(name of this turn with its answer, the beginning of the next prompt); no name: it can't be told
        whether another request repeats it."""
        try:
            choices = _answer.decode(answer).choices
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, None
        if len(choices) != 1:
            return None, None
        [choice] = choices
        if isinstance(choice.stop_reason, str):
            return None, None
        if self._messages and choice.message is not None:
            text = _assistant_text(_without_empty(choice.message))
            if text is None:
                return None, None
            fingerprint = self._root
            for message in self._messages:
                fingerprint = _digest(fingerprint, bytes(message))
            return _digest(fingerprint, b"answer", text.encode()), None
        match self._prompt, choice:
            case str(text), _Choice(text=str(added)):
                beginning = _Prompt.of(text + added)
            case list(ids), _Choice(token_ids=list(added_ids)):
                beginning = _Prompt.of(ids + added_ids)
            case _:
                return None, None
        return None if self._explicit is None else _digest(self._root, self._explicit), beginning

    def repeats(self, beginning: _Prompt) -> bool:
        """Whether this completion's prompt begins with a former one and its answer."""
        return self._prompt is not None and beginning.begins(self._prompt)


def _read_messages(fields: Fields) -> list[msgspec.Raw]:
    try:
        return _messages.decode(fields["messages"]) if "messages" in fields else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # the engine refuses it


def _read_prompt(fields: Fields) -> str | list[int] | None:
    try:
        return _prompt.decode(fields["prompt"]) if "prompt" in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # several prompts, or something that the engine refuses


def _without_empty(message: dict[str, msgspec.Raw]) -> bytes:
    """The JSON of an engine's answer, without the fields that have nothing to say."""
    return msgspec.json.encode({n: value for n, value in message.items() if bytes(value) not in _EMPTY})


_EMPTY = (b"null", b"[]")


def _assistant_text(message: msgspec.Raw | bytes) -> str | None:
    """The text of an answer, as it comes or among the messages, if it is no more than text."""
    try:
        read = msgspec.json.decode(message, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return read.content if read.role == "assistant" else None


def _digest(*parts: bytes) -> bytes:
    """Each part but the last is of a fixed length, or JSON: none runs into the next."""
    return blake2b(b"".join(parts), digest_size=16).digest()
