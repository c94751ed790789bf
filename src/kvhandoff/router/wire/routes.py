"""Which handler answers a method and a path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

from kvhandoff.router.wire.messages import Handler
from kvhandoff.web import no_endpoint, wrong_method


class RouteDef(NamedTuple):
    """A page: one method of one path, in which `{name}` stands for a part without slashes, and `{name:.+}`
    for one that may have some.

    Paths are compared as they were sent, and only what stands for a name is percent-decoded: whoever looks at
    paths on the way sees the page that answers.
    """

    method: str
    path: str
    handler: Handler


def get(path: str, handler: Handler) -> RouteDef:
    """A page to be read; HEAD has its headers."""
    return RouteDef("GET", path, handler)


def post(path: str, handler: Handler) -> RouteDef:
    """A page that takes a body."""
    return RouteDef("POST", path, handler)


class Found(NamedTuple):
    """A page that was asked for."""

    handler: Handler
    page: str
    """As it is written down, but for what its parts are made of: `/v1/models/{id}`."""
    parts: Mapping[str, str]
    """Percent-decoded; bytes that are no UTF-8 as lone surrogates."""


class Routes:
    """All pages of a site."""

    def __init__(self, routes: Iterable[RouteDef]) -> None:
        self._exact: dict[str, dict[str, RouteDef]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, RouteDef]] = {}
        self._names: dict[str, str] = {}
        for route in routes:
            self.add(route)

    def add(self, route: RouteDef) -> None:
        """One more page."""
        self._names[route.path] = _PART.sub(r"{\1}", route.path)
        if "{" in route.path:
            self._patterns.setdefault(_pattern(route.path), {})[route.method] = route
        else:
            self._exact.setdefault(route.path, {})[route.method] = route

    def find(self, method: str, path: str) -> Found:
        """Raises RequestError: 404 where there is no such page, 405 where it takes other methods."""
        wanted = "GET" if method == "HEAD" else method
        allowed: set[str] = set()
        exact = self._exact.get(path)
        for methods, parts in self._matching(path) if exact is None else ((exact, _NONE),):
            route = methods.get(wanted)
            if route is not None:
                return Found(route.handler, self._names[route.path], parts)
            allowed |= methods.keys() | ({"HEAD"} if "GET" in methods else set())
        where = f"{method} {path[:200]}"
        if not allowed:
            raise no_endpoint(where)
        raise wrong_method(where, allowed)

    def _matching(self, path: str) -> Iterable[tuple[dict[str, RouteDef], Mapping[str, str]]]:
        for pattern, methods in self._patterns.items():
            match = pattern.fullmatch(path)
            if match is not None:
                parts = match.groupdict()
                if "%" in path:
                    parts = {n: unquote(part, errors="surrogateescape") for n, part in parts.items()}
                yield methods, parts


_NONE: Mapping[str, str] = MappingProxyType({})
_PART = re.compile(r"\{(\w+)(?::([^}]*))?\}")


def _pattern(path: str) -> re.Pattern[str]:
    made, last = "", 0
    for part in _PART.finditer(path):
        made += f"{re.escape(path[last : part.start()])}(?P<{part[1]}>{part[2] or '[^/]+'})"
        last = part.end()
    return re.compile(made + re.escape(path[last:]))
