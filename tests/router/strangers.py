"""Web servers that are no engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvhandoff.web import serve


@asynccontextmanager
async def web_server(status: int, body: str, *, name: str = "Plain/1.0") -> AsyncIterator[str]:
    """Answers any GET alike; yields its URL."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Server": name})

    app = web.Application()
    app.add_routes([web.get("/{page:.*}", answer)])
    server = await serve(app)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()
