"""The driver in its thread: the agent, the side server, and calls of the scheduler half from another one."""

from __future__ import annotations

import http.server
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity, new_handoff_id
from kvhandoff.core.layout import KVLayout
from kvhandoff.engine import names
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.engine.register import LEASE_S
from kvhandoff.handoff.registration import Registration, RegistrationKey
from kvhandoff.handoff.tickets import Ticket, TicketKey
from kvhandoff.transport.api import TransportError
from kvhandoff.vllm.driver import Driver
from kvhandoff.vllm.scheduler_half import SchedulerHalf
from kvhandoff.vllm.settings import CLUSTER_KEY_ENV, ExtraConfig, PluginSettings
from kvhandoff.web import free_port
from tests.vllm_plugin.fake_handoff import descriptor
from tests.vllm_plugin.fake_vllm import BLOCK, FakePool, FakeRequest, FakeScheduler, alone

LAYOUT = KVLayout("fake", "float32", 1, 1, 1, BLOCK, BLOCK)
DEADLINE = 30.0


class FakeMover:
    """Moves nothing, and reports straight to the scheduler."""

    kind = "fake"
    alive = True

    def __init__(self) -> None:
        self.reports: list[tuple[str, bool, tuple[int, ...]]] = []
        self.reported = threading.Event()
        self.thread: int | None = None
        self.closed = False

    def start(self) -> bytes:
        return b"metadata"

    def connect(self, peer: Any, metadata: bytes, done: Callable[[Any], None]) -> None:
        done(TransportError("there is nobody"))

    def disconnect(self, peer: Any) -> None: ...

    def move(self, operation: Any, peer: Any, copies: Any, done: Callable[[Any], None]) -> None:
        raise AssertionError("there is nobody to move to")

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        self.reports.append((request_id, failed, tuple(bad_blocks)))
        self.reported.set()

    def close(self, timeout: float = 5.0) -> bool:
        self.closed = True
        return True


@dataclass
class Side:
    """One engine's core process."""

    driver: Driver
    half: SchedulerHalf
    vllm: FakeScheduler
    mover: FakeMover
    facts: EngineFacts
    url: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def sign(self, leg: Any, **fields: Any) -> str:
        now = self.get("/internal/state")["now"]
        key = HandoffKey(new_handoff_id(), 0)
        usual = {"audience": self.facts.identity, "not_after": now + 20, "key": key}
        return TicketKey(b"the key of these tests").sign(Ticket(leg=leg, **{**usual, **fields}))

    def run(self, request: FakeRequest) -> FakeRequest:
        while not request.status.finished:
            if self.mover.reports:
                self.vllm.reports.append(self.mover.reports.pop())
            self.vllm.step()
        return request

    def records(self, count: int) -> list[dict[str, Any]]:
        """All records; the server's answer comes behind whatever was called before."""
        found: list[dict[str, Any]] = self.get("/internal/state")["records"]
        assert len(found) == count
        return found


def make(settings: PluginSettings) -> tuple[Driver, SchedulerHalf, FakePool, EngineFacts]:
    pool = FakePool(30)
    half = SchedulerHalf(pool, LAYOUT, "fingerprint", 100, reports_failures=True)
    facts = EngineFacts(
        engine_id=settings.engine_id,
        role="both",
        model="model",
        model_fingerprint="fingerprint",
        num_blocks=30,
        processes=("host/1", "host/2"),
        integration="vllm",
        about={"vllm": "0.32.0"},
    )
    driver = Driver(settings, facts, half)
    half.connect(driver)
    return driver, half, pool, facts


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    monkeypatch.setenv(CLUSTER_KEY_ENV, "the key of these tests")
    port = free_port()
    driver, half, pool, facts = make(PluginSettings(engine_id=f"e{port}", port=port, extra=ExtraConfig()))
    mover = FakeMover()
    driver.start(lambda: mover)
    yield Side(driver, half, FakeScheduler(half, pool), mover, facts, f"http://127.0.0.1:{port}")
    driver.close()
    assert mover.closed


def test_the_side_server_says_what_the_router_asks(side: Side) -> None:
    state = side.get("/internal/state")
    assert (state["engine_id"], state["integration"], state["block_size"]) == (
        side.facts.engine_id,
        "vllm",
        BLOCK,
    )
    assert state["model_fingerprint"] == "fingerprint"
    blocks = side.get("/debug/kv")
    assert (blocks["total"], blocks["free"]) == (30, 30)
    assert side.get("/internal/about")["vllm"] == "0.32.0"
    assert side.get("/health") == {"status": "ok"}


def test_an_offer_and_its_end(side: Side) -> None:
    key = HandoffKey(new_handoff_id(), 0)
    params = {"ticket": side.sign("prefill", key=key)}
    request = side.run(side.vllm.add(FakeRequest("r", list(range(10)), 1, kv_transfer_params=params)))
    assert request.answer is not None
    assert request.answer["offer"]["source"] == {
        "engine_id": side.facts.engine_id,
        "epoch": side.facts.epoch,
    }
    (record,) = side.records(1)
    assert (record["leg"], record["computed_tokens"], record["finish_reason"]) == ("prefill", 10, "length")
    assert side.get("/debug/kv")["offered"] == 3
    assert side.post("/internal/withdraw", {"ticket": side.sign("withdraw", key=key)}) == (200, {})
    blocks = side.get("/debug/kv")
    assert (blocks["offered"], blocks["free"], blocks["used"]) == (0, 30, 0)


