"""The router in front of stock vLLM engines: what each leg is sent, when, and what follows failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from multidict import CIMultiDict

from kvhandoff.core.errors import ConfigError
from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig
from tests.router.upstream_engines import (
    MODEL,
    PULL_PREFILL,
    WAIT_S,
    UpstreamLeg,
    UpstreamMock,
    decode,
    failing,
    held,
    plain,
    refusing,
    upstream_cluster,
    waiting,
)


async def test_pull_hands_the_reference_over_as_it_is() -> None:
    async with upstream_cluster("nixl") as c:
        status, answer = await c.post(stop=["."], cache_salt="s", kv_transfer_params={"evil": 1})
        assert (status, answer["choices"][0]["text"]) == (200, "hello")
        assert answer["kv_transfer_params"] is None  # the engines' blocks are no client's business
        p, d = await c.p.leg(), await c.d.leg()
        assert p.params == PULL_PREFILL
        assert (p.body["max_tokens"], p.body["stream"], p.body["cache_salt"]) == (1, False, "s")
        assert "stop" not in p.body
        assert d.params == {"do_remote_prefill": True, "do_remote_decode": False, **c.p.reference}
        assert (d.body["max_tokens"], d.body["stop"]) == (8, ["."])
        record = await c.record(answer["id"])
    assert (record["connector"], record["path"], record["kv_source"]) == ("nixl", "pull", None)
    assert (record["attempts"], record["status"], record["reasons"]) == (1, 200, [])
    assert list(record["phases"]) == ["route", "prefill_network", "bind", "decode_network"]
    assert record["prefill"]["engine_id"] == "p0"
    assert record["incomplete"]


async def test_a_stream_passes_through_and_its_time_is_split() -> None:
    async with upstream_cluster("nixl") as c:
        name, read = await c.stream()
        assert read.count(b"data: ") == 3
        assert read.endswith(b"data: [DONE]\n\n")
        record = await c.record(name)
    assert record["ttft_s"] == pytest.approx(sum(record["phases"].values()))
    assert record["id"] == f"cmpl-{name}"


async def test_push_sends_both_legs_at_once_under_one_id() -> None:
    async with upstream_cluster("nixl-push") as c:
        c.p.script = c.d.script = held
        asked = asyncio.create_task(c.post(prompt=[1, 2, 3]))
        p, d = await c.p.leg(), await c.d.leg()  # neither has answered
        assert p.request_id == d.request_id
        assert p.params == {"do_remote_decode": True, "do_remote_prefill": False}
        assert d.params == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "p0",
            "remote_host": "10.0.0.7",
            "remote_port": 5601,
            "tp_size": 1,
            "remote_request_id": "",
        }
        c.p.gate.set()
        c.d.gate.set()
        status, answer = await asked
        assert status == 200
        record = await c.record(answer["id"])
    assert (record["connector"], record["path"], record["binding"]) == ("nixl-push", "push", "early")
    assert list(record["phases"]) == ["route", "decode_network"]
    assert list(record["prefill_phases"]) == ["prefill_network"]


async def test_a_pushed_to_engine_does_not_wait_for_a_failed_prefill_leg() -> None:
    async with upstream_cluster("nixl-push", n_prefill=2) as c:
        c.p.script, c.d.script = failing, held  # upstream's decode engine would wait for ever
        asked = asyncio.create_task(c.post())
        first = await c.d.leg()
        await asyncio.wait_for(c.d.cancelled.get(), WAIT_S)
        c.d.gate.set()
        status, answer = await asked
        assert status == 200
        second, p1 = await c.d.leg(), await c.prefill[1].leg()
        # Another id: what the first attempt has left in the engines is nobody's.
        assert first.request_id != second.request_id == p1.request_id
        record = await c.record(answer["id"])
    assert (record["attempts"], record["reasons"]) == (2, ["prefill_failed"])
    assert (record["path"], "retry" in record["phases"]) == ("push", True)


async def test_a_refusal_of_the_prefill_engine_is_the_clients_also_when_pushed() -> None:
    async with upstream_cluster("nixl-push") as c:
        c.p.script, c.d.script = refusing, held
        status, answer = await c.post()
        assert (status, answer["error"]["message"]) == (400, "temperature: no")
        await asyncio.wait_for(c.d.cancelled.get(), WAIT_S)


async def test_without_a_prefill_engine_the_decode_engine_computes() -> None:
    async with upstream_cluster("nixl") as c:
        c.p.script = failing
        status, answer = await c.post()
        assert status == 200
        assert (await c.d.leg()).params is None
        record = await c.record(answer["id"])
    assert (record["path"], record["attempts"]) == ("local", 2)
    assert record["reasons"] == ["prefill_failed", "no_prefill_engine"]


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_prefill_later_than_new_attempts_may_begin(connector: str) -> None:
    """Also when both legs of a push are late at once, as by default: it was the prefill leg."""
    timeouts = {"prefill_s": 0.3, "answer_s": 0.3, "retry_s": 0.05}
    async with upstream_cluster(connector, n_prefill=2, timeouts=timeouts) as c:

        async def held_by_prefill(engine: UpstreamMock, leg: UpstreamLeg) -> Any:
            return await (decode if leg.params is None else held)(engine, leg)

        c.p.script, c.d.script = held, held_by_prefill if connector == "nixl-push" else decode
        status, answer = await c.post()
        assert status == 200, answer
        await asyncio.wait_for(c.p.cancelled.get(), WAIT_S)
        record = await c.record(answer["id"])
    assert (record["path"], record["attempts"], record["reasons"]) == ("local", 2, ["prefill_failed"])


async def test_decode_later_than_new_attempts_may_begin() -> None:
    async with upstream_cluster(n_decode=2, timeouts={"answer_s": 0.1, "retry_s": 0.05}) as c:
        c.d.script = held
        status, answer = await c.post()
        assert (status, answer["error"]["code"]) == (504, "decode_failed")
        assert c.decode[1].legs.empty()


async def test_a_failed_load_begins_anew_with_a_fresh_reference() -> None:
    async with upstream_cluster("nixl", n_decode=2) as c:
        c.d.script = failing
        status, answer = await c.post()
        assert status == 200
        first, second = await c.p.leg(), await c.p.leg()
        assert first.request_id != second.request_id
        assert (await c.decode[1].leg()).request_id == second.request_id
        record = await c.record(answer["id"])
    assert record["reasons"] == ["decode_failed"]


async def test_no_attempt_is_left() -> None:
    async with upstream_cluster("nixl", max_attempts=2) as c:
        c.d.script = failing
        status, answer = await c.post()
        assert (status, answer["error"]["code"]) == (502, "decode_failed")
        assert "KV load failed" in answer["error"]["message"]
        assert c.d.legs.qsize() == 2


async def test_an_answer_without_a_reference_is_not_decoded_on() -> None:
    async with upstream_cluster("nixl", max_attempts=1) as c:
        c.p.script = plain
        status, answer = await c.post()
        assert (status, answer["error"]["code"]) == (502, "no_reference")
        assert answer["error"]["message"] == (
            f"prefill engine at {c.p.url}: its answer has no kv_transfer_params"
        )
        assert c.d.legs.empty()


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_an_answer_without_a_reference_is_said(connector: str) -> None:
    """Nobody reads from such an engine. Pushed, the other leg would wait for a writer that never comes."""
    async with upstream_cluster(connector, max_attempts=2) as c:
        c.p.script = plain
        if connector == "nixl-push":
            c.d.script = waiting
        status, answer = await c.post()
        assert (status, answer["choices"][0]["text"]) == (200, "hello")
        record = await c.record(answer["id"])
        async with c.session.get(f"{c.url}/metrics") as page:
            counted = 'kvhandoff_router_reasons_total{kind="failure",reason="no_reference"} 1.0'
            assert counted in await page.text()
    assert (record["path"], record["attempts"], record["reasons"]) == ("local", 2, ["no_reference"])


async def test_a_missing_reference_that_nobody_waited_for_is_said_too() -> None:
    """The decode engine had the whole prompt, and has begun to answer."""
    async with upstream_cluster("nixl-push", timeouts={"linger_s": WAIT_S}) as c:

        async def later(engine: UpstreamMock, leg: UpstreamLeg) -> Any:
            await engine.gate.wait()
            return await plain(engine, leg)

        c.p.script = later
        body = {"model": MODEL, "prompt": "a prompt", "stream": True}
        async with c.session.post(f"{c.url}/v1/completions", json=body) as response:
            await response.content.readany()
            c.p.gate.set()
            await response.read()
            record = await c.record(response.headers["X-Request-Id"])
            while record["status"] is None:
                record = await c.record(record["handoff_id"])
    assert (record["status"], record["path"], record["attempts"]) == (200, "push", 1)
    assert record["reasons"] == ["no_reference"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "several_answers"),
        ({"best_of": 3}, "several_answers"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_needs_more_than_one_reader_stays_local(fields: dict[str, Any], reason: str) -> None:
    async with upstream_cluster("nixl") as c:
        status, answer = await c.post(**fields)
        assert status == 200
        assert (await c.d.leg()).params is None
        assert c.p.legs.empty()
        assert (await c.record(answer["id"]))["reasons"] == [reason]


@pytest.mark.parametrize(("connector", "wrong"), [("nixl", "push"), ("nixl-push", "pull")])
async def test_a_path_of_the_other_connector_is_refused(connector: str, wrong: str) -> None:
    async with upstream_cluster(connector) as c:
        status, answer = await c.post(headers={"x-kvhandoff-path": wrong})
        assert (status, answer["error"]["param"]) == (400, "x-kvhandoff-path")
        assert wrong in answer["error"]["message"]
        both: Any = CIMultiDict([("x-kvhandoff-path", "local"), ("x-kvhandoff-path", "local")])
        status, answer = await c.post(headers=both)
        assert (status, answer["error"]["param"]) == (400, "x-kvhandoff-path")
        status, _ = await c.post(headers={"x-kvhandoff-path": "local"})
        assert status == 200
        assert c.p.legs.empty()


async def test_a_client_that_leaves_ends_both_legs() -> None:
    async with upstream_cluster("nixl-push") as c:
        c.p.script = c.d.script = held
        asked = asyncio.create_task(c.post())
        await c.p.leg()
        name = (await c.d.leg()).request_id
        asked.cancel()
        await asyncio.wait_for(c.p.cancelled.get(), WAIT_S)
        await asyncio.wait_for(c.d.cancelled.get(), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while (record := await c.record(name))["status"] is None:
                pass
    assert (record["status"], record["reasons"]) == (499, ["client_aborted"])


async def test_models_readiness_and_metrics() -> None:
    async with upstream_cluster("nixl") as c:
        _, models = await c.get("/v1/models")
        assert [(model["id"], model.get("max_model_len")) for model in models["data"]] == [
            ("alias", None),
            ("tiny", 4096),
        ]
        status, ready = await c.get("/ready")
        assert (status, ready["connector"], ready["verified"]) == (200, "nixl", False)
        status, answer = await c.post(model="other")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        async with c.session.get(f"{c.url}/metrics") as page:
            assert f'engine_healthy{{engine="{c.d.url}",role="decode"}} 1.0' in await page.text()


async def test_an_engine_that_is_not_well_gets_no_legs() -> None:
    async with upstream_cluster("nixl", n_decode=2) as c:
        await c.decode[0].stop()
        status, answer = await c.post()  # refused, and another one is tried
        assert status == 200
        assert (await c.record(answer["id"]))["decode"]["engine_id"] == c.decode[1].url
        _, ready = await c.get("/ready")
        assert [engine["healthy"] for engine in ready["engines"]] == [True, False, True]


def test_addresses() -> None:
    address = UpstreamAddress.parse("http://h:8000,engine_id=P,side_channel=10.0.0.1:7,tp_size=2")
    assert address == UpstreamAddress(
        url="http://h:8000", engine_id="P", side_channel=("10.0.0.1", 7), tp_size=2
    )
    assert UpstreamAddress.parse("http://h:8000/").side_channel == ("h", 5600)


@pytest.mark.parametrize(
    "text",
    [
        "h:8000",
        "http://",
        "http://h:0",
        "http://h/v1",
        "http://h,side_channel=7",
        "http://h,side_channel=h:99999",
        "http://h,tp_size=0",
        "http://h,engine_id=",
        "http://h,other=1",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed is URL"):
        UpstreamAddress.parse(text)


def test_bad_configurations() -> None:
    d = UpstreamAddress.parse("http://h:1")
    with pytest.raises(ConfigError, match="decode: got no URL"):
        UpstreamConfig(connector="nixl", decode=())
    with pytest.raises(ConfigError, match="more than once"):
        UpstreamConfig(connector="nixl", prefill=(d,), decode=(d,))
    with pytest.raises(ConfigError, match="without engine_id"):
        UpstreamConfig(connector="nixl-push", prefill=(UpstreamAddress.parse("http://h:2"),), decode=(d,))
    with pytest.raises(ConfigError, match="path: got 'push', allowed with nixl is auto, pull, local"):
        UpstreamConfig(connector="nixl", decode=(d,), path="push")
    with pytest.raises(ConfigError, match="pair_tests: got 'maybe', allowed is auto, on, off"):
        UpstreamConfig(connector="nixl", decode=(d,), pair_tests="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="connector: got 'mooncake'"):
        UpstreamConfig(connector="mooncake", decode=(d,))  # type: ignore[arg-type]
