"""One engine's mover over the movers of all its ranks: what is asked of it, every rank does its part of.

A rank's part of a move ends with its answer, or with its worker's process. A channel that ends proves nothing
by itself: then the rank's parts stay open until the operating system says that the process has ended. How the
parts make one move: `rank_calls.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.spans import Copy
from kvhandoff.engine.loops import hand_over
from kvhandoff.transport.api import Operation, TransportError
from kvhandoff.transport.liveness import Watcher, host
from kvhandoff.transport.ranks import encode_ranks
from kvhandoff.vllm.rank_calls import ConnectDone, MoveDone, RankCalls, refused, tell
from kvhandoff.vllm.rank_channel import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Command,
    Connect,
    Connected,
    Disconnect,
    Ended,
    Left,
    Move,
    RankHello,
    Report,
    decode_news,
    encode,
)

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ATTACH_S = 60.0
"""How long the ranks may take to answer the driver's first message. Their channels listen by then, and a
worker that ends is heard of at once, so only a worker that hangs takes as long: then the engine does not
start. A host that starts several engines at once may well stand still for some seconds."""

_RECONNECT_MS = 60_000


@dataclass(eq=False, slots=True)
class _Rank:
    """The driver's end of one rank's channel."""

    hello: RankHello
    socket: zmq.asyncio.Socket
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    left: str | None = None
    """Why it moves nothing more."""

    def __str__(self) -> str:
        return f"rank {self.hello.rank} of {self.hello.engine_id}"


class RankedMover:
    """Implements `transport.mover.BlockMover` over all ranks of one engine.

    It belongs to the event loop that it is made on. `connect`, `disconnect`, `move` and `report` may be
    called from any thread; each thread's are carried out in their order; callbacks run on the loop.
    """

    def __init__(self, hellos: Sequence[RankHello], clock: Clock = monotonic) -> None:
        """`hellos`: one of every rank. Raises ConfigError if they are not those of one engine."""
        self._hellos = _in_order(hellos)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ranks: list[_Rank] = []
        self._calls = RankCalls(len(self._hellos), self._disconnect)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._watcher = Watcher(self._process_ended)
        self._ended: str | None = "the mover is not started"
        self.kind = self._hellos[0].kind
        """The kind of the ranks' data planes."""
        self.metadata = encode_ranks([hello.metadata for hello in self._hellos])
        """The data planes' metadata, for peers."""

    @property
    def layout(self) -> KVLayout:
        """The layout of the engine's blocks."""
        return self._hellos[0].kv_layout

    @property
    def num_blocks(self) -> int:
        """Blocks that every rank has."""
        return self._hellos[0].num_blocks

    @property
    def processes(self) -> tuple[str, ...]:
        """The workers' processes, in the order of the ranks: those that write and read peers' memory."""
        return tuple(hello.process for hello in self._hellos)

    @property
    def alive(self) -> bool:
        """Whether moves can still be made; False before `start`, after `close`, and once a rank has ended."""
        return self._ended is None

    def start(self) -> bytes:
        """Attach to every rank; returns the metadata. Call it on another thread than the loop's.

        Raises TransportError for a rank that does not answer, or whose process can't be watched.
        """
        return self._wait_for(self._start())

    def connect(self, peer: Identity, metadata: bytes, done: ConnectDone) -> None:
        """Connect every rank to those of the peer's that it exchanges with. See `BlockMover`."""
        self._on_loop(self._connect, peer, metadata, done)

    def disconnect(self, peer: Identity) -> None:
        """Forget `peer` on all ranks. What is in flight goes on and is reported."""
        self._on_loop(self._disconnect, peer)

    def move(self, operation: Operation, peer: Identity, copies: Sequence[Copy], done: MoveDone) -> None:
        """Move blocks; `done` is called once, when every rank's part has ended. The times it names are the
        latest of all ranks; bytes and descriptors are sums. See `BlockMover`."""
        self._on_loop(self._move, operation, peer, tuple(copies), done, self._clock())

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        """Have every rank tell vLLM that the load of a request has ended: it comes out of the next
        `results()` of each, once. Report a load once: vLLM's core does not survive a second report."""
        self._on_loop(self._report, Report(request_id, failed, tuple(bad_blocks)))

    def close(self, timeout: float = 5.0) -> bool:
        """Let go of the ranks; later moves are reported FAILED: nothing of them moves. Call it on another
        thread than the loop's.

        True: everything moved has ended and was reported. False: after `timeout` seconds something was still
        in flight; it is *not* reported, and only the end of the workers' processes fences it.
        """
        return self._wait_for(self._close(timeout))

    def _wait_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        if threading.get_ident() == self._thread:
            work.close()
            raise RuntimeError("called on the event loop, which it would block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """At once if this is the loop's thread: every hand-over between threads waits for a busy engine."""
        if threading.get_ident() == self._thread:
            function(*arguments)
        else:
            hand_over(self._loop, function, *arguments)

    # Below: the loop's thread.

    async def _start(self) -> bytes:
        here = host()
        for hello in self._hellos:
            if not hello.process.startswith(f"{here}/"):
                where = f"rank {hello.rank} of {hello.engine_id}: process"
                raise TransportError(f"{where}: got {hello.process!r}, allowed is one of this host, {here}/…")
        self._context = zmq.asyncio.Context()
        for hello in self._hellos:
            rank = _Rank(hello, self._socket(hello.address))
            self._ranks.append(rank)
            self._watcher.watch(_life(hello), [hello.process])
            self._tasks.append(asyncio.create_task(self._listen(rank)))
            self._send(rank, encode(Attach(hello.token)))
        try:
            async with asyncio.timeout(_ATTACH_S):
                for rank in self._ranks:
                    await rank.attached.wait()
        except TimeoutError:
            silent = [rank for rank in self._ranks if not rank.attached.is_set()]
            await self._close(0.0)
            raise TransportError(
                "; ".join(f"{rank}: no answer from {rank.hello.address} in {_ATTACH_S} s" for rank in silent)
            ) from None
        gone = next((f"{rank}: {rank.left}" for rank in self._ranks if rank.left is not None), None)
        if gone is not None:
            await self._close(0.0)
            raise TransportError(gone)
        self._ended = None
        return self.metadata

    def _socket(self, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.sndhwm = socket.rcvhwm = 0  # as many as the protocol's own bounds allow
        # Nobody will be there again. Without any reconnect, though, libzmq drops a rank's last words unread.
        socket.reconnect_ivl = _RECONNECT_MS
        socket.linger = 0
        socket.connect(address)
        return socket

    async def _listen(self, rank: _Rank) -> None:
        while True:
            try:
                news = decode_news(await rank.socket.recv())
            except (msgspec.DecodeError, zmq.ZMQError) as error:
                self._lost(rank, f"its channel is broken ({error})")
                return
            match news:
                case Attached():
                    rank.attached.set()
                case Connected():
                    self._calls.connected(rank.hello.rank, news)
                case Ended():
                    self._calls.ended(rank.hello.rank, news)
                    self._look_idle()
                case Left(why):
                    self._lost(rank, why)

    def _connect(self, peer: Identity, metadata: bytes, done: ConnectDone) -> None:
        call = self._calls.number()
        try:
            raw = self._encoded(Connect(call, peer, metadata))
        except TransportError as error:
            tell(done, TransportError(f"connect {peer}: {error}"))
            return
        self._calls.connecting(call, peer, done)
        self._send_raw(raw)

    def _disconnect(self, peer: Identity) -> None:
        if self._ended is None:
            self._send_raw(encode(Disconnect(peer)))

    def _report(self, report: Report) -> None:
        """Also when a rank moves nothing more: its requests have to end all the same."""
        self._send_raw(encode(report))

    def _move(
        self,
        operation: Operation,
        peer: Identity,
        copies: tuple[Copy, ...],
        done: MoveDone,
        submitted_at: float,
    ) -> None:
        call = self._calls.number()
        try:
            raw = self._encoded(Move(call, operation, peer, copies))
        except TransportError as error:
            tell(done, refused(operation, peer, len(copies), str(error), submitted_at, self._clock()))
            return
        self._calls.moves(call, done, submitted_at)
        self._idle.clear()
        self._send_raw(raw)

    def _encoded(self, command: Command) -> bytes:
        """Raises TransportError for a command that can't be given: then no rank gets it."""
        if self._ended is not None:
            raise TransportError(self._ended)
        return encode(command)

    def _send_raw(self, raw: bytes) -> None:
        for rank in self._ranks:
            self._send(rank, raw)

    def _send(self, rank: _Rank, raw: bytes) -> None:
        """Never waits: the queues have no bound of their own."""
        error = asyncio.ensure_future(rank.socket.send(raw, zmq.DONTWAIT)).exception()
        if error is not None:
            self._lost(rank, f"its channel is broken ({error})")

    def _lost(self, rank: _Rank, why: str) -> None:
        """A rank moves nothing more. What it was given may still be in flight; connects fail, since they move
        nothing."""
        if rank.left is not None:
            return
        rank.left = why
        rank.attached.set()
        if self._ended is None:
            _log.error("%s: %s", rank, why)
            self._ended = f"{rank}: {why}"
        self._calls.rank_left(rank.hello.rank, why)

    def _process_ended(self, life: Identity) -> None:
        """The one proof besides its answers that a rank's parts have ended."""
        rank = next(rank for rank in self._ranks if _life(rank.hello) == life)
        self._lost(rank, "its process has ended")
        self._calls.process_ended(rank.hello.rank, self._clock())
        self._look_idle()

    def _look_idle(self) -> None:
        if not self._calls.moving:
            self._idle.set()

    async def _close(self, patience: float) -> bool:
        self._ended = "the mover is closed"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._idle.wait()
        if self._calls.moving:
            _log.error("%d moves are in flight at close; their memory must stay", self._calls.moving)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._watcher.close()
        for rank in self._ranks:
            self._calls.rank_left(rank.hello.rank, self._ended)
        if self._ranks:
            self._context.destroy(linger=0)
            self._ranks.clear()
        return not self._calls.moving


def _in_order(hellos: Sequence[RankHello]) -> list[RankHello]:
    """By rank. Raises ConfigError unless they are all the ranks of one engine with one cache."""
    ordered = sorted(hellos, key=lambda hello: hello.rank)
    ranks = ordered[0].ranks if ordered else 1
    if [hello.rank for hello in ordered] != list(range(ranks)):
        raise ConfigError(
            f"ranks: got {[hello.rank for hello in ordered]}, allowed are 0 to {ranks - 1}, once each"
        )
    first = ordered[0]
    for hello in ordered:
        for name in ("engine_id", "ranks", "kind", "layout", "num_blocks"):
            mine, others = getattr(hello, name), getattr(first, name)
            if mine != others:
                raise ConfigError(f"ranks: {name} is {others!r} on rank 0 and {mine!r} on rank {hello.rank}")
    return ordered


def _life(hello: RankHello) -> Identity:
    """Names a rank to the watcher."""
    return Identity(EngineId(hello.engine_id), Epoch(f"rank {hello.rank}"))
