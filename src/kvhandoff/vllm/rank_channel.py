"""The channel between an engine's driver and one of its ranks: two processes of one host, for one life.

The rank listens on a Unix socket in a directory that only its user may enter, and obeys the one peer that
presents its token; address and token reach the driver with vLLM's own handshake (`RankHello`). Once the
driver is attached the socket's file is removed: nobody else comes, and a killed process leaves nothing
behind. A channel that has ended is never mended.

Messages are typed and bounded, and never unpickled. The rank's side is `RankChannel`, a thread; the driver's
is in `ranked_mover.py`.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, TransportError
from kvhandoff.transport.mover import Moved

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
"""Of one message: a move of a million scattered blocks."""

_LOOK_MS = 1000
"""How often a rank with nothing to do looks whether its mover still lives."""

_LINGER_MS = 1000
"""How long a rank that leaves waits until its last words are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """What one rank tells the driver, through vLLM's handshake: plain values only."""

    engine_id: str
    rank: int
    ranks: int
    address: str
    """Where its channel listens."""
    token: bytes
    """Admits to the channel."""
    process: str
    """Names the worker's process, as `liveness.this_process` does."""
    kind: str
    """The kind of its data plane."""
    metadata: bytes
    """Its data plane's, for peers."""
    layout: dict[str, Any]
    """The fields of the engine's `KVLayout`, equal on all ranks."""
    num_blocks: int

    @property
    def kv_layout(self) -> KVLayout:
        """The layout as the protocol wants it."""
        return msgspec.convert(self.layout, KVLayout)


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The driver's first message; without the right token nothing is obeyed, and nothing answered."""

    token: bytes


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connect to a peer engine; `metadata` are those of all its ranks. Answered by `Connected`."""

    call: int
    peer: Identity
    metadata: bytes


class Disconnect(msgspec.Struct, frozen=True, tag="disconnect"):
    """Forget a peer. Not answered."""

    peer: Identity


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Move this rank's part of those blocks. Answered by `Ended`, however long that takes."""

    call: int
    operation: Operation
    peer: Identity
    copies: tuple[Copy, ...]


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Tell vLLM, at the end of the present step, that a request's load has ended. Not answered."""

    request_id: str
    failed: bool
    bad_blocks: tuple[int, ...]


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The rank obeys its driver from now on."""


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """How a `Connect` ended: `error` is None if it is connected."""

    call: int
    error: str | None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """How this rank's part of a move ended; see `mover.Moved`. A fence for this rank's bytes."""

    call: int
    error: str | None
    posted_at: float
    """On `core.clock.monotonic`, which all processes of one host share."""
    done_at: float
    descriptors: int
    bytes: int


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The rank moves nothing more. Not a fence for what it has not reported. It may still take reports."""

    why: str


Command = Attach | Connect | Disconnect | Move | Report
News = Attached | Connected | Ended | Left

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def encode(message: Command | News) -> bytes:
    """Raises TransportError for a message that is larger than MAX_MESSAGE_BYTES."""
    raw = _encoder.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise TransportError(f"{name} to a rank: {len(raw)} bytes, allowed are {MAX_MESSAGE_BYTES}")
    return raw


def decode_news(raw: bytes) -> News:
    """Raises msgspec.DecodeError."""
    return _news.decode(raw)


class RankMover(Protocol):
    """What a channel commands: `transport.mover.Mover`."""

    @property
    def alive(self) -> bool: ...
    def connect(
        self, peer: Identity, metadata: bytes, done: Callable[[TransportError | None], None]
    ) -> None: ...
    def disconnect(self, peer: Identity) -> None: ...
    def move(
        self, operation: Operation, peer: Identity, copies: Sequence[Copy], done: Callable[[Moved], None]
    ) -> None: ...


