"""The checks that stand before every connection and transfer: no byte moves outside either region."""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.core.ids import Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import Operation, TransportError


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
        for whose, first, blocks in (
            ("this engine", local, local_blocks),
            (str(peer), remote, remote_blocks),
        ):
            if first < 0 or first + count > blocks:
                raise TransportError(
                    f"{operation} {peer}: blocks {first} to {first + count - 1} of {whose}, "
                    f"which has blocks 0 to {blocks - 1}"
                )
        checked.append((local, remote, count))
    return checked


def check_block_bytes(peer: Identity, local: int, remote: int) -> None:
    """Raises TransportError if the two engines' blocks differ in size."""
    if local != remote:
        raise TransportError(f"connect {peer}: blocks have {local} bytes here, {remote} bytes there")
