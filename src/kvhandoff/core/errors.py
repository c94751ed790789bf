"""Errors that reach a user, and their OpenAI-style bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Any

_MOST_SHOWN = 200
"""Characters of a value in a message."""


class _Excerpt(Repr):
    """Of what came as JSON or YAML: with their words, not Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlist = self.maxdict = self.maxlevel = 4

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802  the type's name
        return "null"


_excerpt = _Excerpt()


def excerpt(value: object) -> str:
    """A value as a message shows it: short, however large, deep or long it is."""
    text = _excerpt.repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def describe(error: BaseException) -> str:
    """An exception in words; many of the network's have no message of their own."""
    return str(error) or type(error).__name__


class KVHandoffError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(KVHandoffError):
    """A flag, file or model that can't be used. The command line prints it and exits with 2."""


def check_once(given: Iterable[str], *, where: str = "") -> None:
    """Raises ConfigError for values that stand in `given` more than once; `where`: before its message."""
    twice = sorted(value for value, times in Counter(given).items() if times > 1)
    if twice:
        raise ConfigError(f"{where}got {', '.join(twice)} more than once, allowed is once")


class RequestError(KVHandoffError):
    """A request that is answered with an error body. `message` says what is wrong and what is allowed."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.headers: Mapping[str, str] = headers or {}
        """What the answer carries beside its body."""

    def body(self) -> dict[str, Any]:
        """The body OpenAI clients parse: `{"error": {message, type, param, code}}`."""
        # What a client has sent may hold bytes that are no UTF-8, as lone surrogates, and no JSON has those.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(field: str, value: object, allowed: str, *, code: str | None = None) -> RequestError:
    """A 400 that names the field, the value and what is allowed."""
    return RequestError(f"{field}: got {excerpt(value)}, allowed is {allowed}", param=field, code=code)


def unavailable(message: str, *, code: str) -> RequestError:
    """A 503: the service can't take this request now; a later try may succeed."""
    return RequestError(message, status=503, code=code, kind="service_unavailable_error")
