"""The control plane: small messages between engines, authenticated and encrypted with the cluster key.

Every engine binds one PULL socket and has a PUSH socket per peer address it sends to: messages go one way,
and an answer is a message to the address that the asker named. What a message means is the caller's matter;
this file moves bytes.

- **Who may talk**: ZeroMQ's CURVE, with one key pair made from the cluster key on both sides. A process
  without the cluster key can't complete the handshake in either role.
- **What is kept**: up to `queue_bound` messages per peer, first of all until its connection is up. A
  connection that breaks, or does not come up in time, is dropped together with its queue, so that a peer
  which starts at that address later gets no mail of its predecessor's; the next `send` starts afresh.
  Messages may be lost, never repeated or altered; within one connection they keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvhandoff.core.errors import ConfigError

_log = logging.getLogger(__name__)

QUEUE_BOUND = 1000
MAX_MESSAGE_BYTES = 16 << 20
"""A claim's chain has 16 bytes per block: enough for a prompt of 14 million tokens."""

_RECONNECT_MS = 50
_CONNECT_PATIENCE_S = 10.0
"""How long messages wait for a peer that does not listen (yet)."""
_IDLE_S = 300.0
"""Sockets to peers that nothing was sent to for this long are closed."""
_HEARTBEAT_MS = 5000
"""Pings; a peer that does not answer within three times this (a host that is gone) is disconnected."""
_BATCH = 64
"""Messages handled before other coroutines get their turn."""

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True)
class ControlCounters:
    """What a control plane has seen since its start."""

    sent: int = 0
    """Messages taken by `send`."""
    received: int = 0
    """Messages given to `on_message`, the malformed ones included."""
    malformed: int = 0
    """Messages that `on_message` refused with ValueError, or that were not one frame."""
    dropped: int = 0
    """Messages that `send` did not take: the queue was full, the address or the size was wrong."""
    rejected: int = 0
    """Connections to this engine whose handshake failed: no cluster key, or not ZeroMQ at all."""


@dataclass(eq=False, slots=True)
class _Peer:
    """The socket to one address."""

    socket: zmq.Socket[bytes]
    monitor: zmq.asyncio.Socket
    made_at: float
    used_at: float
    connected: bool = False
    watcher: asyncio.Task[None] | None = None


