"""Field case 38: the two engines of a request render a chat otherwise, as one of them has another template.

KV is used for the token ids that it stands for, and for no others: a pull's decode engine goes on with the
prefill engine's ids, a push's has its own and refuses what was computed for others.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.cluster import MODEL, Cluster, cluster

TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 3


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose answers begin with another word."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = tokenizer.chat_template.replace("assistant", "the model")
    assert template != tokenizer.chat_template
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


async def chat(c: Cluster, *, url: str | None = None, path: str | None = None, **fields: Any) -> Any:
    """The answer to a chat, greedy."""
    message = {"role": "user", "content": TEXT}
    body = {"model": MODEL, "messages": [message], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer = await c.post(body | fields, chat=True, url=url, path=path)
    assert status == 200, answer
    return answer


def seen(answer: Any) -> tuple[str, int]:
    """(text, prompt tokens)."""
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


async def test_kv_is_used_for_the_ids_it_stands_for(tiny: Path, other: Path) -> None:
    async with cluster(tiny, decode_dir=other) as c:
        of_p, of_d = [
            seen(await chat(c, url=engine.url, cache_salt="alone")) for engine in (c.prefill[0], c.decode[0])
        ]
        assert of_p[0] != of_d[0]
        assert of_p[1] != of_d[1]

        answer = await chat(c, path="pull")
        assert seen(answer) == of_p
        record = await c.record(answer["id"])
        assert (record["kv_source"], record["reasons"]) == ("transferred", ["forced"])

        answer = await chat(c, path="push", cache_salt="pushed")
        assert seen(answer) == of_d
        record = await c.record(answer["id"])
        assert record["kv_source"] == "recomputed"
        assert record["reasons"] == ["forced", "chain_mismatch"]
        await c.settled()


async def test_templates_that_are_the_same(tiny: Path) -> None:
    """The other half: pushed, and used."""
    async with cluster(tiny) as c:
        alone = seen(await chat(c, url=c.decode[0].url, cache_salt="alone"))
        answer = await chat(c, path="push")
        assert seen(answer) == alone
        assert (await c.record(answer["id"]))["kv_source"] == "transferred"
        await c.settled()
