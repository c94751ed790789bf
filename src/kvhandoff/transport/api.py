"""The data plane's seam: one small interface, and the memory it moves.

A data plane is a single-threaded object owned by one `Mover` thread (`transport/mover.py`): posting a
transfer may itself take as long as the copy (NIXL on one host, shared memory), so it never runs on an
engine's or a server's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

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


class MemoryKind(StrEnum):
    """Where a region lies: in the host's memory, or in a GPU's."""

    DRAM = "dram"
    VRAM = "vram"


class Piece(NamedTuple):
    """The same part of every block, e.g. one layer of it."""

    address: int
    """Of block 0's piece."""
    stride: int
    """Bytes from one block's piece to the next block's; at least `size`."""
    size: int
    """Bytes of the piece."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """`count` of a model's `total` KV heads, from `first` on."""

    first: int
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Part:
    """What two ranks exchange of every piece: of `of` equal parts, `count` from `first` on."""

    first: int
    count: int
    of: int


WHOLE = Part(0, 1, 1)


class Region(Protocol):
    """One rank's memory: `num_blocks` blocks, each the concatenation of its pieces."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of all pieces together."""
        ...

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """In the same order on all engines of one layout. Blocks side by side are one piece."""
        ...

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of what is to be registered; every piece lies within one of them."""
        ...

    @property
    def memory(self) -> MemoryKind: ...
    @property
    def device(self) -> int:
        """Index of the GPU; 0 in the host's memory."""
        ...

    @property
    def heads(self) -> HeadRange | None:
        """Which of the model's KV heads this rank holds, head after head within each piece; None if blocks
        aren't divided by heads: then every rank holds all of them."""
        ...


class HostRegion(Region, Protocol):
    """Blocks side by side in this process's own memory."""

    @property
    def address(self) -> int: ...
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

    @property
    def bytes(self) -> int:
        """How many it moves between this rank and its peers."""
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


class StagedPlane(DataPlane, Protocol):
    """A data plane that can exchange a part of every piece with a peer, and whose `post` comes in two steps:
    only the second moves bytes, and it may run on another thread, while nothing else uses the plane."""

    def connect(self, peer: Identity, metadata: bytes, mine: Part = WHOLE, theirs: Part = WHOLE) -> None:
        """As `DataPlane.connect`; transfers move `mine` of this region's pieces and `theirs` of the peer's.

        Raises TransportError also if these differ in size, or from those of the connection there is.
        """
        ...

    def prepare(self, operation: Operation, peer: Identity, copies: Sequence[Copy]) -> Handle:
        """Check everything and make the transfer ready. Raises what `post` raises; no byte moves."""
        ...

    def start(self, handle: Any) -> None:
        """Move a prepared transfer. Raises nothing: `poll` tells how it goes."""
        ...

    def discard(self, handle: Any) -> None:
        """Let go of a prepared transfer that will not be started."""
        ...

    def drain(self, deadline: float) -> None:
        """Wait for transfers in flight. Raises TransportError if some remain at `deadline` (monotonic)."""
        ...
