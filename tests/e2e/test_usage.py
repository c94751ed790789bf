"""Field case 37: a client is told, and billed, what one engine alone would have counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import MODEL, Cluster, cluster
from tests.e2e.stage import BLOCK, greedy, prompt

TOKENS, ANSWER = 1000, 8
HIT = (TOKENS - 1) // BLOCK * BLOCK
"""What a cache can have of a prompt of 1000 tokens: whole blocks, and not the last token."""


def counts(usage: dict[str, Any]) -> tuple[int, int, int, int]:
    """(prompt, answer, both, cached) tokens."""
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"], cached


async def usages(c: Cluster, url: str, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """All that an answer says of it: one in a whole answer, one a chunk that has any in a stream."""
    headers = {"x-kvhandoff-path": path}
    asked = {"model": MODEL, **body}
    async with c.session.post(f"{url}/v1/completions", json=asked, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        if not body.get("stream"):
            return [(await answer.json())["usage"]]
        lines = [line.removeprefix(b"data: ") async for line in answer.content if line.startswith(b"data: {")]
    return [usage for usage in (json.loads(line).get("usage") for line in lines) if usage]


@pytest.mark.parametrize("path", ["pull", "push", "local"])
async def test_usage_is_that_of_one_engine(tiny: Path, path: str) -> None:
    cold, warm = (TOKENS, ANSWER, TOKENS + ANSWER, 0), (TOKENS, ANSWER, TOKENS + ANSWER, HIT)
    streams: list[dict[str, Any]] = [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": False}},
    ]
    async with cluster(tiny) as c:
        for number, stream in enumerate(streams):
            told = number < 2
            for url, salt in ((c.decode[0].url, f"alone {number}"), (c.url, f"handed over {number}")):
                body = greedy(prompt(number, TOKENS), ANSWER, cache_salt=salt, **stream)
                for wanted in (cold, warm):
                    given = [counts(usage) for usage in await usages(c, url, body, path)]
                    assert given == ([wanted] if told else []), (url == c.url, stream)
        await c.settled()
