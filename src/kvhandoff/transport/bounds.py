"""The checks that stand before every connection and transfer: no byte moves outside either region."""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, Piece, TransportError


def oriented(
    operation: Operation, copies: Sequence[Copy], *, peer: Identity, local_blocks: int, remote_blocks: int
) -> list[Copy]:
    """`copies` as (first local block, first remote block, count), all inside both regions.

    Raises TransportError that names the copy and the region it does not fit.
    """
    local_at, remote_at = (1, 0) if operation == "read" else (0, 1)
    checked = []
    for copy in copies:
        local, remote, count = copy[local_at], copy[remote_at], copy[2]
        if count < 1:
            raise TransportError(f"{operation} {peer}: a copy of {count} blocks, allowed is 1 or more")
        if not 0 <= local <= local_blocks - count:
            raise _outside(operation, peer, local, count, "this engine", local_blocks)
        if not 0 <= remote <= remote_blocks - count:
            raise _outside(operation, peer, remote, count, str(peer), remote_blocks)
        checked.append((local, remote, count))
    return checked


def _outside(
    operation: Operation, peer: Identity, first: int, count: int, whose: str, blocks: int
) -> TransportError:
    return TransportError(
        f"{operation} {peer}: blocks {first} to {first + count - 1} of {whose}, "
        f"which has blocks 0 to {blocks - 1}"
    )


def check_block_bytes(peer: Identity, local: int, remote: int) -> None:
    """Raises TransportError if the two engines' blocks differ in size."""
    if local != remote:
        raise TransportError(f"connect {peer}: blocks have {local} bytes here, {remote} bytes there")


def check_alike(peer: Identity, local: Sequence[Piece], remote: Sequence[Piece]) -> None:
    """Raises TransportError unless each piece has the same size here and there."""
    if len(local) != len(remote):
        raise TransportError(
            f"connect {peer}: blocks have {len(local)} pieces here, {len(remote)} pieces there"
        )
    check_block_bytes(peer, sum(piece.size for piece in local), sum(piece.size for piece in remote))
    for index, (mine, theirs) in enumerate(zip(local, remote, strict=True)):
        if mine.size != theirs.size:
            raise TransportError(
                f"connect {peer}: piece {index} of a block has {mine.size} bytes here, "
                f"{theirs.size} bytes there"
            )
