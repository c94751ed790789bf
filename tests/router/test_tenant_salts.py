"""Tenants' KV never mixes, whatever their clients send, and nobody's secrets are logged (cases 60 to 62)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhandoff.router.tenants import hash_of
from tests.router.callers import KEYS, SALTS, bearer, security
from tests.router.engines import CLUSTER_KEY, MockEngine, failing, until
from tests.router.upstream_engines import upstream_cluster
from tests.router.vllm_engines import MockVllmEngine


def turn(*contents: str) -> list[dict[str, str]]:
    """A chat's messages."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("make", [MockEngine, MockVllmEngine])
@pytest.mark.parametrize("path", ["pull", "push", "local"])
async def test_every_leg_has_the_tenant_s_salt(
    cluster: Any, tmp_path: Path, make: type[MockEngine], path: str
) -> None:
    """Field case 62: on every path, in tickets and bodies, and alike on both sides."""
    async with cluster(security=security(tmp_path), make=make) as c:
        seen: dict[tuple[str, str | None], str] = {}
        for tenant in ("acme", "beta"):
            for given in (None, "a", "b"):
                fields = {} if given is None else {"cache_salt": given}
                headers = bearer(tenant) | {"x-kvhandoff-path": path}
                assert (await c.post(c.chat_body(**fields), path=CHAT, headers=headers))[0] == 200
                await until(lambda: not c.d.legs.empty() and (path == "local" or not c.p.legs.empty()))
                engines = (c.d,) if path == "local" else (c.p, c.d)
                legs = [engine.legs.get_nowait() for engine in engines]
                salts = {salt for leg in legs for salt in (leg.ticket.cache_salt, leg.body["cache_salt"])}
                assert len(salts) == 1
                seen[tenant, given] = salts.pop()
        assert len(set(seen.values())) == len(seen)

        stolen = seen["acme", None]
        await c.post(c.chat_body(cache_salt=stolen), path=CHAT, headers=bearer("beta") | {PATH: path})
        await until(lambda: not c.d.legs.empty())
        assert c.d.legs.get_nowait().body["cache_salt"] not in set(seen.values())


CHAT = "/v1/chat/completions"
PATH = "x-kvhandoff-path"


@pytest.mark.parametrize("make", [MockEngine, MockVllmEngine])
async def test_a_leg_without_a_ticket_has_it_too(
    cluster: Any, tmp_path: Path, make: type[MockEngine]
) -> None:
    """Several prompts go without one: the engine takes the body's."""
    async with cluster(security=security(tmp_path), make=make) as c:
        c.d.script = failing(400)
        for tenant in ("acme", "beta"):
            await c.post(c.body(prompt=["a", "b"], cache_salt="x"), headers=bearer(tenant))
        legs = [c.d.legs.get_nowait() for _ in range(2)]
        assert [leg.ticket for leg in legs] == [None, None]
        first, second = (leg.body["cache_salt"] for leg in legs)
        assert first != second
        assert "x" not in (first, second)
        assert len(first) == len(second) == 64


async def test_upstream_engines_get_it_too(tmp_path: Path) -> None:
    async with upstream_cluster("nixl", security=security(tmp_path)) as c:
        assert (await c.post())[0] == 401
        salts = []
        for tenant in ("acme", "beta"):
            status, answer = await c.post(cache_salt="x", headers=bearer(tenant))
            assert status == 200
            legs = [await c.p.leg(), await c.d.leg()]
            assert len({leg.body["cache_salt"] for leg in legs}) == 1
            salts.append(legs[0].body["cache_salt"])
            own, others = (("acme", "beta"), ("beta", "acme"))[tenant == "beta"]
            for caller, seen in ((own, 200), (others, 404), ("ops", 200)):
                async with c.session.get(
                    f"{c.url}/v1/handoffs/{answer['id']}", headers=bearer(caller)
                ) as response:
                    assert response.status == seen
        assert salts[0] != salts[1]
        assert "x" not in salts


@pytest.mark.parametrize("named", [{"x-session-id": "s"}, {"X-Correlation-ID": "s"}, {}])
async def test_conversations_are_their_tenant_s(cluster: Any, tmp_path: Path, named: dict[str, str]) -> None:
    """Field case 61: the same name, or the same messages, of another tenant lead to no history."""
    async with cluster(security=security(tmp_path)) as c:
        first, second = turn("hello"), turn("hello", "Hello", "and then?")
        for tenant, messages, kept in (
            ("acme", first, False),
            ("beta", second, False),
            ("acme", second, True),
        ):
            body = c.chat_body(messages=messages, conversation_id="mine")
            headers = bearer(tenant) | named
            _, answer = await c.post(body, path=CHAT, headers=headers)
            ticket = c.p.legs.get_nowait().ticket
            assert (ticket.history is not None) is kept
            _, record = await c.get(f"/v1/handoffs/{answer['id']}", headers=headers)
            assert (record["history"] is not None) is kept


async def test_without_a_file_a_salt_stays_the_client_s(cluster: Any) -> None:
    async with cluster() as c:
        await c.post(c.body(cache_salt="a"))
        leg = c.d.legs.get_nowait()
        assert (leg.ticket.cache_salt, leg.body["cache_salt"]) == ("a", "a")
        _, answer = await c.post(c.body())
        assert "cache_salt" not in [*c.d.legs.get_nowait().body]
        assert (await c.record(answer["id"]))["tenant"] == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_no_secrets_in_logs(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """At the lowest level, through requests that end well, that fail, and that are refused."""
    caplog.set_level(logging.DEBUG)
    async with cluster(security=security(tmp_path, {"max_concurrency": 5})) as c:
        body = c.body(stream=stream, cache_salt="a client's own salt", prompt="a client's own prompt")

        async def ask(status: int, headers: dict[str, str]) -> str:
            async with c.session.post(c.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.status == status
                return await response.text()

        said = [await ask(200, bearer("acme")), await ask(401, {"Authorization": "Bearer kvh_wrong_key"})]
        legs = [c.p.legs.get_nowait(), c.d.legs.get_nowait()]
        c.p.script = failing(500)
        said.append(await ask(200, bearer("acme")))
        c.d.script = failing(500)
        said.append(await ask(502, bearer("acme")))
        while not c.d.legs.empty():
            legs.append(c.d.legs.get_nowait())
        security(tmp_path, {"role": "king"})  # a bad file
        pages = [await c.text("/metrics"), msgspec.json.encode(await c.get("/ready")).decode()]
        listed = await c.get("/v1/handoffs", headers=bearer("ops"))

    secrets = {*KEYS.values(), *map(hash_of, KEYS.values()), *SALTS.values(), CLUSTER_KEY.decode()}
    secrets |= {"kvh_wrong_key", "a client's own salt", "a client's own prompt"}
    secrets |= {leg.body["kv_transfer_params"]["ticket"] for leg in legs}
    secrets |= {leg.body["cache_salt"] for leg in legs}
    secrets |= {secret.removeprefix("sha256:") for secret in secrets}
    logged = caplog.text + "".join(repr(record.__dict__) for record in caplog.records)
    assert "attempt 1" in logged
    assert [secret for secret in secrets if secret in logged] == []
    shown = "".join([*said, *pages, str(listed)])
    assert [secret for secret in secrets if secret in shown] == []
