"""Ranks without memory: a mover that does what a test says, behind a real channel."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import TransferState, TransportError
from kvhandoff.transport.liveness import this_process
from kvhandoff.transport.mover import Moved
from kvhandoff.vllm.rank_channel import Attach, News, RankChannel, RankHello, Report, decode_news, encode

DEADLINE = 20.0
PEER = Identity(EngineId("peer"), Epoch("1"))
LAYOUT = {
    "order": "layer,head,token,content; CPU_ATTN vec",
    "dtype": "float32",
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "block_bytes": 1536,
}


def moved(error: str | None = None, *, posted: float = 1.0, done: float = 2.0, size: int = 64) -> Moved:
    """How one rank's part of a move ended."""
    state = TransferState.DONE if error is None else TransferState.FAILED
    return Moved(state, error, 0.5, posted, done, 1, 0 if error else size)


class ScriptedMover:
    """Implements `rank_channel.RankMover`; what it is asked comes out of `asked`, and waits for the test."""

    def __init__(self) -> None:
        self.alive = True
        self.asked: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def connect(self, peer: Identity, metadata: bytes, done: Callable[[TransportError | None], None]) -> None:
        self.asked.put(("connect", peer, metadata, done))

    def disconnect(self, peer: Identity) -> None:
        self.asked.put(("disconnect", peer))

    def move(
        self, operation: str, peer: Identity, copies: Sequence[Copy], done: Callable[[Moved], None]
    ) -> None:
        if not self.alive:
            done(moved("the mover is closed"))
            return
        self.asked.put((operation, peer, copies, done))

    def next(self) -> tuple[Any, ...]:
        """What it was asked next; fails if nothing comes."""
        return self.asked.get(timeout=DEADLINE)


class ScriptedRank:
    """A rank in this process: a real channel to a mover that a test plays."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.mover = ScriptedMover()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.channel = RankChannel(self.mover, self.reports.put)
        self.channel.start()
        self.hello = RankHello(
            engine_id="engine",
            rank=rank,
            ranks=ranks,
            address=self.channel.address,
            token=self.channel.token,
            process=this_process(),
            kind="nixl",
            metadata=f"rank {rank}".encode(),
            layout=LAYOUT,
            num_blocks=5,
        )


@contextmanager
def scripted_ranks(ranks: int) -> Iterator[list[ScriptedRank]]:
    made = [ScriptedRank(rank, ranks) for rank in range(ranks)]
    try:
        yield made
    finally:
        for rank in made:
            rank.channel.close()


class PlainDriver:
    """A driver that is nothing but a socket."""

    def __init__(self, address: str) -> None:
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, message: Any) -> None:
        self._socket.send(message if isinstance(message, bytes) else encode(message))

    def attach(self, token: bytes) -> None:
        self.send(Attach(token))

    def hears(self, within: float = DEADLINE) -> News | None:
        """The next news; None if nothing comes."""
        return decode_news(self._socket.recv()) if self._socket.poll(within * 1000) else None

    def is_dropped(self) -> bool:
        """Waits until the other side hangs up."""
        return bool(self._monitor.poll(DEADLINE * 1000))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
