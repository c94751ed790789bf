"""The data plane's seam: one small interface, and the memory it moves.

A data plane is a single-threaded object owned by one `Mover` thread (`transport/mover.py`): posting a
transfer may itself take as long as the copy (NIXL on one host, shared memory), so it never runs on an
engine's or a server's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

from kvhandoff.core.errors import KVHandoffError
from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy

Operation = Literal["read", "write"]


class TransportError(KVHandoffError):
    """A peer can't be connected or a transfer can't be posted. Only the transfer named fails."""


class TransferState(StrEnum):
    """`DONE` and `FAILED` are fences: no more bytes of this transfer can land. `PENDING` is not."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Region(Protocol):
    """One registered range of memory: `num_blocks` blocks of `block_bytes` bytes, side by side."""

    @property
    def address(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def buffer(self) -> memoryview:
        """The whole range, writable."""
        ...


class Handle(Protocol):
    """One posted transfer; what else it holds is the data plane's own business."""

    @property
    def error(self) -> str | None:
        """Why it FAILED, in words; None before and otherwise."""
        ...


class DataPlane(Protocol):
    """Moves blocks between this engine's region and its peers' regions."""

    kind: str
    """`nixl` or `shm`: peers only connect to the same kind."""

    def register(self, region: Region) -> None:
        """Make `region` readable and writable for peers. Once, before `metadata`."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for `connect`. Never unpickled, checked field by field."""
        ...

    def connect(self, peer: Identity, metadata: bytes) -> None:
        """Get ready to move blocks from and to `peer`. A second connect of the same identity is a no-op.

        Raises TransportError on metadata that is malformed, of another kind or unreachable.
        """
        ...

    def disconnect(self, peer: Identity) -> None:
        """Forget a peer. Not a fence for what is in flight."""
        ...

    def post(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> Handle:
        """Start moving `copies`; each is (remote first, local first, count) for a read and
        (local first, remote first, count) for a write: source before destination.

        Raises TransportError for unknown peers and for blocks outside either region, before any byte moves.
        """
        ...

    def poll(self, handle: Any) -> TransferState:
        """Where the transfer stands that this plane's `post` returned `handle` for. Never raises; once it is
        DONE or FAILED, it stays so and holds nothing."""
        ...

    @property
    def service_interval(self) -> float | None:
        """Seconds until the next call of `service` is due; None while there is nothing to do."""
        ...

    def service(self) -> None:
        """What an idle data plane must do from time to time (e.g. let go of dead peers); cheap."""
        ...

    def close(self) -> None:
        """Release everything. Transfers in flight are drained first.

        Raises TransportError if some can't be: then nothing is released, since their bytes may still land.
        """
        ...