def test_a_load_that_nobody_answers_is_reported_failed(side: Side) -> None:
    """The source's address leads nowhere; the miss comes back through the mover, on the agent's thread."""
    nobody = descriptor(10)
    params = {"ticket": side.sign("decode", offer=nobody)}
    request = side.vllm.add(FakeRequest("r", list(range(10)), 2, kv_transfer_params=params))
    assert side.run(request).output_token_ids == alone(list(range(10)), 2)
    (record,) = side.records(1)
    assert record["reasons"] == ["peer_unreachable"]
    assert side.get("/debug/kv")["free"] == 30


def test_a_bad_ticket_is_counted(side: Side) -> None:
    request = FakeRequest("r", [1, 2, 3], 1, kv_transfer_params={"ticket": "x.y"})
    assert side.run(side.vllm.add(request)).answer == {"error": "bad_ticket"}
    with urllib.request.urlopen(side.url + "/metrics", timeout=DEADLINE) as answer:
        assert b"kvhandoff_engine_tickets_refused_total 1.0" in answer.read()


def test_an_engine_whose_data_plane_has_ended_is_not_chosen(side: Side) -> None:
    side.mover.alive = False
    for page in ("/health", "/internal/state"):
        with pytest.raises(urllib.error.HTTPError) as raised:
            side.get(page)
        assert raised.value.code == 503
        assert json.loads(raised.value.read())["error"]["code"] == "data_plane_ended"
        raised.value.close()
    assert side.get("/debug/kv")["total"] == 30  # the operator still sees it


def test_an_engine_goes_on_without_its_handoff_side(side: Side) -> None:
    """An exception on vLLM's main thread would end it."""
    tickets = [{"ticket": side.sign("prefill")} for _ in range(2)]
    prompt = list(range(10))
    begun = side.vllm.add(FakeRequest("begun", prompt, 1, kv_transfer_params=tickets[0]))
    side.driver.close()
    assert side.run(begun).output_token_ids == alone(prompt, 1)
    later = side.vllm.add(FakeRequest("later", prompt, 1, kv_transfer_params=tickets[1]))
    assert side.run(later).output_token_ids == alone(prompt, 1)
    assert later.answer == {"error": "handoff_ended"}


def test_a_ticket_for_another_life(side: Side) -> None:
    other = Identity(EngineId(side.facts.engine_id), Epoch("another"))
    status, body = side.post("/internal/peers", {"ticket": side.sign("peers", audience=other)})
    assert (status, body["error"]["code"]) == (403, "bad_ticket")


def test_a_name_is_one_engines(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of one name would each be taken for the other's next life."""
    monkeypatch.setattr(names, "PREDECESSOR_S", 0.0)
    settings = PluginSettings(engine_id=side.facts.engine_id, port=free_port(), extra=ExtraConfig())
    driver, *_ = make(settings)
    with pytest.raises(ConfigError, match="allowed is a name that no other engine has"):
        driver.start(FakeMover)
    driver.close()


def test_a_port_that_is_taken(side: Side) -> None:
    port = int(side.url.rpartition(":")[2])
    mover = FakeMover()
    driver, *_ = make(PluginSettings(engine_id=f"other than e{port}", port=port, extra=ExtraConfig()))
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1: can't listen"):
        driver.start(lambda: mover)
    assert mover.closed


def test_no_cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_KEY_ENV, raising=False)
    driver, *_ = make(PluginSettings(engine_id="keyless", port=free_port(), extra=ExtraConfig()))
    with pytest.raises(ConfigError, match="cluster key: none given"):
        driver.start(FakeMover)


def test_it_registers_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its pages' address, and vLLM's own as the operator gives it."""
    monkeypatch.setenv(CLUSTER_KEY_ENV, "the key of these tests")
    taken: queue.Queue[Registration] = queue.Queue()

    class Router(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            taken.put(RegistrationKey(b"the key of these tests").open(body["registration"]))
            self.send_response(200)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as router:
        threading.Thread(target=router.serve_forever, daemon=True).start()
        extra = ExtraConfig(
            role="decode",
            register=(f"http://127.0.0.1:{router.server_port}",),
            register_url="http://10.0.0.2:8000",
        )
        port = free_port()
        driver, _, _, facts = make(PluginSettings(engine_id=f"e{port}", port=port, extra=extra))
        driver.start(FakeMover)
        first = taken.get(timeout=DEADLINE)
        driver.close()
        while (last := taken.get(timeout=DEADLINE)).lease_s:
            pass
        router.shutdown()
    assert (first.engine, first.role, first.url) == (facts.identity, "decode", "http://10.0.0.2:8000")
    assert (first.internal, first.lease_s) == (f"http://127.0.0.1:{port}", LEASE_S)
    assert last.number > first.number
