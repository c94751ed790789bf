"""A prefill and a decode engine in two processes, real except for the model: its forward computes nothing.

What is in a process is what `kvhandoff engine` puts there, without the HTTP server: engine core and thread,
agent, control plane, mover, data plane, registered pool. The runner writes each block's token ids into the
block, and checks them on the decode engine before it answers: a handoff that brings other bytes fails.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import HandoffId, HandoffKey, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.records import LegRecord
from kvhandoff.embedded.agent import EngineAgent
from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep
from kvhandoff.embedded.core import EngineCore
from kvhandoff.embedded.process import prepare, spare_collector
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.tickets import Ticket, TicketKey
from kvhandoff.transport.api import Region
from kvhandoff.transport.mover import Mover
from kvhandoff.transport.planes import allocate_region, create_plane
from kvhandoff.web import run_main

Role = Literal["prefill", "decode"]

SMOLLM2 = KVLayout(
    order="block,layer,token,2,head,dim",
    dtype="bfloat16",
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_size=16,
    block_bytes=30 * 16 * 2 * 3 * 64 * 2,
)
VOCABULARY = 49152
CLUSTER_KEY = b"key of the benchmark"
DEADLINE_S = 60.0
"""For any one answer. A run that needs it is broken."""


@dataclass(frozen=True)
class Shape:
    """What one row of the table is about."""

    transport: Literal["nixl", "shm"]
    blocks: int
    """Of the prompt, which fills all but one token of the last one: the answer's first token goes there."""
    fragmented: bool
    """No two free blocks of either pool are neighbours."""

    @property
    def pool_blocks(self) -> int:
        return self.blocks * (2 if self.fragmented else 1)

    @property
    def prompt_tokens(self) -> int:
        return self.blocks * SMOLLM2.block_size - 2

    def prompt(self, seed: int) -> list[int]:
        """Different tokens each time: nothing is found in a prefix cache."""
        rng = random.Random(seed)
        return [rng.randrange(VOCABULARY) for _ in range(self.prompt_tokens)]


@dataclass(frozen=True)
class Offered:
    """What the prefill engine says of a round. Readings of one clock, in seconds."""

    computed_at: float
    """The prompt's last layer was computed."""
    sent_at: float
    """The offer's descriptor is there, and a ticket for it is about to be signed and sent."""


@dataclass(frozen=True)
class Landed:
    """What the decode engine says of a round."""

    opened_at: float
    """The ticket has arrived."""
    running_at: float
    """The engine thread, with the prompt's KV in the request's blocks, calls the model."""
    record: LegRecord


class BlankRunner:
    """Implements `api.ModelRunner` for a model whose KV is the token ids themselves."""

    def __init__(self, region: Region) -> None:
        self.layout = SMOLLM2
        self.model_fingerprint = "blank"
        self.vocab_size = VOCABULARY
        self.max_context = 1 << 20
        self.eos_token_ids: frozenset[int] = frozenset()
        self.called_at = self.returned_at = 0.0
        self.expected: Sequence[int] | None = None
        """What the blocks of the next step's request have to hold, up to its last token."""
        words = np.frombuffer(region.buffer, dtype=np.int32).reshape(region.num_blocks, -1)
        self._begin, self._end = words[:, : SMOLLM2.block_size], words[:, -SMOLLM2.block_size :]
        self._logits = torch.zeros(1, VOCABULARY)

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor | None]:
        """Raises RuntimeError when the blocks hold anything but what is expected."""
        self.called_at = monotonic()
        [step] = steps
        if self.expected is not None:
            self._check(step.block_table, self.expected[: step.start])
        size = self.layout.block_size
        for start in range(0, len(step.token_ids), size):
            tokens = step.token_ids[start : start + size]
            block, offset = divmod(step.start + start, size)
            for half in (self._begin, self._end):
                half[step.block_table[block], offset : offset + len(tokens)] = tokens
        self.returned_at = monotonic()
        return [self._logits if step.logits else None]

    def _check(self, block_table: Sequence[int], expected: Sequence[int]) -> None:
        blocks = list(block_table)
        for half in (self._begin, self._end):
            found = half[blocks].reshape(-1)[: len(expected)]
            if not np.array_equal(found, expected):
                wrong = int(np.count_nonzero(found != expected))
                raise RuntimeError(f"{wrong} of {len(expected)} tokens' KV is not the prompt's")


