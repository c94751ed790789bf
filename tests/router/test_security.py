"""Encrypted connections of the router, on both sides, and where it connects to."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvhandoff.core.errors import ConfigError
from kvhandoff.router import watched
from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from kvhandoff.router.security import Security, engine_tls, listener_tls
from kvhandoff.router.worker import Worker
from tests.router.callers import bearer, security
from tests.router.certificates import CERT_A, CERT_B, ENCRYPTED_KEY_A, KEY_A, KEY_B
from tests.router.conftest import NO_ACCOUNT
from tests.router.engines import CLUSTER_KEY, MODEL, WAIT_S, Leg, MockEngine

PROMPT = {"model": MODEL, "prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 8}


def certificate(path: Path, cert: str = CERT_A, key: str = KEY_A) -> Security:
    files = path / "tls.crt", path / "tls.key"
    for file, text in zip(files, (cert, key), strict=True):
        file.write_text(text)
    return Security(tls_cert=files[0], tls_key=files[1])


def trusting(*roots: str) -> aiohttp.TCPConnector:
    """A client's connections, each one a new one."""
    return aiohttp.TCPConnector(
        ssl=ssl.create_default_context(cadata="".join(roots)), force_close=True, limit=0
    )


async def test_clients_are_served_over_tls(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=certificate(tmp_path)) as c:
        url = c.url.replace("http://", "https://")
        async with aiohttp.ClientSession(connector=trusting(CERT_A)) as session:
            async with session.post(url + "/v1/completions", json=PROMPT) as response:
                assert (await response.json())["choices"][0]["text"] == "Hello"
            async with session.post(url + "/v1/completions", json=PROMPT | {"stream": True}) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
        async with aiohttp.ClientSession(connector=trusting(CERT_B)) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url + "/health")
        with pytest.raises(aiohttp.ClientError):
            await c.session.get(c.url + "/health")


async def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    tls = listener_tls(certificate(tmp_path))
    assert tls is not None
    assert tls.value.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_a_renewed_certificate_is_taken_up(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """For new connections; a pair that does not fit is left aside, and said so."""
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.01)

    async def trusted(root: str) -> bool:
        async with aiohttp.ClientSession(connector=trusting(root)) as session:
            try:
                async with session.get(url + "/health") as response:
                    return response.status == 200
            except aiohttp.ClientConnectorCertificateError:
                return False

    async with cluster(security=certificate(tmp_path)) as c:
        url = c.url.replace("http://", "https://")
        assert await trusted(CERT_A)
        assert not await trusted(CERT_B)
        certificate(tmp_path, CERT_B, KEY_B)
        async with asyncio.timeout(WAIT_S):
            while not await trusted(CERT_B):
                pass
        assert not await trusted(CERT_A)


async def test_a_pair_that_does_not_fit_is_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = listener_tls(certificate(tmp_path))
    assert tls is not None
    certificate(tmp_path, CERT_B, KEY_A)
    assert not await tls.look()
    assert "can't be used together (KEY_VALUES_MISMATCH)" in caplog.text
    assert "PRIVATE KEY" not in caplog.text


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        (CERT_A, KEY_B, "can't be used together (KEY_VALUES_MISMATCH)"),
        (CERT_A, ENCRYPTED_KEY_A, "is encrypted, allowed is a key without a password"),
        ("x", KEY_A, "can't be used together"),
        (CERT_A, "x", "can't be used together"),
        ("", "", "can't be used together"),
    ],
)
def test_bad_certificates(tmp_path: Path, cert: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match="tls-") as refused:
        listener_tls(certificate(tmp_path, cert, key))
    assert said in str(refused.value)


def test_missing_files(tmp_path: Path) -> None:
    nowhere, there = tmp_path / "nowhere", tmp_path / "there"
    there.write_text(CERT_A)
    with pytest.raises(ConfigError, match="tls-cert, tls-key: got one of them, allowed is both or neither"):
        Security(tls_cert=there)
    with pytest.raises(ConfigError, match=r"tls-key: .*nowhere can't be read"):
        listener_tls(Security(tls_cert=there, tls_key=nowhere))
    with pytest.raises(ConfigError, match=r"engine-ca: .*nowhere can't be read"):
        engine_tls(Security(engine_ca=nowhere))
    there.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"engine-ca: .*there has no usable certificate in PEM"):
        engine_tls(Security(engine_ca=there))
    there.write_text("")
    with pytest.raises(ConfigError, match=r"engine-ca: .*there has no usable certificate in PEM"):
        engine_tls(Security(engine_ca=there))


