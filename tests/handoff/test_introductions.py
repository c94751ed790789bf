"""Who a peer is, by its first message: all its processes, and its version."""

from __future__ import annotations

import msgspec
import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Refused, Welcome, decode, encode
from kvhandoff.handoff.node import HandoffNode
from tests.handoff.sides import CHAIN, READ, SETTINGS, D, P, Side, descriptor, hello

PROCESSES = ("core", "rank 0", "rank 1")


def test_each_side_watches_all_processes_of_the_other() -> None:
    p = Side(HandoffNode(P, "addr-p", hello(processes=PROCESSES), SETTINGS))
    d = Side(HandoffNode(D, "addr-d", hello(processes=("engine",)), SETTINGS))
    d.do(ev.PeerWanted("addr-p"))
    assert d.hand_over(p) == [ev.WatchPeer(D, ("engine",))]
    assert p.hand_over(d) == [ev.WatchPeer(P, PROCESSES), ev.ConnectPeer(P, b"memory")]


@pytest.mark.parametrize("processes", [(), ("",), ("core", "")])
def test_none_are_watched_unless_all_are_named(processes: tuple[str, ...]) -> None:
    """The one without a name could outlive the others, and write."""
    p = Side(HandoffNode(P, "addr-p", hello(processes=processes), SETTINGS))
    d = Side(HandoffNode(D, "addr-d", hello(processes=processes), SETTINGS))
    d.do(ev.PeerWanted("addr-p"))
    assert d.hand_over(p) == []
    assert p.hand_over(d) == [ev.ConnectPeer(P, b"memory")]


def of_version_2(envelope: bytes) -> bytes:
    """The same message as the protocol's version 2 puts it on the wire: `process` names the only one."""
    message = msgspec.msgpack.decode(envelope)
    body = message["body"]
    for greeting in (body, body.get("hello", {})):
        if "processes" in greeting:
            del greeting["processes"]
            greeting |= {"protocol_version": 2, "process": "engine"}
    return msgspec.msgpack.encode(message | {"protocol_version": 2})


def test_a_peer_of_an_earlier_version_is_refused_with_both_versions(p: Side, d: Side) -> None:
    """It is understood well enough for that, whoever speaks first."""
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    [asked] = d.outbox
    assert p.do(ev.Received(decode(of_version_2(encode(d.node.envelope(asked)))))) == []
    [refused] = p.bodies()
    assert refused == Refused(detail="protocol_version: 2 here, 3 there", nonce=1)

    welcome = p.node.envelope(ev.Send("addr-d", D, Welcome(hello=hello(), nonce=1)))
    detail = "protocol_version: 3 here, 2 there"
    missed = ev.Missed(READ, Reason.HANDSHAKE_REFUSED, detail)
    assert d.do(ev.Received(decode(of_version_2(encode(welcome))))) == [missed]
