"""From token ids to text, one token at a time: bytes, whole characters, stop strings.

Three steps, each O(1) per token and independent of how the text is cut into tokens:

    token id ──TokenBytes──▶ bytes ──Detokenizer──▶ whole characters ──StopMatcher──▶ text that is sure
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from kvhandoff.core.errors import ConfigError


class TokenBytes:
    """What each token adds to a text, as bytes. Tokens may end inside a character.

    Knows byte-level decoders (GPT-2's, used by Llama 3, Qwen, SmolLM, …) and SentencePiece-like ones (`▁`
    for a space, `<0x41>` for a byte). Raises ConfigError for a tokenizer with another decoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._byte_level = False
        self._replace: list[tuple[str, str]] = []
        self._byte_fallback = False
        self.strips_first_space = False
        """A text's very first space is the tokenizer's own and no part of it."""
        self._read_decoder(tokenizer.decoder)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of control tokens (EOS, chat markers): not shown in a text unless asked for."""

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer doesn't know (padding of the vocabulary)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(self._tokenizer.id_to_token(token_id) or "")
        return known

    def text(self, token_id: int) -> str:
        """The token alone as text, the way logprobs show it; a part of a character shows as U+FFFD."""
        return self[token_id].decode("utf-8", "replace")

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            # A token with any character outside the alphabet was added as plain text.
            mapped = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()

    def _read_decoder(self, decoder: Any) -> None:
        """Understand the decoder from its own description, or refuse it."""
        described = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
        fused = False
        for step in described.get("decoders", [described]):
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replace.append((old, new))
                case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                    self._replace.append((old, " "))
                    self.strips_first_space = scheme != "never"
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                    self.strips_first_space = True
                case _:
                    raise ConfigError(
                        f"tokenizer: decoder {step.get('type')} in {described} is not supported; "
                        "supported are byte-level and SentencePiece-like decoders "
                        "(ByteLevel, Metaspace, Replace + ByteFallback + Fuse + Strip)"
                    )


class Detokenizer:
    """Token ids in, whole characters out. The pieces put together are the tokenizer's decoding of all ids.

    A character whose bytes are spread over several tokens comes with the last of them. Bytes that can't
    become a character come as U+FFFD.
    """

    def __init__(self, table: TokenBytes, *, skip_special: bool = True, at_start: bool = False) -> None:
        """`at_start`: the ids begin a text (a prompt) instead of going on with one (a completion)."""
        self._table = table
        self._hidden: frozenset[int] = table.special if skip_special else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = at_start and table.strips_first_space

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; often one or more, sometimes none."""
        if token_id in self._hidden:
            return ""
        text = self._decode(self._table[token_id])
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """No more tokens: what an unfinished character leaves, U+FFFD or nothing."""
        return self._decode(b"", True)


class StopStrings:
    """A request's stop strings as an Aho-Corasick automaton: one step per character, however many."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` are not empty, none of them."""
        self.next: list[dict[str, int]] = [{}]
        """State and character to state along the strings themselves; state 0 has matched nothing."""
        self.depth = [0]
        """Characters of the longest prefix of any stop string that the text read so far ends with."""
        self.match = [0]
        """Length of the longest stop string that the text read so far ends with; 0 for none."""
        self.fail = [0]
        """The state of the longest proper suffix."""
        for string in strings:
            self._insert(string)
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            child = self.next[state].get(character)
            if child is None:
                child = self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
                self.fail.append(0)
            state = child
        self.match[state] = len(string)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            child = self.next[state].get(character)
            if child is not None:
                return child
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Finds the first stop string in one sequence's text, and holds back what may yet become one.

    "First" is the one that ends first, and of several that end together the longest: so the cut is the same
    however the text comes in pieces.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        """`include`: leave the stop string in the text."""
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text that is sure, the stop string if one ended here). With `armed` off, nothing stops."""
        stops, state = self._stops, self._state
        for position, character in enumerate(text, 1):
            state = stops.step(state, character)
            length = stops.match[state]
            if length and armed:
                whole = self._held + text[:position]
                self._held, self._state = "", 0
                stop = whole[-length:]
                return (whole if self._include else whole[:-length]), stop
        whole = self._held + text
        sure = len(whole) - stops.depth[state]
        self._held, self._state = whole[sure:], state
        return whole[:sure], None

    def flush(self) -> str:
        """No more text: what was held back is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: visible Latin-1 as itself, the rest from U+0100 upward."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    stand_ins = {chr(byte): byte for byte in visible}
    return stand_ins | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = _gpt2_alphabet()
