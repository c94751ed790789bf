"""A region as a NIXL agent knows it: registered, with descriptors prepared for transfers to pick from."""

from __future__ import annotations

import mmap
from typing import Any

from kvhandoff.transport.api import WHOLE, Part, Region, TransportError
from kvhandoff.transport.nixl_agent import NixlAgent, NixlError
from kvhandoff.transport.pieces import check_pieces, narrowed
from kvhandoff.transport.region import address_of


class NixlRegion:
    """Registered until `release`."""

    def __init__(self, agent: NixlAgent, region: Region) -> None:
        """Raises TransportError for memory that can't be registered."""
        self._agent = agent
        self._registered: list[Any] = []
        self._prepared: dict[Part, int] = {}
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self.region = region
        try:
            check_pieces(region.pieces, region.num_blocks)
            self._registered.append(agent.register(region.ranges, region.memory, region.device))
            self.agent_metadata = agent.metadata()
            # After that, so that peers don't learn of it.
            self._registered.append(agent.register([(self.scratch, mmap.PAGESIZE)]))
            self.descriptors(WHOLE)
        except (NixlError, ValueError) as error:
            what = f"{region.num_blocks} blocks of {region.block_bytes} bytes"
            raise TransportError(f"{what} can't be registered ({error})") from error

    @property
    def scratch(self) -> int:
        """The address of host memory that the first byte of each peer is read to."""
        return address_of(self._scratch)

    def descriptors(self, part: Part) -> int:
        """Prepared descriptors of that part of all pieces: the same list for all peers that exchange it.

        Raises NixlError, and ValueError if pieces have no such part.
        """
        if part not in self._prepared:
            region, pieces = self.region, narrowed(self.region.pieces, part)
            self._prepared[part] = self._agent.prepare(
                None, pieces, region.num_blocks, region.memory, region.device
            )
        return self._prepared[part]

    def release(self) -> None:
        """Never with a transfer in flight. Raises TransportError if the agent refuses."""
        try:
            while self._prepared:
                self._agent.release_prepared(self._prepared.popitem()[1])
            while self._registered:
                self._agent.deregister(self._registered.pop())
        except NixlError as error:
            raise TransportError(f"the memory can't be released ({error})") from error
