"""LiteLLM, as a library and as a proxy in front of the router."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from kvhandoff.web import free_port
from tests.clients.deployment import Deployment, await_page, environment, process, run
from tests.clients.test_openai_python import FACTS, QUESTION, TURNS

OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Else it asks for its table of prices at each start."""
KEY = "sk-of-the-proxy"
"""It does not start without one."""


def version(home: Path) -> str:
    program = "from importlib.metadata import version; print(version('litellm'))"
    return run([str(home / "bin/python"), "-c", program], cwd=home).strip()


def test_library(up: Deployment, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    home = environment("litellm")
    record_property("client", "LiteLLM (library)")
    record_property("version", version(home))
    before = up.counts()
    script = Path(__file__).with_name("litellm_client.py")
    found = json.loads(
        run([str(home / "bin/python"), str(script), up.url, up.model], cwd=tmp_path, environment=OFFLINE)
    )
    assert found["raised"] == ["BadRequestError", "ContextWindowExceededError", "NotFoundError"]
    records = [up.record(name) for name in found["turns"]]
    assert [record["reused_tokens"]["returned"] > 0 for record in records] == [False, True, True]
    changes = up.since(before)
    assert (changes.answered(), changes.others()) == (3 + len(records), {"400": 2, "404": 1})
    record_property("figures", changes.figures())


def test_proxy(up: Deployment, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """An OpenAI client → LiteLLM's proxy → the router."""
    home, port = environment("litellm"), free_port()
    record_property("client", "LiteLLM (proxy)")
    record_property("version", version(home))
    backend = {"model": f"openai/{up.model}", "api_base": up.api, "api_key": "none"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": "chat", "litellm_params": backend}]}))
    command = [str(home / "bin/litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    secured = OFFLINE | {"LITELLM_MASTER_KEY": KEY}
    before = up.counts()
    with (tmp_path / "proxy.log").open("w+") as log, process(command, log, secured) as proxy:
        url = f"http://127.0.0.1:{port}"
        await_page(f"{url}/health/liveliness", proxy, log)
        api = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        create: Any = api.chat.completions.create
        whole = create(model="chat", messages=QUESTION, temperature=0)
        assert whole.choices[0].message.content == "The capital of France is Paris."
        chunks = list(create(model="chat", messages=QUESTION, temperature=0, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "The capital of France is Paris."
        with pytest.raises(openai.BadRequestError):
            create(model="chat", messages=QUESTION, temperature=-1)
        messages: list[Any] = [{"role": "system", "content": FACTS + " Be polite."}]
        for question in TURNS:
            messages.append({"role": "user", "content": question})
            answer = create(model="chat", messages=messages, temperature=0, max_tokens=24)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert up.record(answer.id)["reused_tokens"]["returned"] > 0
    changes = up.since(before)
    assert changes.answered() == 2 + len(TURNS)
    assert set(changes.others()) == {"400"}
    assert changes("return_lookups_total", result="hit") == len(TURNS) - 1
    record_property("figures", changes.figures())
