"""Who may steer a transfer (field case 60): the router, with tickets, and nobody else.

What an engine does not obey, it does not act on at all: no leg, no offer, no word to anybody. What a client
sends under the names of transfers never gets past the router.
"""

from __future__ import annotations

import asyncio
import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Epoch
from kvhandoff.handoff.tickets import Ticket, TicketKey
from tests.cluster import CLUSTER_KEY, MODEL, LiveEngine, cluster, until
from tests.legs import MAX_TOKENS, Legs, new_key, pass_time, random_prompt, ticket
from tests.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LENGTH = 2 * BLOCK + 9
STRANGER = TicketKey(b"another cluster's key")
HOSTILE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_block_ids": [0, 1, 2],
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "control_address": "tcp://169.254.169.254:80",
}
"""What steers other engines."""


@dataclass
class Fleet:
    """A deployment, and how its engines' lines are watched."""

    legs: Legs
    p: LiveEngine
    d: LiveEngine
    wires: dict[str, Wire]
    rng: random.Random

    def prompt(self) -> list[int]:
        """A prompt that no engine has seen."""
        return random_prompt(self.rng, LENGTH)

    def engine(self, role: str) -> LiveEngine:
        return self.p if role == "prefill" else self.d

    def traces(self) -> tuple[Any, ...]:
        """Everything that obeying a ticket would change, on either engine."""
        return tuple(
            (
                engine.agent.state(0).cursor,
                engine.blocks(),
                len(self.wires[engine.role].sent),
                len(self.wires[engine.role].received),
            )
            for engine in (self.p, self.d)
        )

    async def refused(self, engine: LiveEngine, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST it; the 403's error. Nothing may have happened."""
        before = self.traces()
        async with self.legs.cluster.session.post(engine.url + endpoint, json=body) as answer:
            content = await answer.json()
            assert answer.status == 403, content
        assert content.keys() == {"error"}
        assert (content["error"]["code"], content["error"]["type"]) == ("bad_ticket", "permission_error")
        assert content["error"]["param"] == ("ticket" if "ticket" in body else "kv_transfer_params")
        assert self.traces() == before
        return dict(content["error"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny: Path) -> AsyncIterator[Fleet]:
    async with cluster(
        tiny, prefill_options={"clock": ManualClock(50.0)}, decode_options={"clock": ManualClock(5.0)}
    ) as deployment:
        p, d = deployment.prefill[0], deployment.decode[0]
        wires = {"prefill": Wire(p), "decode": Wire(d)}
        made = Fleet(Legs(deployment), p, d, wires, random.Random(10))
        await deployment.tokens(made.prompt())  # the engines have met: from here on, all talk has a cause
        await deployment.settled()
        yield made


# --------------------------------------------------------------------------------------- tickets refused


def _unsigned(engine: LiveEngine, leg: str) -> str:
    payload, _ = ticket(engine, leg).split(".")
    return f"{payload}."


def _signature_of_another(engine: LiveEngine, leg: str) -> str:
    payload, _ = ticket(engine, leg).split(".")
    _, signature = ticket(engine, leg).split(".")
    return f"{payload}.{signature}"


def _prolonged(engine: LiveEngine, leg: str) -> str:
    payload, signature = ticket(engine, leg, not_after=engine.agent.clock() - 1).split(".")
    longer = msgspec.structs.replace(
        msgspec.msgpack.decode(urlsafe_b64decode(payload), type=Ticket), not_after=1e9
    )
    return f"{urlsafe_b64encode(msgspec.msgpack.encode(longer)).decode()}.{signature}"


def _no_ticket_inside(engine: LiveEngine, leg: str) -> str:
    """Signed with the right key, which signs nothing else; still nothing is taken for granted."""
    return TicketKey(CLUSTER_KEY).sign({"leg": leg})  # type: ignore[arg-type]


def _for(change: dict[str, Any]) -> Callable[[LiveEngine, str], str]:
    return lambda engine, leg: ticket(
        engine, leg, audience=msgspec.structs.replace(engine.agent.me, **change)
    )


FORGED: dict[str, tuple[Callable[[LiveEngine, str], object], str]] = {
    "no text": (lambda engine, leg: 17, "not of the form"),
    "empty": (lambda engine, leg: "", "not of the form"),
    "three parts": (lambda engine, leg: ticket(engine, leg) + ".e30", "not of the form"),
    "no base64": (lambda engine, leg: "ä.ö", "not base64url"),
    "unsigned": (_unsigned, "not signed with this cluster's key"),
    "signed by a stranger": (
        lambda engine, leg: ticket(engine, leg, signed_by=STRANGER),
        "not signed with this cluster's key",
    ),
    "another ticket's signature": (_signature_of_another, "not signed with this cluster's key"),
    "prolonged": (_prolonged, "not signed with this cluster's key"),
    "signed, but no ticket": (_no_ticket_inside, "can't be read"),
    "expired": (
        lambda engine, leg: ticket(engine, leg, not_after=engine.agent.clock() - 0.1),
        "ran out 0.1 s ago",
    ),
    "for another engine": (_for({"engine_id": EngineId("elsewhere")}), "is for elsewhere@"),
    "for a former life": (_for({"epoch": Epoch("0123456789abcdef")}), "@0123456789abcdef, this engine is "),
}

forged = pytest.mark.parametrize("name", FORGED)
on_either = pytest.mark.parametrize("role", ["prefill", "decode"])


@forged
@on_either
@pytest.mark.parametrize("leg", ["prefill", "decode", "local"])
async def test_forged_ticket_of_a_leg(fleet: Fleet, name: str, role: str, leg: str) -> None:
    """An engine starts no leg for a ticket that its router has not made for it, now."""
    engine = fleet.engine(role)
    make, why = FORGED[name]
    body = {"model": MODEL, "max_tokens": 4, "kv_transfer_params": {"ticket": make(engine, leg)}}
    error = await fleet.refused(engine, "/v1/completions", {**body, "prompt": fleet.prompt()})
    assert why in error["message"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    await fleet.refused(engine, "/v1/chat/completions", {**body, "messages": messages})


@forged
@on_either
@pytest.mark.parametrize("action", ["withdraw", "peers"])
async def test_forged_ticket_of_the_router(fleet: Fleet, name: str, role: str, action: str) -> None:
    """Nor does it end offers or greet peers for one."""
    engine = fleet.engine(role)
    make, why = FORGED[name]
    error = await fleet.refused(engine, f"/internal/{action}", {"ticket": make(engine, action)})
    assert why in error["message"]


@on_either
@pytest.mark.parametrize(
    "params",
    ["a text", 17, True, [], [{"ticket": "a.b"}], {}, {"ticket": None}, HOSTILE, {"offer": HOSTILE}],
    ids=repr,
)
async def test_transfer_parameters_without_a_ticket(fleet: Fleet, role: str, params: object) -> None:
    """Whatever else stands under that name, an engine obeys none of it."""
    body = {"model": MODEL, "prompt": fleet.prompt(), "max_tokens": 4, "kv_transfer_params": params}
    await fleet.refused(fleet.engine(role), "/v1/completions", body)


@pytest.mark.parametrize("leg", ["prefill", "decode", "local", "peers"])
async def test_ticket_for_another_purpose(fleet: Fleet, leg: str) -> None:
    """A good ticket is good for its own leg only: this one ends no offer."""
    offer = await fleet.legs.offer(fleet.p, fleet.prompt())
    wrong = ticket(fleet.p, leg, key=offer.key if leg != "prefill" else new_key())
    error = await fleet.refused(fleet.p, "/internal/withdraw", {"ticket": wrong})
    assert f"a ticket to {leg} does not withdraw" in error["message"]
    assert fleet.p.blocks().offered == 3
    for purpose in ("withdraw", "peers"):
        body = {"prompt": fleet.prompt(), "kv_transfer_params": {"ticket": ticket(fleet.p, purpose)}}
        await fleet.refused(fleet.p, "/v1/completions", body)
    await fleet.legs.withdraw(fleet.p, offer.key)
    await fleet.legs.cluster.settled()


@pytest.mark.parametrize("leg", ["prefill", "local", "decode"])
async def test_replayed_ticket(fleet: Fleet, leg: str) -> None:
    """Once per leg and attempt: sent again, at once, side by side, or when it has run out."""
    prompt = fleet.prompt()
    engine = fleet.d if leg == "decode" else fleet.p
    offer = await fleet.legs.offer(fleet.p, prompt) if leg == "decode" else None
    key = new_key()
    signed = ticket(engine, leg, key=key, offer=offer, not_after=engine.agent.clock() + 0.5)
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "kv_transfer_params": {"ticket": signed, "prompt_token_ids": prompt},
    }
    both = await asyncio.gather(*(fleet.legs.cluster.post(body, url=engine.url) for _ in range(2)))
    assert sorted(status for status, _ in both) == [200, 403]
    await fleet.legs.record(engine, key)
    await fleet.legs.cluster.settled(fleet.d)
    error = await fleet.refused(engine, "/v1/completions", body)
    assert f"ticket for the {leg} leg of {key} was used before" in error["message"]
    pass_time(engine, 0.6)
    error = await fleet.refused(engine, "/v1/completions", body)
    assert "ran out" in error["message"]
    if leg == "prefill":
        await fleet.legs.withdraw(fleet.p, key)
    await fleet.legs.cluster.settled()


async def test_replayed_withdrawal(fleet: Fleet) -> None:
    """A withdrawal ends its own offer, once."""
    offer = await fleet.legs.offer(fleet.p, fleet.prompt())
    other = await fleet.legs.offer(fleet.p, fleet.prompt())
    body = {"ticket": ticket(fleet.p, "withdraw", key=offer.key)}
    async with fleet.legs.cluster.session.post(f"{fleet.p.url}/internal/withdraw", json=body) as answer:
        assert (answer.status, await answer.json()) == (200, {})
    assert fleet.p.blocks().offered == 3
    await until(lambda: fleet.p.blocks().used == 0)
    await fleet.refused(fleet.p, "/internal/withdraw", body)
    await fleet.legs.withdraw(fleet.p, other.key)
    await fleet.legs.cluster.settled()


# -------------------------------------------------------------------------------------- through the router


@pytest.mark.parametrize("path", ["pull", "local"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("stolen", [False, True], ids=["hostile", "stolen ticket"])
async def test_client_that_sends_transfer_parameters(
    fleet: Fleet, path: str, chat: bool, stolen: bool
) -> None:
    """Stripped: the answer and its KV are those of the same request without."""
    text = f"{path} {chat} {stolen}: there is nothing better than reading in the shade of an old tree"
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": MODEL, **asked, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    status, clean = await fleet.legs.cluster.post({**body, "cache_salt": "alone"}, chat=chat, url=fleet.d.url)
    assert status == 200
    offer = await fleet.legs.offer(fleet.p, fleet.prompt(), salt="another tenant")
    params: dict[str, Any] = HOSTILE
    if stolen:
        # Signed, unused, for this very engine: with it the client would read another tenant's offer.
        params = {"ticket": ticket(fleet.d, "decode", offer=offer, cache_salt="another tenant")}
    headers = {
        "x-kvhandoff-path": path,
        "x-prefiller-host-port": "169.254.169.254:80",
        "x-request-id": "chosen by the client",
    }
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    async with fleet.legs.cluster.session.post(
        fleet.legs.cluster.url + endpoint, json={**body, "kv_transfer_params": params}, headers=headers
    ) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    assert answer["choices"][0]["token_ids"] == clean["choices"][0]["token_ids"]
    assert "kv_transfer_params" not in answer
    assert "chosen by the client" not in answer["id"]
    record = await fleet.legs.cluster.record(answer["id"])
    assert record["path"] == path
    assert record["kv_source"] == {"pull": "transferred", "local": "local"}[path]
    assert fleet.p.blocks().offered == 3, "nobody has read the other tenant's offer"
    await fleet.legs.withdraw(fleet.p, offer.key)
    await fleet.legs.cluster.settled()


async def test_several_prompts_with_transfer_parameters(fleet: Fleet) -> None:
    """The one leg that the router sends without a ticket of its own takes along none of the client's."""
    offer = await fleet.legs.offer(fleet.p, fleet.prompt())
    params = {"ticket": ticket(fleet.d, "decode", offer=offer)}
    body = {"prompt": [fleet.prompt(), fleet.prompt()], "max_tokens": 2, "kv_transfer_params": params}
    status, answer = await fleet.legs.cluster.post(body)
    assert (status, len(answer["choices"])) == (200, 2)
    await fleet.legs.withdraw(fleet.p, offer.key)
    await fleet.legs.cluster.settled()