class Engine:
    """One engine process, inside."""

    def __init__(self, agent: EngineAgent, core: EngineCore, runner: BlankRunner, region: Region) -> None:
        self.agent = agent
        self.core = core
        self.runner = runner
        self.region = region
        self._loop = asyncio.get_running_loop()
        self._key = TicketKey(CLUSTER_KEY)

    def ticket(
        self,
        leg: Literal["prefill", "decode", "peers"],
        seed: int,
        *,
        audience: Identity | None = None,
        offer: OfferDescriptor | None = None,
        peers: tuple[str, ...] = (),
    ) -> str:
        """What the router would sign."""
        key = HandoffKey(HandoffId(f"{leg}-{seed}" if leg == "peers" else f"{seed:024x}"), 0)
        now = monotonic()  # one host, one clock: also the audience's
        return self._key.sign(
            Ticket(
                leg=leg,
                audience=audience or self.agent.me,
                not_after=now + DEADLINE_S,
                key=key,
                offer=offer,
                peers=peers,
            )
        )

    async def serve(
        self, params: dict[str, Any], prompt: Sequence[int], name: str, max_tokens: int
    ) -> tuple[Any, Any]:
        """One request as the server serves it, up to its last token: (leg, response params)."""
        leg = self.agent.leg(params)
        leg.tokenized()
        answered = self._loop.create_future()

        def on_output(output: Any) -> None:
            if output.finish_reason is not None:
                self._loop.call_soon_threadsafe(answered.set_result, output)

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        leg.submit(EngineRequest(name, leg.prompt_token_ids or prompt, sampling, on_output))
        output = await answered
        if output.error is not None:
            raise output.error
        leg.first_token()
        return leg, await leg.response_params()

    def ended(self, leg: Any) -> LegRecord:
        """Finish the leg; its record."""
        leg.finished("length", 1)
        state = self.agent.state(0)
        return state.records[-1]

    async def settled(self, idle_blocks: int) -> None:
        """Wait until all blocks are free or cached: the peer has released what it read."""
        async with asyncio.timeout(DEADLINE_S):
            while (counts := self.agent.blocks()).free + counts.cached < idle_blocks:  # noqa: ASYNC110  other threads' state
                await asyncio.sleep(0.001)


@asynccontextmanager
async def _engine(role: Role, shape: Shape) -> AsyncIterator[Engine]:
    region = allocate_region(shape.transport, shape.pool_blocks, SMOLLM2.block_bytes)
    runner = BlankRunner(region)
    core = EngineCore(runner, num_blocks=region.num_blocks)
    if shape.fragmented:
        # As after a long life with many requests: every second block is somebody's, and stays so.
        pool = core._pool
        pool.release(pool.allocate(pool.num_blocks)[0 if role == "prefill" else 1 :: 2])
    facts = EngineFacts(
        engine_id=role,
        role=role,
        model="blank",
        model_fingerprint=runner.model_fingerprint,
        num_blocks=region.num_blocks,
    )
    mover = Mover(lambda: create_plane(shape.transport, facts.identity), region)
    agent = EngineAgent(facts, core, mover, CLUSTER_KEY)
    core.hooks = agent
    await agent.start()
    core.start()
    spare_collector()
    try:
        yield Engine(agent, core, runner, region)
    finally:
        await asyncio.to_thread(core.close)
        await agent.close()


