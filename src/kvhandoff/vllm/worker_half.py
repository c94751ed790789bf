"""The worker's half of the connector: one rank's memory, its mover, and the reports that vLLM collects.

All methods are called on the worker's main thread. Transfers, and the driver's commands, run on threads of
their own and wait for none of vLLM's steps.
"""

from __future__ import annotations

import importlib
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvhandoff.engine.names import hold_name, rank_name
from kvhandoff.transport.api import DataPlane, MemoryKind
from kvhandoff.transport.liveness import this_process
from kvhandoff.transport.mover import Mover
from kvhandoff.transport.planes import PlaneOptions, nixl_plane
from kvhandoff.transport.ranks import RankedPlane
from kvhandoff.vllm.cache_layout import CacheFacts, CacheTensor, describe_cache
from kvhandoff.vllm.host_memory import make_ready
from kvhandoff.vllm.rank_channel import RankChannel, RankHello, Report

_kept: list[object] = []
"""Memory that transfers may still be in flight to, when their worker closed: kept until the process ends."""


@dataclass(frozen=True, slots=True)
class LoadResults:
    """Loads that have ended since the last results. What they hold belongs to the caller."""

    finished: set[str] = field(default_factory=set)
    """Requests whose load has ended, however."""
    failed: set[str] = field(default_factory=set)
    """Those of them whose load brought nothing."""
    bad_blocks: set[int] = field(default_factory=set)
    """Target blocks of theirs that hold nothing useful."""


class WorkerHalf:
    """One rank: registered memory that peers read and write, and the loads that ended in it."""

    def __init__(
        self,
        engine_id: str,
        rank: int,
        ranks: int,
        cluster_key: bytes,
        plane: PlaneOptions,
        facts: CacheFacts,
    ) -> None:
        """`rank` counts from 0 within the `ranks` workers of the engine."""
        self._engine_id = engine_id
        self._rank = rank
        self._ranks = ranks
        self._cluster_key = cluster_key
        self._plane = plane
        self._facts = facts
        self._name: socket.socket | None = None
        self._mover: Mover | None = None
        self._channel: RankChannel | None = None
        self._hello: RankHello | None = None
        self._results = LoadResults()
        self._lock = threading.Lock()
        """Guards `_results`, which the channel's thread adds to."""
        permit_amx()

    def register(self, caches: Mapping[str, CacheTensor]) -> None:
        """Take vLLM's cache tensors by layer, make them readable and writable for peers, and listen for the
        driver. About a second.

        Raises ConfigError for a cache that can't be handed over, for an engine id whose former workers still
        run, or for a data plane that can't be had; TransportError for memory that can't be registered.
        """
        if self._hello is not None:
            raise RuntimeError("the cache is registered already")
        layout, region = describe_cache(caches, self._facts, self._rank, self._ranks)
        # Peers take another life of this engine as proof that no process of the former moves anything.
        self._name = hold_name(rank_name(self._engine_id, self._rank), self._cluster_key)
        if region.memory is MemoryKind.DRAM:
            make_ready(region.ranges)
        mover = Mover(self._make_plane, region)
        metadata = mover.start()
        self._caches = caches
        self._mover = mover
        self._channel = RankChannel(mover, self._take)
        self._channel.start()
        self._hello = RankHello(
            engine_id=self._engine_id,
            rank=self._rank,
            ranks=self._ranks,
            address=self._channel.address,
            token=self._channel.token,
            process=this_process(),
            kind=mover.kind,
            metadata=metadata,
            layout=msgspec.structs.asdict(layout),
            num_blocks=region.num_blocks,
        )

    def _make_plane(self) -> DataPlane:
        """On the mover's thread. The name is this life's own: a restarted worker is another agent."""
        name = f"{self._engine_id}/{self._rank}/{secrets.token_hex(8)}"
        return RankedPlane(partial(nixl_plane, name, self._plane), self._rank, self._ranks)

    def handshake(self) -> RankHello:
        """What the driver needs to attach. Raises RuntimeError before `register`."""
        if self._hello is None:
            raise RuntimeError("the cache is not registered yet")
        return self._hello

    def results(self) -> LoadResults:
        """What was reported since the last call: every report once, whole. Cheap: called at each step."""
        with self._lock:
            results, self._results = self._results, LoadResults()
        return results

    def _take(self, report: Report) -> None:
        """On the channel's thread."""
        with self._lock:
            self._results.finished.add(report.request_id)
            if report.failed:
                self._results.failed.add(report.request_id)
            self._results.bad_blocks.update(report.bad_blocks)

    def close(self) -> None:
        """Stop. Moves in flight are waited for, a few seconds at most. If some remain, memory and name stay
        until the process ends, since their bytes may still land."""
        clean = self._mover is None or self._mover.close()
        if self._channel is not None:
            self._channel.close()
        if not clean:
            _kept.append((self._caches, self._name))
        elif self._name is not None:
            self._name.close()
        self._name = None


def permit_amx() -> None:
    """Ask the kernel for this process's AMX tiles, where torch knows how. A worker whose first forward is of
    one token, behind a loaded prompt, would use them before anything has asked, and die of SIGILL."""
    init = getattr(importlib.import_module("torch")._C._cpu, "_init_amx", None)
    if init is not None:
        init()
