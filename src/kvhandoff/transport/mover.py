"""The one thread that owns the data plane.

A post may take as long as its copy, so it runs on no engine's and no server's thread. The mover's thread
sleeps on its queue while nothing is in flight, and polls with growing pauses while something is.

All answers come through callbacks on the mover's thread: short ones, which hand over to the caller's own.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import DataPlane, Handle, Operation, Region, TransferState, TransportError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3
"""Seconds between polls: short after anything happened, then half again as long each time."""


_CLOSED = "the mover is closed"
"""Why it refuses, unless something went wrong."""

_kept: list[DataPlane] = []
"""Data planes that may still have transfers in flight: kept until the process ends, which fences them, since
destroying one does not."""


@dataclass(frozen=True, slots=True)
class Moved:
    """How a transfer ended. Both states are fences: no more bytes of it can land. Times are on the mover's
    clock, in seconds."""

    state: Literal[TransferState.DONE, TransferState.FAILED]
    error: str | None
    """Why it failed."""
    submitted_at: float
    """`move` was called."""
    posted_at: float
    """The data plane was given it. A copy that is made inside `post` counts from here."""
    done_at: float
    descriptors: int
    """Runs of neighbouring blocks it was made of."""
    bytes: int
    """Bytes moved; 0 if it failed."""


@dataclass(frozen=True, slots=True)
class _Connect:
    peer: Identity
    metadata: bytes
    done: Callable[[TransportError | None], None]


@dataclass(frozen=True, slots=True)
class _Disconnect:
    peer: Identity


@dataclass(frozen=True, slots=True)
class _Move:
    operation: Operation
    peer: Identity
    copies: Sequence[Copy]
    done: Callable[[Moved], None]
    submitted_at: float


@dataclass(frozen=True, slots=True)
class _Posted:
    move: _Move
    handle: Handle
    posted_at: float


class _Close:
    """Wakes the thread so that it sees that it is to end."""


class BlockMover(Protocol):
    """What the handoff needs of that which moves an engine's blocks, be it one process or several ranks.

    Methods may be called from any thread; callbacks come on a thread of the mover's. See `Mover`.
    """

    @property
    def kind(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def start(self) -> bytes: ...
    def connect(
        self, peer: Identity, metadata: bytes, done: Callable[[TransportError | None], None]
    ) -> None: ...
    def disconnect(self, peer: Identity) -> None: ...
    def move(
        self, operation: Operation, peer: Identity, copies: Sequence[Copy], done: Callable[[Moved], None]
    ) -> None: ...
    def close(self, timeout: float = 5.0) -> bool: ...


class Mover:
    """Implements `BlockMover` over one data plane: connects, moves and reports, in the order of the calls.
    All methods may be called from any thread."""

    def __init__(
        self, plane_factory: Callable[[], DataPlane], region: Region, clock: Clock = monotonic
    ) -> None:
        """`plane_factory` runs on the mover's thread; the plane it makes is never touched by another."""
        self._factory = plane_factory
        self._region = region
        self._clock = clock
        # Not SimpleQueue: one that finds nothing although it was woken waits for what is left of its timeout,
        # and if that is less than nothing, for ever (CPython 3.11; within minutes on busy cores).
        self._queue: queue.Queue[_Connect | _Disconnect | _Move | _Close] = queue.Queue()
        self._lock = threading.Lock()
        """Guards `_ended`: nothing enters the queue after its last reader has left."""
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvhandoff-mover", daemon=True)
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._close_by: float | None = None
        self._clean = True
        self._pending: list[_Posted] = []
        self.kind = ""
        """The data plane's kind; known after `start`."""
        self.metadata = b""
        """The data plane's metadata, for peers; known after `start`."""

    def start(self) -> bytes:
        """Make the data plane and register the region (NIXL: about a second). Returns the metadata.

        Raises what the factory or the registration raised.
        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error
        return self.metadata

    def connect(self, peer: Identity, metadata: bytes, done: Callable[[TransportError | None], None]) -> None:
        """Get ready to move blocks from and to `peer`; `done(None)`, or with what went wrong."""
        self._submit(_Connect(peer, metadata, done))

    def disconnect(self, peer: Identity) -> None:
        """Forget `peer`. What is in flight goes on and is reported."""
        self._submit(_Disconnect(peer))

    def move(
        self,
        operation: Operation,
        peer: Identity,
        copies: Sequence[Copy],
        done: Callable[[Moved], None],
    ) -> None:
        """Move blocks; `done` is called once, when the transfer has ended, however long that takes.

        Deadlines are the caller's: one that gives up must still keep the blocks until `done` was called.
        Order of `copies`: see `DataPlane.post`.
        """
        self._submit(_Move(operation, peer, copies, done, self._clock()))

    @property
    def alive(self) -> bool:
        """Whether transfers can still be made; False before `start`, after `close` and after a crash."""
        return self._started.is_set() and self._ended is None and self._thread.is_alive()

    def close(self, timeout: float = 5.0) -> bool:
        """Stop. Moves that are not posted yet, and later ones, are reported FAILED: nothing of them moves.

        True: everything posted has ended and was reported, the data plane is released, the region may be
        freed. False: after `timeout` seconds something was still in flight. A timeout is not a fence, so it
        is *not* reported, and data plane and region stay as they are; only the end of this process or of
        the peer's fences it.
        """
        if not self._thread.is_alive():  # it has ended, or was never started
            self._end(self._ended or _CLOSED)
            return self._clean
        self._close_by = time.monotonic() + timeout
        self._queue.put(_Close())
        self._thread.join()
        return self._clean

    def _submit(self, command: _Connect | _Disconnect | _Move) -> None:
        with self._lock:
            ended = self._ended
            if ended is None:
                self._queue.put(command)
        if ended is not None:
            self._refuse(command, ended)

    # Below: the mover's thread.

    def _run(self) -> None:
        try:
            plane = self._factory()
            plane.register(self._region)
            self.kind, self.metadata = plane.kind, plane.metadata()
        except Exception as error:  # noqa: BLE001  raised again by `start`
            self._start_error = error
            self._end("the mover did not start")
            self._started.set()
            return
        self._clean = False
        self._started.set()
        why = _CLOSED
        try:
            self._loop(plane)
            self._clean = self._drain(plane)
        except Exception as error:  # noqa: BLE001  logged, and told to everybody who asks
            # A data plane reports through TransportError and states; anything else is a bug in it, after
            # which nobody knows what is in flight. So what is, stays unreported.
            _log.exception("the data plane has crashed")
            _kept.append(plane)
            why = f"the data plane has crashed: {error!r}"
        finally:
            self._end(why)

    def _loop(self, plane: DataPlane) -> None:
        """Until `close` is called."""
        pause = _FIRST_PAUSE
        service_at = 0.0
        while True:
            interval = plane.service_interval
            waits = [pause] if self._pending else []
            if interval is not None:
                service_at = min(service_at, time.monotonic() + interval)
                waits.append(max(0.0, service_at - time.monotonic()))
            try:
                command = self._queue.get(timeout=min(waits, default=None))
            except queue.Empty:
                command = None
            if isinstance(command, _Close):
                return
            if command is not None:
                self._execute(plane, command)
            if self._pending:
                progress = self._reap(plane) or command is not None
                pause = _FIRST_PAUSE if progress else min(pause * 1.5, _LONGEST_PAUSE)
            if interval is not None and time.monotonic() >= service_at:
                plane.service()
                service_at = time.monotonic() + (plane.service_interval or 0.0)

    def _execute(self, plane: DataPlane, command: _Connect | _Disconnect | _Move) -> None:
        match command:
            case _Connect(peer, metadata, done):
                try:
                    plane.connect(peer, metadata)
                except TransportError as error:
                    self._call(done, error)
                else:
                    self._call(done, None)
            case _Disconnect(peer):
                plane.disconnect(peer)
            case _Move():
                posted_at = self._clock()
                try:
                    handle = plane.post(command.operation, command.peer, command.copies)
                except TransportError as error:
                    self._report(command, str(error), posted_at, 0)
                else:
                    self._pending.append(_Posted(command, handle, posted_at))

    def _reap(self, plane: DataPlane) -> bool:
        """Report the transfers that have ended; whether there were any."""
        still = []
        for posted in self._pending:
            state = plane.poll(posted.handle)
            if state is TransferState.PENDING:
                still.append(posted)
            else:
                failed = state is TransferState.FAILED
                error = (posted.handle.error or "no reason given") if failed else None
                self._report(posted.move, error, posted.posted_at, posted.handle.bytes)
        ended = len(still) < len(self._pending)
        self._pending = still
        return ended

    def _drain(self, plane: DataPlane) -> bool:
        """Wait for what is in flight, then release the data plane; False if that can't be done in time."""
        pause = _FIRST_PAUSE
        while self._pending and time.monotonic() < (self._close_by or 0.0):
            self._reap(plane)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        if self._pending:
            _log.error("%d transfers are in flight at close; their memory must stay", len(self._pending))
            _kept.append(plane)
            return False
        try:
            plane.close()
        except TransportError as error:
            _log.error("the data plane can't be closed: %s", error)
            _kept.append(plane)
            return False
        return True

    def _end(self, why: str) -> None:
        """Refuse what is in the queue and all that comes."""
        with self._lock:
            self._ended = why
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            self._refuse(command, why)

    def _refuse(self, command: _Connect | _Disconnect | _Move | _Close, why: str) -> None:
        match command:
            case _Connect(peer, _, done):
                self._call(done, TransportError(f"connect {peer}: {why}"))
            case _Move():
                self._report(command, f"{command.operation} {command.peer}: {why}", self._clock(), 0)
            case _:
                pass

    def _report(self, move: _Move, error: str | None, posted_at: float, size: int) -> None:
        moved = Moved(
            state=TransferState.DONE if error is None else TransferState.FAILED,
            error=error,
            submitted_at=move.submitted_at,
            posted_at=posted_at,
            done_at=self._clock(),
            descriptors=len(move.copies),
            bytes=0 if error else size,
        )
        self._call(move.done, moved)

    def _call(self, callback: Callable[[_T], None], value: _T) -> None:
        """One caller's mistake must not stop the transfers of all."""
        try:
            callback(value)
        except Exception:  # noqa: BLE001
            _log.exception("a callback of the mover has failed")
