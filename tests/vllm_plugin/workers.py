"""Workers as processes: the worker half over a real cache and a real data plane, without vLLM."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvhandoff.transport.planes import PlaneOptions
from kvhandoff.vllm.cache_layout import cache_facts
from kvhandoff.vllm.rank_channel import RankHello
from kvhandoff.vllm.worker_half import WorkerHalf
from tests.vllm_plugin.caches import FakeConfig, full_content, make_caches

CLUSTER_KEY = b"the cluster key of these tests"
DEADLINE = 300.0
"""Of every wait; nothing waits that long unless the code is wrong. Three processes that import torch took
more than a minute to start where others had the cores, vLLM's spinning engines among them."""
_spawn = multiprocessing.get_context("spawn")


def worker_half(
    engine_id: str, order: str, heads: int, seed: int, rank: int = 0, ranks: int = 1
) -> tuple[WorkerHalf, dict[str, torch.Tensor]]:
    """A worker half, not registered yet, and its caches: its share of a cache that `full_content` fills."""
    config = FakeConfig(layout=order, total_kv_heads=heads).on_ranks(ranks)
    count = config.spec.num_kv_heads
    first = rank * heads // ranks
    content = full_content(seed, heads=heads)[:, :, first : first + count]
    facts = cache_facts(config.vllm_config, config.kv_cache_config)
    half = WorkerHalf(engine_id, rank, ranks, CLUSTER_KEY, PlaneOptions(lanes=1), facts)
    return half, make_caches(content, order)


class Worker:
    """The test's end of one worker process."""

    def __init__(self, *what: Any) -> None:
        """`what`: see `worker_half`."""
        self._pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs, *what), daemon=True)
        self.process.start()
        theirs.close()

    def hello(self) -> RankHello:
        """Once, when it has registered its cache."""
        hello: RankHello = self._answer()
        return hello

    def content(self) -> torch.Tensor:
        """Its cache as `[L, B, H, N, C]`."""
        layers: list[list[Any]] = self._ask("content")
        return torch.tensor(layers)

    def results(self) -> Any:
        return self._ask("results")

    def close(self) -> None:
        """End in order; fails if the process does not exit with 0."""
        assert self._ask("close") == "closed"
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """As kill -9 does; returns when the process is gone."""
        self.process.kill()
        self.process.join(DEADLINE)
        assert self.process.exitcode == -signal.SIGKILL

    def discard(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(DEADLINE)
        self._pipe.close()

    def _ask(self, command: str) -> Any:
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(DEADLINE), "the worker does not answer"
        return self._pipe.recv()


@contextmanager
def workers() -> Iterator[type[Worker]]:
    """Makes workers, and ends those that are left."""
    made: list[Worker] = []

    class Tracked(Worker):
        def __init__(self, *what: Any) -> None:
            super().__init__(*what)
            made.append(self)

    try:
        yield Tracked
    finally:
        for worker in made:
            worker.discard()


def _serve(pipe: Connection, *what: Any) -> None:
    """The worker's process; its main thread does nothing while blocks move."""
    half, caches = worker_half(*what)
    half.register(caches)
    pipe.send(half.handshake())
    while True:
        match pipe.recv():
            case "content":
                pipe.send([tensor.tolist() for tensor in caches.values()])
            case "results":
                pipe.send(half.results())
            case "close":
                half.close()
                pipe.send("closed")
                return
