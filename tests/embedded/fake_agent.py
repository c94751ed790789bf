"""The server's neighbours, scripted: an agent whose legs record every call, an engine told what to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from typing import Any, Literal

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.errors import RequestError
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import BlockCounts, EngineState
from kvhandoff.embedded.api import EngineRequest, TokenLogprob, TokenOutput
from kvhandoff.handoff.tickets import BadTicket

Script = Callable[[EngineRequest], Iterable[TokenOutput]]

LAYOUT = KVLayout(
    order="block,token", dtype="int", layers=1, kv_heads=1, head_dim=1, block_size=16, block_bytes=64
)
BLOCKS = BlockCounts(total=8, free=5, cached=1, used=2, offered=0, loading=0, quarantined=0, granted=0)


def tokens(token_ids: Iterable[int], finish: str | None = "length") -> Script:
    """A script: these tokens, then the end with the last one. Logprobs, if asked for, are made up."""
    ids = list(token_ids)

    def script(request: EngineRequest) -> Iterable[TokenOutput]:
        prompt = None
        if request.params.prompt_logprobs is not None:
            prompt = (
                None,
                *(made_up(token, request.params.prompt_logprobs) for token in request.prompt_token_ids[1:]),
            )
        for position, token_id in enumerate(ids):
            ends: Any = finish if position == len(ids) - 1 else None
            yield TokenOutput(
                request.request_id,
                token_id,
                logprob=None
                if request.params.logprobs is None
                else made_up(token_id, request.params.logprobs),
                prompt_logprobs=prompt if position == 0 else None,
                finish_reason=ends,
                stop_token=token_id if ends == "stop" else None,
            )

    return script


def made_up(token_id: int, top: int) -> TokenLogprob:
    """A logprob that can be recognised: −id/8 for the token, and the ids after it as alternatives."""
    best = tuple((token_id + rank, -(token_id + rank) / 8) for rank in range(top))
    return TokenLogprob(token_id, -token_id / 8, 1, best)


class FakeLeg:
    """Implements `Leg`; `calls` are the names of the methods called, in order."""

    def __init__(self, agent: FakeAgent, params: dict[str, Any] | None) -> None:
        ticket = params or {}
        self._agent = agent
        self.handoff_id = f"handoff{len(agent.legs)}"
        self.role: Literal["prefill", "decode", "local"] = ticket.get("leg", "local")
        self.prompt_token_ids: Sequence[int] | None = ticket.get("prompt_token_ids")
        self.cache_salt: str | None = ticket.get("salt")
        self.calls: list[str] = []
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.outcome: tuple[str | None, int] | None = None
        self.asked_for_params = asyncio.Event()
        self.ended = asyncio.Event()

    def tokenized(self) -> None:
        self.calls.append("tokenized")

    def submit(self, request: EngineRequest) -> None:
        self.calls.append("submit")
        self._run(request)

    def submit_sibling(self, request: EngineRequest) -> None:
        self.calls.append("submit_sibling")
        self._run(request)

    def abort(self, request_id: str) -> None:
        self.calls.append("abort")
        self.aborted.append(request_id)

    def first_token(self) -> None:
        self.calls.append("first_token")

    def cached_tokens(self) -> int:
        return 3

    async def response_params(self) -> dict[str, Any] | None:
        self.calls.append("response_params")
        self.asked_for_params.set()
        await self._agent.hold_response.wait()
        return {"offer": None, "prompt_token_ids": list(self.requests[0].prompt_token_ids)}

    def finished(self, finish_reason: str | None, completion_tokens: int) -> None:
        assert self.outcome is None, "finished twice"
        self.calls.append("finished")
        self.outcome = (finish_reason, completion_tokens)
        self.ended.set()

    def _run(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self._agent.arrived.put_nowait(request)
        if self._agent.refuse is not None:
            raise self._agent.refuse
        if self._agent.script is not None:
            # The engine's thread is not the loop's.
            outputs = self._agent.script(request)
            Thread(target=lambda: [request.on_output(output) for output in outputs]).start()


class FakeAgent:
    """Implements `Agent`. With `script` None the test itself is the engine: it takes requests from `arrived`
    and calls their `on_output`."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.healthy = True
        self.refuse: RequestError | None = None
        """What `submit` raises."""
        self.legs: list[FakeLeg] = []
        self.arrived: asyncio.Queue[EngineRequest] = asyncio.Queue()
        self.opened: asyncio.Queue[FakeLeg] = asyncio.Queue()
        self.tickets: list[tuple[str, object]] = []
        self.hold_response = asyncio.Event()
        self.hold_response.set()

    def leg(self, kv_transfer_params: object | None) -> FakeLeg:
        if kv_transfer_params is not None and not isinstance(kv_transfer_params, dict):
            raise BadTicket("not an object")
        if isinstance(kv_transfer_params, dict) and kv_transfer_params.get("ticket") == "bad":
            raise BadTicket("ticket is bad")
        leg = FakeLeg(self, kv_transfer_params)
        self.legs.append(leg)
        self.opened.put_nowait(leg)
        return leg

    def state(self, after: int) -> EngineState:
        return EngineState(
            engine_id="e",
            epoch="1",
            role="both",
            model="tiny",
            model_fingerprint="f",
            max_model_len=512,
            block_size=16,
            control_address="tcp://127.0.0.1:1",
            data_plane="shm",
            now=1.5,
            running=0,
            waiting=0,
            loading=0,
            blocks=BLOCKS,
            records=[],
            cursor=after,
        )

    def blocks(self) -> BlockCounts:
        return BLOCKS

    def about(self) -> dict[str, str]:
        return {"integration": "embedded"}

    def withdraw(self, signed: object) -> None:
        self._take("withdraw", signed)

    def yield_leg(self, signed: object) -> None:
        self._take("yield", signed)

    def connect_peers(self, signed: object) -> None:
        self._take("peers", signed)

    def metrics(self) -> bytes:
        return b"kvhandoff_up 1\n"

    def _take(self, kind: str, signed: object) -> None:
        if signed == "bad":
            raise BadTicket("ticket is bad")
        self.tickets.append((kind, signed))


class FakeEngine:
    """Implements `EngineControl` as far as the server asks: a length and a health."""

    layout = LAYOUT

    def __init__(self, max_model_len: int = 512) -> None:
        self.max_model_len = max_model_len
        self.healthy = True

    def chain(self, token_ids: Sequence[int], cache_salt: str) -> TokenChain:
        return TokenChain.of(cache_salt.encode(), 16, token_ids)

    def submit(self, request: EngineRequest) -> None:
        raise AssertionError("the server submits through a leg")

    def abort(self, request_id: str) -> None:
        raise AssertionError("the server aborts through a leg")

    def load_finished(self, request_id: str, tokens: int) -> None:
        raise AssertionError("not the server's")

    def load_failed(self, request_id: str, reason: Reason) -> None:
        raise AssertionError("not the server's")

    def release_blocks(self, blocks: Sequence[int]) -> None:
        raise AssertionError("not the server's")

    def load(self) -> dict[str, Any]:
        return {}
