"""Where members come from: files, names, registrations; and how several sources make one set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.handoff.registration import BadRegistration, Registration, RegistrationKey
from kvhandoff.handoff.tickets import TicketKey
from kvhandoff.router.address import EngineAddress, EngineName, parse_name
from kvhandoff.router.member_dns import NamedMembers, resolve
from kvhandoff.router.member_file import FileMembers, read_members
from kvhandoff.router.members import Member, merge
from kvhandoff.router.registrations import Registrations
from tests.router.engines import CLUSTER_KEY, soon

D = Member("decode", EngineAddress("http://d:1"))
P = Member("prefill", EngineAddress("http://p:1"))


class Turns:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.asleep = asyncio.Event()
        self._go = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        assert seconds > 0
        self.asleep.set()
        await self._go.wait()
        self._go.clear()

    async def next(self) -> None:
        """Let the source look once, until it sleeps again."""
        await soon(self.asleep.wait())
        self.asleep.clear()
        self._go.set()
        await soon(self.asleep.wait())


# ---- merging ----


def test_what_the_first_source_says_counts_and_any_may_drain() -> None:
    other = Member("prefill", EngineAddress("http://d:1", "http://d:2"), drain=True)
    assert merge([(D,), (P, other)]) == [Member("decode", D.address, drain=True), P]
    assert merge([(D, P), (D,)]) == [D, P]


# ---- file ----

GOOD = b"decode: [{url: 'http://d:1'}]"


def test_a_file_s_members() -> None:
    text = b"""
    prefill:
      - url: http://10.0.0.1:8000/
        internal: http://10.0.0.1:14600
    decode:
      - url: http://10.0.0.2:8000
        drain: true
    """
    assert read_members(text) == (
        Member("prefill", EngineAddress("http://10.0.0.1:8000", "http://10.0.0.1:14600")),
        Member("decode", EngineAddress("http://10.0.0.2:8000"), drain=True),
    )
    assert read_members(b"decode: []") == ()
    merged = b"prefill: [&p {url: 'http://p:1', drain: true}]\ndecode: [{<<: *p, url: 'http://d:1'}]"
    assert [member.drain for member in read_members(merged)] == [True, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "the file: got null, allowed is an object"),
        (b"prefill: []", "decode: missing, it is required"),
        (b"decode: [{url: 1}]", "decode[0].url: got 1, allowed is a string"),
        (b"decode: [{url: 'http://d:1'}, {url: d}]", "decode[1].url: got 'd', allowed is http://HOST:PORT"),
        (b"decode: [{url: 'http://d:1', internal: x}]", "decode[0].internal: got 'x'"),
        (b"decode: [{url: 'http://d:1', drain: maybe}]", "decode[0].drain: got 'maybe', allowed is true or"),
        (b"decode: [{url: 'http://d:1', dran: true}]", "decode[0]: got the unknown field 'dran', allowed"),
        (b"decode: [{url: 'http://d:1'}, {url: 'http://d:1/'}]", "decode[1].url: got http://d:1 more than"),
        (b"prefill: [{url: 'http://d:1'}]\ndecode: [{url: 'http://d:1'}]", "decode[0].url: got http://d:1"),
        (b"decode: ['http://u:p@d:1']", "decode[0]: got a string of 14 characters, allowed is an object"),
        (b"decode: []\nprefill: []\ndecode: []", "decode: got it at lines 1 and 3, allowed is once"),
        (
            b"decode:\n- url: http://d:1\n  'url': http://d:2",
            "decode[0].url: got it at lines 2 and 3,",
        ),
        (b'{"decode": [],\n"decode": []}', "decode: got it at lines 1 and 2, allowed is once"),
        (b"decode: [", "it is neither YAML nor JSON"),
        (b"decode: \xff", "it is neither YAML nor JSON"),
        (b"decode: [{url: 2001-99-99}]", "it is neither YAML nor JSON"),
    ],
)
def test_a_bad_file_is_refused_by_field(text: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_members(text)
    assert said in str(refused.value)


async def test_a_file_is_followed_and_a_bad_one_leaves_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, turns = tmp_path / "fleet.yaml", Turns()
    file.write_bytes(GOOD)
    source = FileMembers(file, sleep=turns)
    members = source.members()
    assert await soon(anext(members)) == (D,)
    changed = asyncio.ensure_future(anext(members))
    await turns.next()
    assert not changed.done(), "it is as it was"

    for broken, said in ((b"decode: 5", "decode: got 5, allowed is an array"), (None, "can't be read")):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        await turns.next()
        assert not changed.done()
        assert source.problem is not None
        assert said in source.problem
        await turns.next()
        assert len([r for r in caplog.records if said in r.getMessage()]) == 1, "said once"

    file.write_bytes(b"decode: [{url: 'http://d:1', drain: true}]")
    turns._go.set()
    assert await soon(changed) == (Member("decode", D.address, drain=True),)
    assert source.problem is None
    await members.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"), [(None, "can't be read (No such file"), (b"decode: 5", "decode: got 5")]
)
async def test_a_router_does_not_start_with_a_bad_file(tmp_path: Path, text: bytes | None, said: str) -> None:
    file = tmp_path / "fleet.yaml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        await anext(FileMembers(file).members())
    assert str(refused.value).startswith(f"fleet: {file}")
    assert said in str(refused.value)


# ---- names ----


async def test_a_name_s_addresses_are_followed_and_its_loss_leaves_the_last_answer() -> None:
    answers: list[Iterable[str] | OSError] = [{"10.0.0.2", "10.0.0.1"}]
    asked: list[tuple[str, int]] = []

    async def resolver(host: str, port: int) -> Iterable[str]:
        asked.append((host, port))
        if isinstance(answers[0], OSError):
            raise answers[0]
        return answers[0]

    turns = Turns()
    source = NamedMembers("decode", EngineName("engines", 8000), resolve=resolver, sleep=turns)
    members = source.members()

    def at(*hosts: str) -> tuple[Member, ...]:
        return tuple(Member("decode", EngineAddress(f"http://{host}:8000")) for host in hosts)

    assert await soon(anext(members)) == at("10.0.0.1", "10.0.0.2")
    assert asked == [("engines", 8000)]
    changed = asyncio.ensure_future(anext(members))
    answers[0] = ("10.0.0.2", "10.0.0.1")  # in another order
    await turns.next()
    assert source.problem is None
    for lost in (OSError("Name or service not known"), ()):
        answers[0] = lost
        await turns.next()
        assert not changed.done()
        assert source.problem is not None
    answers[0] = {"fd00::1"}
    turns._go.set()
    assert await soon(changed) == at("[fd00::1]")
    assert source.problem is None
    await members.aclose()  # type: ignore[attr-defined]


async def test_a_name_that_does_not_resolve_yet_stands_for_no_engine() -> None:
    async def resolver(host: str, port: int) -> Iterable[str]:
        raise OSError("Name or service not known")

    source = NamedMembers("decode", EngineName("engines", 8000), resolve=resolver)
    assert await soon(anext(source.members())) == ()
    assert source.problem == "Name or service not known"


async def test_the_system_s_resolver() -> None:
    assert await resolve("127.0.0.1", 80) == {"127.0.0.1"}


def test_names_are_parsed() -> None:
    name = parse_name("decode", "dns+http://engines.default.svc:8000")
    assert (name, str(name)) == (
        EngineName("engines.default.svc", 8000),
        "dns+http://engines.default.svc:8000",
    )
    for bad in (
        "dns+http://engines",
        "dns+https://engines:1",
        "dns+http://e:1,internal=http://e:2",
        "dns+e:1",
    ):
        with pytest.raises(ConfigError, match=r"decode: got .* allowed is dns\+http://NAME:PORT"):
            parse_name("decode", bad)


# ---- registrations ----

ME = Identity(EngineId("d"), Epoch("1"))
KEY = RegistrationKey(CLUSTER_KEY)


def registration(number: int = 1, **other: Any) -> str:
    facts = {"engine": ME, "number": number, "role": "decode", "url": "http://d:1/", "lease_s": 15.0}
    return KEY.sign(Registration(**{**facts, **other}))


async def test_an_engine_stays_as_long_as_it_registers() -> None:
    clock = ManualClock(5.0)
    registrations = Registrations(CLUSTER_KEY, clock, look_s=0.001)
    members = registrations.members()
    assert await soon(anext(members)) == ()
    registrations.register(registration(1))
    assert await soon(anext(members)) == (D,)

    changed = asyncio.ensure_future(anext(members))
    clock.advance(14.9)
    registrations.register(registration(2))
    clock.advance(14.9)
    registrations._expire()
    assert list(registrations._entries) == ["http://d:1"], "the second one holds for 15 s from its arrival"
    clock.advance(0.1)
    assert await soon(changed) == ()

    registrations.register(registration(3, internal="http://d:2/"))
    assert await soon(anext(members)) == (Member("decode", EngineAddress("http://d:1", "http://d:2")),)
    registrations.register(registration(4, lease_s=0.0))
    assert await soon(anext(members)) == ()
    await members.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("signed", "why"),
    [
        (
            RegistrationKey(b"another").sign(
                Registration(engine=ME, number=9, role="decode", url="http://d:1", lease_s=1.0)
            ),
            "not signed with this cluster's key",
        ),
        ("a.b.c", "payload.signature"),
        (None, "payload.signature"),
        (registration(3), "its number is 3, but 3 of d@1 was here before"),
        (registration(2), "its number is 2, but 3 of d@1 was here before"),
        (TicketKey(CLUSTER_KEY)._signer.sign(b"\x80"), "not signed with this cluster's key"),
        (KEY._signer.sign(b"\x80"), "can't be read"),
    ],
)
async def test_foreign_and_repeated_ones_are_refused(signed: object, why: str) -> None:
    registrations = Registrations(CLUSTER_KEY, ManualClock())
    registrations.register(registration(3))
    with pytest.raises(BadRegistration, match=why) as refused:
        registrations.register(signed)
    assert (refused.value.status, refused.value.code) == (403, "bad_registration")
    assert await soon(anext(registrations.members())) == (D,)


async def test_a_new_life_at_the_same_url() -> None:
    """A message of the life before it, late, neither takes it out nor comes in its place."""
    clock = ManualClock()
    registrations = Registrations(CLUSTER_KEY, clock)
    now = Identity(EngineId("d"), Epoch("2"))
    registrations.register(registration(1))
    new = registration(1, engine=now)
    registrations.register(new)
    assert registrations.last() == [new]
    registrations.register(registration(2, lease_s=0.0))
    assert registrations.last() == [new]
    with pytest.raises(
        BadRegistration, match=r"registration: d@1 has been replaced by d@2, now at http://d:1$"
    ):
        registrations.register(registration(3))
    assert registrations.last() == [new]
    with pytest.raises(BadRegistration, match="its number is 3, but 3 of d@1 was here before"):
        registrations.register(registration(3))
    clock.advance(14.9)
    renewed = registration(2, engine=now)
    registrations.register(renewed)
    assert registrations.last() == [renewed]
    registrations.register(registration(3, engine=now, lease_s=0.0))
    assert registrations.last() == []


def test_lives_that_are_heard_of_the_wrong_way_round() -> None:
    """The living one is shut out no longer than the other's lease."""
    clock = ManualClock()
    registrations = Registrations(CLUSTER_KEY, clock)
    living = Identity(EngineId("d"), Epoch("2"))
    registrations.register(registration(7, engine=living))
    late = registration(90)
    registrations.register(late)
    with pytest.raises(BadRegistration, match="d@2 has been replaced by d@1"):
        registrations.register(registration(8, engine=living))
    clock.advance(15.0)
    registrations._expire()
    renewed = registration(9, engine=living)
    registrations.register(renewed)
    assert registrations.last() == [renewed]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lease_s": -1.0}, "lease_s: got -1.0, allowed is 0 to 3600"),
        ({"lease_s": float("nan")}, "lease_s: got nan"),
        ({"lease_s": 3601.0}, "lease_s: got 3601.0"),
        ({"url": "file:///etc"}, "url: got 'file:///etc'"),
        ({"internal": "d"}, "internal: got 'd'"),
    ],
)
def test_bad_fields(fields: dict[str, Any], said: str) -> None:
    registrations = Registrations(CLUSTER_KEY, ManualClock())
    with pytest.raises(RequestError) as refused:
        registrations.register(registration(1, **fields))
    assert refused.value.status == 400
    assert said in refused.value.message
    assert refused.value.param == next(iter(fields))
    registrations.register(registration(1))  # nothing of it was remembered


async def test_another_life_counts_from_its_own_start() -> None:
    registrations = Registrations(CLUSTER_KEY, ManualClock())
    registrations.register(registration(7))
    registrations.register(registration(1, engine=Identity(EngineId("d"), Epoch("2"))))
    with pytest.raises(BadRegistration):
        registrations.register(registration(6))
