"""What answers where an engine was expected: asked of pages that say so, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import aiohttp
import msgspec

from kvhandoff.router.openapi import PATH, TITLE

_Kind = TypeVar("_Kind")

ROUTER = "a router of kvhandoff"


class _Info(msgspec.Struct):
    title: str = ""


class _Description(msgspec.Struct):
    info: _Info


class _Model(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


async def who_answers(url: str, session: aiohttp.ClientSession) -> str:
    """In words, of the server at `url`. Raises what the network does."""
    headers, body = await _get(url + PATH, session)
    description = _read(body, _Description)
    if description is not None and description.info.title == TITLE:
        return ROUTER
    models = _read((await _get(f"{url}/v1/models", session))[1], _Models)
    if models is not None and any(model.owned_by == "vllm" for model in models.data):
        return "a vLLM engine"
    return server_named(headers)


def server_named(headers: Mapping[str, str]) -> str:
    """By the header that most servers send."""
    return f"a server that calls itself {headers['Server'][:80]!r}" if "Server" in headers else "a server"


async def _get(url: str, session: aiohttp.ClientSession) -> tuple[Mapping[str, str], bytes]:
    async with session.get(url, allow_redirects=False) as answer:
        return answer.headers, await answer.read()


def _read(body: bytes, kind: type[_Kind]) -> _Kind | None:
    """None: it is something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
