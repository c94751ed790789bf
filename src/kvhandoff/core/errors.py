"""Errors that reach a user, and their OpenAI-style bodies."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlist = _short.maxdict = 4


class KVHandoffError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(KVHandoffError):
    """A flag, file or model that can't be used. The command line prints it and exits with 2."""


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
    return RequestError(f"{field}: got {_short.repr(value)}, allowed is {allowed}", param=field, code=code)


def unavailable(message: str, *, code: str) -> RequestError:
    """A 503: the service can't take this request now; a later try may succeed."""
    return RequestError(message, status=503, code=code, kind="service_unavailable_error")