async def _receive(pipe: Connection) -> Any:
    """The next message. Raises EOFError when the other side has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()


async def _run_prefill(shape: Shape, parent: Connection, decode: Connection) -> None:
    async with _engine("prefill", shape) as engine:
        parent.send((engine.agent.me, engine.agent.control_address))
        decode_engine = await _receive(parent)
        while (seed := await _receive(parent)) is not None:
            params = {"ticket": engine.ticket("prefill", seed)}
            leg, answer = await engine.serve(params, shape.prompt(seed), str(seed), 1)
            sent_at = monotonic()
            # The router's part: it gets the descriptor as JSON, and signs the decode engine's ticket.
            offer = msgspec.convert(answer["offer"], OfferDescriptor)
            decode.send(engine.ticket("decode", seed, audience=decode_engine, offer=offer))
            engine.ended(leg)
            parent.send(Offered(engine.runner.returned_at, sent_at))
            await _receive(parent)  # nothing of ours runs while the blocks move
            await engine.settled(shape.blocks)
            parent.send("settled")


async def _run_decode(shape: Shape, parent: Connection, prefill: Connection) -> None:
    async with _engine("decode", shape) as engine:
        source = allocate_region(shape.transport, shape.blocks, SMOLLM2.block_bytes)
        parent.send(engine.agent.me)
        engine.agent.connect_peers(engine.ticket("peers", 0, peers=(await _receive(parent),)))
        while (command := await _receive(parent)) is not None:
            if isinstance(command, str):
                size = shape.blocks if command == "copy" else 1
                parent.send(_copy(engine.region, source, range(0, shape.blocks, size), size))
                continue
            prompt = shape.prompt(command)
            engine.runner.expected = prompt
            parent.send("ready")
            ticket = await _receive(prefill)
            opened_at = monotonic()
            params = {"ticket": ticket, "prompt_token_ids": prompt}
            # The first token is the prefill engine's; the model is called for the second.
            leg, _ = await engine.serve(params, prompt, str(command), 2)
            record = engine.ended(leg)
            await engine.settled(shape.blocks)
            parent.send(Landed(opened_at, engine.runner.called_at, record))


def _copy(pool: Region, source: Region, starts: Sequence[int], count: int) -> float:
    """Seconds that plain copies into the pool take, of `count` blocks from each of `starts` on."""
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    size = pool.block_bytes
    started_at = monotonic()
    for start in starts:
        memmove(pool.address + start * size, source.address + start * size, count * size)
    return monotonic() - started_at


def _main(role: Role, shape: Shape, parent: Connection, peer: Connection) -> None:
    prepare(exact=False, threads=1)
    run = _run_prefill if role == "prefill" else _run_decode
    run_main(run(shape, parent, peer))


def preload() -> None:
    """Let all engines be forked from one process that has torch loaded and runs nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])


class EnginePair:
    """The two processes, from outside."""

    def __init__(self, shape: Shape) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = zip(context.Pipe(), context.Pipe(), strict=True)
        between = context.Pipe()
        self._prefill, self._decode = ours
        self._processes = [
            context.Process(target=_main, args=(role, shape, end, peer), daemon=True)
            for role, end, peer in zip(("prefill", "decode"), theirs, between, strict=True)
        ]
        for process in self._processes:
            process.start()
        for end in (*theirs, *between):
            end.close()
        _, control_address = _answer(self._prefill)
        self._prefill.send(_answer(self._decode))
        self._decode.send(control_address)
        self._seed = 0

    def handoff(self) -> tuple[Offered, Landed]:
        """One request over both engines, from idle to idle."""
        self._seed += 1
        self._decode.send(self._seed)
        _answer(self._decode)
        self._prefill.send(self._seed)
        offered, landed = _answer(self._prefill), _answer(self._decode)
        self._prefill.send("settle")
        _answer(self._prefill)
        return offered, landed

    def copy(self, *, by_blocks: bool = False) -> float:
        """Seconds of one plain, contiguous copy of as many bytes from memory of the same kind into the decode
        engine's pool, by one thread of its process; or of one copy for each block."""
        self._decode.send("copy by blocks" if by_blocks else "copy")
        seconds: float = _answer(self._decode)
        return seconds

    def close(self) -> None:
        """End the processes. Raises RuntimeError if they don't end in order."""
        for pipe in (self._prefill, self._decode):
            pipe.send(None)
        for process in self._processes:
            process.join(DEADLINE_S)
            if process.exitcode != 0:
                raise RuntimeError(f"an engine ended with {process.exitcode}")

    def discard(self) -> None:
        """End them whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise RuntimeError(f"an engine gave no answer within {DEADLINE_S} s")
    return pipe.recv()


@contextmanager
def engine_pair(shape: Shape) -> Iterator[EnginePair]:
    """Two engines, connected."""
    pair = EnginePair(shape)
    try:
        yield pair
        pair.close()
    finally:
        pair.discard()
