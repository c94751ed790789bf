"""Gates for tests: hold an engine's model steps, or its transfers, until told to let them go on.

Both are held where they really happen: a step on the engine's thread, with its blocks allocated; a transfer
between its posting and its bytes, which land late, as those of a slow network do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.transport.api import DataPlane, Handle, Operation, Region, TransferState, TransportError
from tests.cluster import LiveEngine

PATIENCE = 60.0
"""Seconds after which a held step goes on by itself, so that a failed test ends; longer than a test waits for
anything (`tests/cluster.py`)."""


class StepGate:
    """Stands before every model step of an engine. Open until `close`."""

    def __init__(self, engine: LiveEngine) -> None:
        self._forward = engine.runner.forward
        self._changed = threading.Condition()
        self._permits: int | None = None
        self.on_event: Callable[[], None] = lambda: None
        """Called on the engine's thread before and after every step."""
        self.begun = 0
        """Steps that have come to the gate."""
        self.done = 0
        """Steps that the model has computed."""
        self.tokens = 0
        """Tokens in the steps that the model has computed."""
        engine.runner.forward = self._gated  # type: ignore[method-assign]

    def __enter__(self) -> StepGate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def close(self) -> None:
        """The next step waits, and those after it."""
        with self._changed:
            self._permits = 0

    def let(self, steps: int) -> None:
        """Let so many more steps through a closed gate."""
        with self._changed:
            assert self._permits is not None, "the gate is open"
            self._permits += steps
            self._changed.notify_all()

    def open(self) -> None:
        """Let everything through."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def reset(self) -> None:
        """Count anew."""
        self.begun = self.done = self.tokens = 0

    @property
    def holds(self) -> bool:
        """Whether a step stands before the gate now."""
        return self.begun > self.done and self._permits == 0

    def _gated(self, steps: Sequence[SequenceStep]) -> list[Any]:
        self.on_event()
        with self._changed:
            self.begun += 1
            self._changed.wait_for(lambda: self._permits != 0, PATIENCE)
            if self._permits:
                self._permits -= 1
        results = self._forward(steps)
        self.tokens += sum(len(step.token_ids) for step in steps)
        self.done += 1
        self.on_event()
        return results


@dataclass(eq=False)
class _Held:
    """A transfer that may not have been given to the real data plane yet."""

    operation: Operation
    peer: Identity
    copies: Sequence[Copy]
    late_by: int
    real: Handle | None = None
    error: str | None = None

    @property
    def bytes(self) -> int:
        return self.real.bytes if self.real else 0


@dataclass
class TransferGate:
    """Stands before every transfer of one data plane: `engine(..., wrap_plane=gate.wrap)`. Open at first."""

    closed: bool = False
    closed_to: Identity | None = None
    """A peer whose transfers wait although the gate is open."""
    posted: int = 0
    """Transfers that have been posted."""
    ended: int = 0
    """Transfers that have reported an end."""
    blocks: int = 0
    """Blocks in the transfers that have been posted."""
    late_by: Callable[[], int] = lambda: 0
    """How many times a transfer is asked after before its bytes move; asked once for each."""
    on_event: Callable[[], None] = lambda: None
    """Called on the mover's thread whenever a transfer is posted or ends."""
    _permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def let(self, transfers: int) -> None:
        """Let so many transfers through a closed gate: those in flight, then those that come."""
        assert self.closed, "the gate is open"
        self._permits.release(transfers)

    def passes(self, peer: Identity) -> bool:
        """Whether a transfer from or to a peer may go on now; uses up what `let` gave."""
        return peer != self.closed_to and (not self.closed or self._permits.acquire(blocking=False))

    def wrap(self, plane: DataPlane) -> DataPlane:
        return _GatedPlane(plane, self)

    @property
    def held(self) -> int:
        """Transfers in flight."""
        return self.posted - self.ended


class _GatedPlane:
    """The real data plane behind a gate."""

    def __init__(self, plane: DataPlane, gate: TransferGate) -> None:
        self.kind = plane.kind
        self._plane = plane
        self._gate = gate

    def register(self, region: Region) -> None:
        self._plane.register(region)

    def metadata(self) -> bytes:
        return self._plane.metadata()

    def connect(self, peer: Identity, metadata: bytes) -> None:
        self._plane.connect(peer, metadata)

    def disconnect(self, peer: Identity) -> None:
        self._plane.disconnect(peer)

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> _Held:
        handle = _Held(operation, peer, copies, self._gate.late_by())
        self._gate.posted += 1
        self._gate.blocks += sum(count for _, _, count in copies)
        self._gate.on_event()
        return handle

    def poll(self, handle: _Held) -> TransferState:
        state = self._poll(handle)
        if state is not TransferState.PENDING:
            self._gate.ended += 1
            self._gate.on_event()
        return state

    def _poll(self, handle: _Held) -> TransferState:
        if handle.real is None:
            handle.late_by -= 1
            if handle.late_by >= 0 or not self._gate.passes(handle.peer):
                return TransferState.PENDING
            try:
                handle.real = self._plane.post(handle.operation, handle.peer, handle.copies)
            except TransportError as error:
                handle.error = str(error)
                return TransferState.FAILED
        state = self._plane.poll(handle.real)
        handle.error = handle.real.error
        return state

    @property
    def service_interval(self) -> float | None:
        return self._plane.service_interval

    def service(self) -> None:
        self._plane.service()

    def close(self) -> None:
        self._plane.close()