class ControlPlane:
    """Sends and receives on the asyncio loop (also uvloop's) that `start` ran on; call nothing elsewhere."""

    def __init__(
        self,
        cluster_key: bytes,
        on_message: Callable[[bytes], None],
        bind: str = "tcp://127.0.0.1:0",
        *,
        on_disconnect: Callable[[str], None] | None = None,
        queue_bound: int = QUEUE_BOUND,
    ) -> None:
        """`on_message` gets each message on the loop; it must not block, and raises ValueError for one that
        it can't read. `on_disconnect` gets the address of a peer whose connection broke, or never came up.
        """
        self._public, self._secret = _key_pair(cluster_key)
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._bind = bind
        self._queue_bound = queue_bound
        self._context = zmq.asyncio.Context()
        self._plain_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._monitors = count()
        self._peers: dict[str, _Peer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False
        self.counters = ControlCounters()

    async def start(self) -> str:
        """Listen; returns the address, with the port that was chosen if `bind` left it open (port 0).

        Raises ConfigError for a malformed or used address.
        """
        self._loop = asyncio.get_running_loop()
        zap = self._context.socket(zmq.REP)
        zap.bind(_ZAP_ENDPOINT)
        inbox = self._context.socket(zmq.PULL)
        inbox.curve_server = True
        inbox.curve_secretkey = self._secret
        inbox.zap_domain = b"kvhandoff"
        inbox.ipv6 = self._bind.startswith("tcp://[")
        inbox.maxmsgsize = MAX_MESSAGE_BYTES
        inbox.rcvhwm = self._queue_bound
        monitor = self._monitor(inbox, _FAILED_HANDSHAKES)
        try:
            _listening_host("control", self._bind)
            inbox.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _cannot_bind("control", self._bind, error) from error
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._open = True
        for work in (self._authenticate(zap), self._receive(inbox), self._count_rejected(monitor)):
            self._tasks.append(asyncio.create_task(work))
        return inbox.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, address: str, message: bytes) -> bool:
        """Queue `message` for whoever listens at `address`. Never blocks, never raises.

        False, and counted as dropped: the queue to that peer is full, the address is malformed, the message
        is larger than MAX_MESSAGE_BYTES, or the plane is closed. True says nothing about delivery.
        """
        if self._send(address, message):
            self.counters.sent += 1
            return True
        self.counters.dropped += 1
        return False

    def _send(self, address: str, message: bytes) -> bool:
        if not self._open:
            return False
        if len(message) > MAX_MESSAGE_BYTES:
            _log.error("message of %d bytes to %s is not sent: too large", len(message), address)
            return False
        peer = self._peers.get(address) or self._connect(address)
        if peer is None:
            return False
        peer.used_at = self._loop.time()
        try:
            peer.socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _connect(self, address: str) -> _Peer | None:
        """A socket whose connection comes up in the background; None for a malformed address."""
        host = _host_of(address, lowest_port=1)
        if host is None:
            return None
        socket: zmq.Socket[bytes] = self._plain_context.socket(zmq.PUSH)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_serverkey = self._public
        socket.ipv6 = host.startswith("[")
        socket.sndhwm = self._queue_bound
        socket.linger = 0
        socket.reconnect_ivl = _RECONNECT_MS
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = 2 * _HEARTBEAT_MS
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES
        monitor = self._monitor(socket, events)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            _log.warning("can't connect to %s: %s", address, error)
            _close(socket, monitor)
            return None
        now = self._loop.time()
        peer = _Peer(socket, monitor, made_at=now, used_at=now)
        peer.watcher = asyncio.create_task(self._watch(address, peer))
        self._peers[address] = peer
        return peer

    def _monitor(self, socket: Any, events: int) -> zmq.asyncio.Socket:
        """A socket that receives those events of `socket`."""
        endpoint = f"inproc://monitor-{next(self._monitors)}"
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(endpoint)
        return monitor

    def forget(self, address: str) -> None:
        """Close the socket to `address` and drop what is queued for it. Unknown: no-op."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return
        if peer.watcher is not None:
            peer.watcher.cancel()
        _close(peer.socket, peer.monitor)

    async def close(self) -> None:
        """Stop; what is queued is dropped."""
        self._open = False
        for address in list(self._peers):
            self.forget(address)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _watch(self, address: str, peer: _Peer) -> None:
        """Wait until the socket has to go: broken, not up in time, or unused for long."""
        why = None
        while why is None:
            until = peer.used_at + _IDLE_S if peer.connected else peer.made_at + _CONNECT_PATIENCE_S
            try:
                async with asyncio.timeout_at(until):
                    event = parse_monitor_message(await peer.monitor.recv_multipart())["event"]
            except TimeoutError:
                if not peer.connected:
                    why = "nobody answers"
                elif until == peer.used_at + _IDLE_S:
                    why = "unused"
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.connected = True
            elif event & _FAILED_HANDSHAKES:
                why = "handshake failed: is its cluster key another one?"
            elif peer.connected:
                why = "connection lost"
        _log.info("connection to %s is dropped: %s", address, why)
        peer.watcher = None
        self.forget(address)
        if why != "unused" and self._on_disconnect is not None:
            self._on_disconnect(address)

    async def _receive(self, inbox: zmq.asyncio.Socket) -> None:
        handled = 0
        while True:
            frames = await inbox.recv_multipart()
            self.counters.received += 1
            try:
                if len(frames) != 1:
                    raise ValueError(f"{len(frames)} frames")
                self._on_message(frames[0])
            except ValueError as error:
                self.counters.malformed += 1
                _log.debug("malformed message: %s", error)
            except Exception:  # noqa: BLE001  one message's handler must not stop all messages
                _log.exception("a message's handler has failed")
            handled += 1
            if handled % _BATCH == 0:
                await asyncio.sleep(0)  # recv does not yield while messages are there

    async def _authenticate(self, zap: zmq.asyncio.Socket) -> None:
        """Answer libzmq's question (RFC 27) about each new connection: admitted is who has our key pair."""
        expected = z85.decode(self._public)
        while True:
            version, request_id, *_, credentials = await zap.recv_multipart()
            code, text = (b"200", b"OK") if credentials == expected else (b"400", b"not of this cluster")
            await zap.send_multipart([version, request_id, code, text, b"", b""])

    async def _count_rejected(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            self.counters.rejected += 1


def _key_pair(cluster_key: bytes) -> tuple[bytes, bytes]:
    """(public, secret) in Z85. The secret is a hash of the cluster key, clamped as Curve25519 wants it."""
    secret = bytearray(blake2b(cluster_key, digest_size=32, person=b"kvh-control").digest())
    secret[0] &= 248
    secret[31] = (secret[31] & 127) | 64
    encoded = z85.encode(bytes(secret))
    return zmq.curve_public(encoded), encoded


def _host_of(address: str, lowest_port: int) -> str | None:
    """The host in `tcp://host:port`, an IPv6 one with its brackets; None if it is nothing of that form."""
    parts = _ADDRESS.fullmatch(address)
    return parts[1] if parts is not None and lowest_port <= int(parts[2]) <= 65535 else None


def check_control(name: str, address: str) -> None:
    """Find an address that can't be listened at before a model is loaded, not after. Raises ConfigError;
    `name`: the setting, for its message."""
    host = _listening_host(name, address)
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        probe.ipv6 = host.startswith("[")
        try:
            probe.bind(address)
        except zmq.ZMQError as error:
            raise _cannot_bind(name, address, error) from error


def _listening_host(name: str, address: str) -> str:
    host = _host_of(address, lowest_port=0)
    if host is None:
        raise ConfigError(f"{name}: got {address!r}, allowed is tcp://HOST:PORT; port 0 takes a free one")
    return host


def _cannot_bind(name: str, address: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"{name}: got {address!r}, which can't be listened at ({zmq.strerror(error.errno or 0)}), allowed is "
        "tcp://HOST:PORT with an address of this machine and a free port"
    )


def _close(socket: Any, monitor: Any) -> None:
    socket.monitor(None, 0)
    socket.close(linger=0)
    monitor.close(linger=0)