class TlsEngine(MockEngine):
    """At an https URL."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def listen(self, port: int, routes: list[web.RouteDef]) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.files[0], self.files[1])
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        self._runners.append(runner)
        return int(runner.addresses[0][1])

    files: tuple[Path, Path]


@pytest.mark.parametrize("trusted", [True, False])
async def test_engines_over_tls(tmp_path: Path, trusted: bool) -> None:
    """Only a certificate of the given root is trusted; without one the engine gets nothing."""
    certificate(tmp_path)
    ca = tmp_path / "ca.crt"
    ca.write_text(CERT_A if trusted else CERT_B)
    engine = TlsEngine("decode", "d")
    engine.files = tmp_path / "tls.crt", tmp_path / "tls.key"
    await engine.start()
    config = RouterConfig(
        decode=(engine.url,), cluster_key=CLUSTER_KEY, port=0, security=Security(engine_ca=ca)
    )
    server = await serve(config)
    try:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
            session.post("/v1/completions", json=PROMPT) as response,
        ):
            assert response.status == (200 if trusted else 503)
        assert engine.legs.qsize() == trusted
        assert engine.cursors if trusted else not engine.cursors
    finally:
        await server.close()
        await engine.kill()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(cluster: Any, status: int) -> None:
    """Field case 60: the router connects to the engines that it was told, and to nothing else."""
    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({})

    stranger = MockEngine("decode", "stranger")
    port = await stranger.listen(0, [web.route("*", "/{path:.*}", elsewhere)])

    async def away(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": f"http://127.0.0.1:{port}{leg.path}"})

    asked: list[int] = []

    async def state_away() -> None:
        asked.append(status)
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{port}/internal/state")

    try:
        async with cluster(prefill=0, timeouts=NO_ACCOUNT) as c:
            c.d.script = away
            got, answer = await c.post(c.body())
            assert (got, answer["error"]["code"]) == (502, "decode_failed")
            c.d.state_script = state_away
            leg = c.d.legs.get_nowait()
            assert (await c.record(leg.ticket.key.handoff_id))["incomplete"]  # the engine has been asked
        assert asked
        assert reached == []
    finally:
        await stranger.kill()


async def test_nothing_of_the_environment_is_used(cluster: Any, monkeypatch: Any) -> None:
    """No proxy stands between router and engines, whatever the environment says."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with cluster() as c:
        assert (await c.post(c.body()))[0] == 200


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
async def test_an_open_router_says_so(
    host: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvhandoff.router.guard")
    config = RouterConfig(decode=("http://127.0.0.1:1",), cluster_key=CLUSTER_KEY, host=host, port=0)
    await (await serve(config)).close()
    said = [r.message for r in caplog.records if r.name == "kvhandoff.router.guard"]
    assert said == warned * [f"host {host} without --tenants: whoever reaches this port may use all of it"]


async def test_of_several_workers_the_first_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvhandoff.router.guard")
    for index in range(2):
        config = RouterConfig(
            decode=("http://127.0.0.1:1",),
            cluster_key=CLUSTER_KEY,
            host="0.0.0.0",
            port=0,
            worker=Worker(index, 2, tmp_path),
        )
        await (await serve(config)).close()
        assert len([r for r in caplog.records if r.name == "kvhandoff.router.guard"]) == 1


async def test_keys_in_the_clear_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(
        decode=("http://127.0.0.1:1",),
        cluster_key=CLUSTER_KEY,
        host="0.0.0.0",
        port=0,
        security=security(tmp_path),
    )
    await (await serve(config)).close()
    assert "host 0.0.0.0 without --tls-cert: keys and prompts travel in the clear" in caplog.text


async def test_limits_of_bodies_hold_for_tenants(cluster: Any, tmp_path: Path) -> None:
    async with cluster(security=security(tmp_path), max_body_bytes=1000) as c:
        status, answer = await c.post(c.body(prompt="x" * 1000), headers=bearer("acme"))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        status, answer = await c.post(c.body(prompt="x" * 1000))
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")  # read by nobody
