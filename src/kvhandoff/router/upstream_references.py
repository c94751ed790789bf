"""What decode engines have answered about their blocks, for the next turn of the same conversation.

Only with `bidirectional_kv_xfer`, and only of answers that are not streamed: a stream has no place for it. A
reference is good once, since the engine frees the blocks when they have been read, and for as long as the
engine keeps them.

An engine reads whatever a reference names, as the KV of whatever prompt it is given. So a reference is used
only for a request that repeats the whole turn, question and answer, at its beginning, as far as a router can
see: the same messages and the same answer's text; or a prompt that begins with the last one's prompt and
answer, in a conversation that the client has named. That the engine makes the same tokens of it again is not
known, and nobody checks it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.router.body import Fields
from kvhandoff.router.conversations import names_of
from kvhandoff.router.policy import RequestSummary


class _Message(msgspec.Struct):
    role: str = ""
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer = msgspec.json.Decoder(_Answer)
_messages = msgspec.json.Decoder(list[msgspec.Raw])
_prompt = msgspec.json.Decoder(str | list[int])


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
        self._explicit = names_of(fields, headers, summary).explicit
        root = msgspec.json.encode((summary.cache_salt, summary.model, summary.endpoint))
        # Templates render tools and their own arguments before the messages: they are part of the history.
        shaping = [_digest(name.encode(), b"=", bytes(fields[name])) for name in _SHAPING if name in fields]
        self._root = _digest(root, *shaping)
        self._messages = _read_messages(fields)
        self._prompt = _read_prompt(fields)

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
        if self._messages and choice.message is not None and choice.message.content is not None:
            fingerprint = self._root
            for message in self._messages:
                fingerprint = _digest(fingerprint, bytes(message))
            return _digest(fingerprint, b"answer", choice.message.content.encode()), None
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


_SHAPING = ("tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents")


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


def _assistant_text(message: msgspec.Raw) -> str | None:
    """The text of an answer among the messages, if it is no more than text."""
    try:
        read = msgspec.json.decode(message, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return read.content if read.role == "assistant" else None


def _digest(*parts: bytes) -> bytes:
    """Each part but the last is of a fixed length, or JSON: none runs into the next."""
    return blake2b(b"".join(parts), digest_size=16).digest()
