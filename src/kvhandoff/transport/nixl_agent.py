"""NIXL's agent in plain types: what the data plane needs of it, errors as one exception.

NIXL's Python wrapper is not used: it hard-codes a progress thread that burns a core, and its descriptor
helpers unpickle. The bindings beneath it take plain numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from kvhandoff.core.errors import ConfigError, KVHandoffError
from kvhandoff.transport.api import Operation

PROGRESS_DELAY_US = 1000
"""The progress thread's sleep. It accepts connections, and over TCP serves reads, while this engine computes,
without the GIL. Measured idle: 1 ms costs 1-2 % of a core, no sleep a whole core; polling from Python each
millisecond instead costs 4 %, and then a peer's first transfer waits for a busy interpreter."""

OUTBOUND_PROGRESS_DELAY_US = 20_000
"""The same for an agent that no peer connects to. Its transfers are moved on by who polls them; what is left
to the thread is to notice peers that go. Measured idle: 0.1 % of a core."""

UCX_OPTIONS = "USE_MT_MUTEX=y,CMA_SEG_SIZE=4m,CMA_TX_QUOTA=16"
"""Where UCX is to differ from its defaults; environment variables (`UCX_USE_MT_MUTEX`, …) come first.

- A mutex instead of a spin lock between the progress thread and a post, which holds it for as long as it
  copies: otherwise the progress thread burns a second core (measured: twice the CPU time, and twice the time
  on two cores).
- How much it copies from a process of the same host in one system call, by itself 512 KiB: contiguous blocks
  then take 1.2 times as long. And how many such calls it makes before it looks at all its connections again,
  by itself 1: scattered blocks then take 1.3 times as long.
"""


class NixlError(KVHandoffError):
    """NIXL reported an error; `disconnected` if it was the loss of the peer."""

    def __init__(self, message: str, *, disconnected: bool = False) -> None:
        super().__init__(message)
        self.disconnected = disconnected


class NixlAgent:
    """One agent with the UCX backend, for host memory. Single-threaded: agents don't lock.

    Prepared descriptor lists and transfers are NIXL's handles, plain ints, to be released by the caller.
    """

    def __init__(self, name: str, *, progress_delay_us: int = PROGRESS_DELAY_US) -> None:
        """Start the agent (about 0.5 s the first in a process, the next 0.03 s).

        Raises ConfigError if NIXL is missing or UCX can't be started.
        """
        try:
            self._nixl: Any = importlib.import_module("nixl_cu12._bindings")
        except ImportError as error:
            raise ConfigError(
                f"transport: nixl can't be loaded ({error}); install kvhandoff[nixl] or use shm"
            ) from error
        kinds = [kind for kind in dir(self._nixl) if kind.startswith("nixl") and kind.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(getattr(self._nixl, kind) for kind in kinds)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = progress_delay_us
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = False
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {"engine_config": UCX_OPTIONS})]
        except self._errors as error:
            raise ConfigError(f"transport: NIXL's UCX backend can't be started ({error})") from error

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except self._errors as error:
            lost = isinstance(error, self._nixl.nixlRemoteDisconnectError)
            raise NixlError(f"NIXL: {error}", disconnected=lost) from error

    def register(self, address: int, size: int) -> Any:
        """Make memory usable for transfers; the result is for `deregister`. Raises NixlError, as all do."""
        memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, "")])
        self._call(self._agent.registerMem, memory, self._backends)
        return memory

    def deregister(self, memory: Any) -> None:
        self._call(self._agent.deregisterMem, memory, self._backends)

    def metadata(self) -> bytes:
        """For `load` at a peer: how to connect, and the keys of what is registered by now."""
        metadata: bytes = self._call(self._agent.getLocalMD)
        return metadata

    def load(self, metadata: bytes) -> str:
        """Get to know a peer; returns its agent's name."""
        name: bytes = self._call(self._agent.loadRemoteMD, metadata)
        return name.decode()

    def unload(self, name: str) -> None:
        """Forget a peer. Never while a transfer with it is in flight."""
        self._call(self._agent.invalidateRemoteMD, name)

    def prepare(self, peer: str | None, address: int, count: int, size: int) -> int:
        """Descriptors of `count` ranges of `size` bytes, of a peer's memory or (None) of this engine's.

        Transfers pick from them by index, which makes 1000 scattered blocks ready in 0.14 ms; descriptors
        made for each transfer take 0.38 ms. NIXL merges neighbours by itself.
        """
        ranges = [(address + index * size, size, 0) for index in range(count)]
        descriptors = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, ranges)
        name = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        handle: int = self._call(self._agent.prepXferDlist, name, descriptors, self._backends)
        return handle

    def release_prepared(self, prepared: int) -> None:
        self._call(self._agent.releasedDlistH, prepared)

    def make_transfer(
        self, operation: Operation, here: int, indices: Sequence[int], there: int, peer_indices: Sequence[int]
    ) -> int:
        """A transfer between two prepared lists, one range per index, at least one; not started yet."""
        kind = self._nixl.NIXL_READ if operation == "read" else self._nixl.NIXL_WRITE
        make = self._agent.makeXferReq
        handle: int = self._call(make, kind, here, indices, there, peer_indices, "", self._backends)
        return handle

    def make_byte_read(self, here: int, peer: str, there: int) -> int:
        """A transfer of the byte at address `there` of a peer to `here`; not started yet."""
        dlist, dram = self._nixl.nixlXferDList, self._nixl.DRAM_SEG
        ends = dlist(dram, [(here, 1, 0)]), dlist(dram, [(there, 1, 0)])
        make = self._agent.createXferReq
        handle: int = self._call(make, self._nixl.NIXL_READ, *ends, peer, "", self._backends)
        return handle

    def start(self, transfer: int) -> bool:
        """Start a transfer; whether it is done already. An error means that it is over."""
        return self._is_done(self._call(self._agent.postXferReq, transfer))

    def is_done(self, transfer: int) -> bool:
        """Whether a started transfer is done. An error means that it is over."""
        return self._is_done(self._call(self._agent.getXferStatus, transfer))

    def _is_done(self, status: Any) -> bool:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise NixlError(f"NIXL: {status}")
        return bool(status == self._nixl.NIXL_SUCCESS)

    def release_transfer(self, transfer: int) -> None:
        """Only when it is over: this stops nothing."""
        self._call(self._agent.releaseXferReq, transfer)