class RankChannel:
    """The rank's side: a thread that gives the driver's commands to the mover, and the mover's news to the
    driver."""

    def __init__(self, mover: RankMover, on_report: Callable[[Report], None]) -> None:
        """`on_report` is called on the channel's thread."""
        self.token = secrets.token_bytes(16)
        self.address = ""
        """Where the driver finds this rank; known after `start`."""
        self._mover = mover
        self._on_report = on_report
        self._driver: bytes | None = None
        """The routing id of the attached driver."""
        self._outbox: deque[News] = deque()
        self._wake = -1
        """An eventfd that wakes the thread."""
        self._lock = threading.Lock()
        """Guards `_wake`: the mover may have news while the channel is closed."""
        self._closing = False
        self._said = False
        """The driver was told that the mover has ended."""
        self._thread = threading.Thread(target=self._run, name="kvhandoff-rank", daemon=True)

    def start(self) -> None:
        """Listen. Raises ConfigError when no socket can be had."""
        self._directory = tempfile.mkdtemp(prefix="kvhandoff-")  # only its owner may enter
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = 0  # as many as the engine's own bounds allow
        self._socket.linger = _LINGER_MS
        address = f"ipc://{self._directory}/rank"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            self._remove_directory()
            raise ConfigError(
                f"rank channel: {address} can't be bound ({error}); is TMPDIR too long?"
            ) from error
        self.address = address
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def close(self) -> None:
        """Send what there is to say, and end. Close the mover before, so that all moves are reported."""
        self._closing = True
        self._wake_up()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _tell(self, news: News) -> None:
        """From any thread."""
        self._outbox.append(news)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # Below: the channel's thread.

    def _run(self) -> None:
        why = "its channel has failed"
        try:
            self._loop()
            why = "its worker is closed"
        except (msgspec.DecodeError, zmq.ZMQError, OSError):
            # A command that can't be read would leave its caller waiting: end, so that the driver knows.
            _log.exception("a rank's channel has failed")
        finally:
            self._outbox.append(Left(why))
            self._flush()
            self._socket.close()
            self._context.term()  # waits for the last words, up to _LINGER_MS
            self._remove_directory()

    def _loop(self) -> None:
        """Until `close` is called."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_LOOK_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._closing:
                return
            if self._socket in ready:
                self._obey(*self._socket.recv_multipart())
            if not self._mover.alive and not self._said:
                # Reports go on: requests whose loads failed have to hear of it.
                self._said = True
                self._outbox.append(Left("its data plane has ended"))
            self._flush()

    def _obey(self, sender: bytes, *frames: bytes) -> None:
        if self._driver is None:
            self._admit(sender, frames)
            return
        if sender != self._driver or len(frames) != 1:
            _log.error("a message of %d frames from a stranger to a rank's channel", len(frames))
            return
        match _commands.decode(frames[0]):
            case Connect(call, peer, metadata):
                self._mover.connect(peer, metadata, lambda error: self._connected(call, error))
            case Disconnect(peer):
                self._mover.disconnect(peer)
            case Move(call, operation, peer, copies):
                self._mover.move(operation, peer, copies, lambda moved: self._ended(call, moved))
            case Report() as report:
                self._on_report(report)
            case Attach():
                _log.error("the driver attached twice")

    def _admit(self, sender: bytes, frames: Sequence[bytes]) -> None:
        try:
            (raw,) = frames
            attach = msgspec.msgpack.decode(raw, type=Attach)
        except (ValueError, msgspec.DecodeError):
            _log.error("a stranger's message to a rank's channel")
            return
        if not hmac.compare_digest(attach.token, self.token):
            _log.error("a driver with another token was refused by a rank's channel")
            return
        self._driver = sender
        self._outbox.append(Attached())
        self._remove_directory()

    def _connected(self, call: int, error: TransportError | None) -> None:
        self._tell(Connected(call, None if error is None else str(error)))

    def _ended(self, call: int, moved: Moved) -> None:
        times = moved.posted_at, moved.done_at
        self._tell(Ended(call, moved.error, *times, moved.descriptors, moved.bytes))

    def _flush(self) -> None:
        """Send all news; those for nobody, before a driver has come or after it has gone, are dropped."""
        while self._outbox:
            raw = encode(self._outbox.popleft())
            if self._driver is not None:
                self._socket.send_multipart([self._driver, raw])

    def _remove_directory(self) -> None:
        """A connection that is up needs no file."""
        shutil.rmtree(self._directory, ignore_errors=True)
