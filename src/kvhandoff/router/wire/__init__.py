"""The router's HTTP/1.1, driven by hand on httptools: the server before clients, the client to engines.

A stream passes through both without a task being woken for a piece, and framing is strict on both sides: what
two parsers might read differently is refused (`framing.py`).
"""

from kvhandoff.router.wire.client import BrokenOff, Client, Leg, LegAnswer, NotConnected
from kvhandoff.router.wire.ending import is_cut_off
from kvhandoff.router.wire.framing import header_lines
from kvhandoff.router.wire.headers import Headers
from kvhandoff.router.wire.messages import (
    Handler,
    Key,
    Request,
    Response,
    StreamResponse,
    error_response,
    json_response,
    read_body,
)
from kvhandoff.router.wire.routes import RouteDef, get, post
from kvhandoff.router.wire.server import Server, serve
from kvhandoff.router.wire.site import Lifespan, Site

__all__ = [
    "BrokenOff",
    "Client",
    "Handler",
    "Headers",
    "Key",
    "Leg",
    "LegAnswer",
    "Lifespan",
    "NotConnected",
    "Request",
    "Response",
    "RouteDef",
    "Server",
    "Site",
    "StreamResponse",
    "error_response",
    "get",
    "header_lines",
    "is_cut_off",
    "json_response",
    "post",
    "read_body",
    "serve",
]
