"""NIXL's agent in plain types: what the data plane needs of it, errors as one exception.

NIXL's Python wrapper is not used: it hard-codes a progress thread that burns a core, and its descriptor
helpers unpickle. The bindings beneath it take plain numbers, and NumPy arrays, which NIXL brings with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

from kvhandoff.core.errors import ConfigError, KVHandoffError
from kvhandoff.transport.api import MemoryKind, Operation, Piece

Backend = Literal["UCX", "LIBFABRIC"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

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
    """NIXL reported an error; `disconnected` if it was the loss of the peer; `fence` unless the transfer that
    it is the error of may still move bytes."""

    def __init__(self, message: str, *, disconnected: bool = False, fence: bool = True) -> None:
        super().__init__(message)
        self.disconnected = disconnected
        self.fence = fence


class NixlAgent:
    """One agent with one backend. Single-threaded: agents don't lock.

    Prepared descriptor lists and transfers are NIXL's handles, plain ints, to be released by the caller.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: Backend = "UCX",
        options: Mapping[str, str] = MappingProxyType({}),
        progress_delay_us: int = PROGRESS_DELAY_US,
    ) -> None:
        """Start the agent (about 0.5 s the first in a process, the next 0.03 s). `options` are the backend's
        own parameters and come before those set here.

        Raises ConfigError if NIXL is missing or the backend can't be started.
        """
        try:
            self._nixl: Any = importlib.import_module("nixl_cu12._bindings")
            self._numpy: Any = importlib.import_module("numpy")
        except ImportError as error:
            raise ConfigError(
                f"transport: nixl can't be loaded ({error}); install kvhandoff[nixl] or use shm"
            ) from error
        kinds = [kind for kind in dir(self._nixl) if kind.startswith("nixl") and kind.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(getattr(self._nixl, kind) for kind in kinds)
        self._segments = {
            MemoryKind.DRAM: self._nixl.DRAM_SEG,
            MemoryKind.VRAM: self._nixl.VRAM_SEG,
        }
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = progress_delay_us
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = False
        parameters = {"engine_config": UCX_OPTIONS} if backend == "UCX" else {}
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend(backend, {**parameters, **options})]
        except self._errors as error:
            given = f" with {dict(options)}" if options else ""
            raise ConfigError(
                f"transport: NIXL's {backend} backend can't be started{given} ({error}); "
                f"backends that load here: {', '.join(self._loadable()) or 'none'}"
            ) from error
        self._failed_start_is_over = backend == "UCX"

    def _loadable(self) -> list[str]:
        """Backends whose plugin and the libraries it needs are here."""
        found: list[str] = []
        for backend in BACKENDS:
            try:
                self._agent.getPluginParams(backend)
            except self._errors:
                continue
            found.append(backend)
        return found

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except self._errors as error:
            lost = isinstance(error, self._nixl.nixlRemoteDisconnectError)
            raise NixlError(f"NIXL: {error}", disconnected=lost) from error

    def register(
        self, ranges: Sequence[tuple[int, int]], memory: MemoryKind = MemoryKind.DRAM, device: int = 0
    ) -> Any:
        """Make memory, as (address, bytes), usable for transfers; the result is for `deregister`.

        Raises NixlError, as all that follow do.
        """
        descriptors = [(address, size, device, "") for address, size in ranges]
        registered = self._nixl.nixlRegDList(self._segments[memory], descriptors)
        self._call(self._agent.registerMem, registered, self._backends)
        return registered

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

    def prepare(
        self,
        peer: str | None,
        pieces: Sequence[Piece],
        num_blocks: int,
        memory: MemoryKind,
        device: int,
    ) -> int:
        """Descriptors of the pieces of all blocks of a peer's memory or (None) of this process's; that of
        piece p of block b has the index p * num_blocks + b. All of it must be registered.

        Transfers pick from them by index, which makes 1000 scattered blocks ready in 0.14 ms; descriptors
        made for each transfer take 0.38 ms. NIXL merges neighbours whose indices ascend by itself. A run
        for each piece is prepared in 0.01 ms; 30 pieces of 1000 blocks one by one, in 6 ms.
        """
        runs = [(piece.address, piece.size, device, piece.stride, num_blocks) for piece in pieces]
        descriptors = self._numpy.array(runs, dtype=self._numpy.uint64)
        name = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        prepare = self._agent.prepXferDlist
        handle: int = self._call(prepare, name, self._segments[memory], descriptors, self._backends)
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
        """A transfer of the byte at address `there` of a peer to `here`, both in host memory; not started."""
        dlist, dram = self._nixl.nixlXferDList, self._nixl.DRAM_SEG
        ends = dlist(dram, [(here, 1, 0)]), dlist(dram, [(there, 1, 0)])
        make = self._agent.createXferReq
        handle: int = self._call(make, self._nixl.NIXL_READ, *ends, peer, "", self._backends)
        return handle

    def start(self, transfer: int) -> bool:
        """Start a transfer; whether it is done already. An error of UCX means that it is over.

        LIBFABRIC's is no fence: it hands descriptors to the network one by one, and returns an error at the
        first that fails, with those before it under way.
        """
        try:
            return self._is_done(self._call(self._agent.postXferReq, transfer))
        except NixlError as error:
            error.fence = self._failed_start_is_over
            raise

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
