"""Mock engines for the router's benchmark: a prefill and a decode engine in one process of their own.

They cost as little as can be (asyncio.Protocol, httptools, uvloop) and speak what both routers need: state
reports, tickets and accounts of legs to kvhandoff's, vLLM's `kv_transfer_params` of the NixlConnector to
vllm-router. A prefill leg is answered at once: what is the same in every answer is made beforehand, and a leg
is accounted for when its answer is out, since an engine's time is no router's. A decode leg streams
`max_tokens` events, each written alone: at once, or paced by `POST /pace` with milliseconds in its body.

    python -m benchmarks.router_mocks        prints {"prefill": URL, "decode": URL}
"""

from __future__ import annotations

import asyncio
import json
import sys
from base64 import urlsafe_b64decode
from collections import deque
from functools import cached_property
from typing import Any, cast

import httptools
import msgspec
import uvloop

from kvhandoff.core.clock import monotonic
from kvhandoff.core.ids import EngineId, HandoffId, HandoffKey, Identity, new_epoch
from kvhandoff.core.phases import Phase
from kvhandoff.core.records import BlockCounts, EngineState, LegRecord
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.tickets import Ticket

MODEL = "mock"
PROMPT_TOKENS = 500
_KEPT_RECORDS = 8192
"""Accounts that a report may have at most; routers ask twice a second."""
_TOKEN_BYTES = 20_000


class _Params(msgspec.Struct):
    ticket: str | None = None


class _Body(msgspec.Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    kv_transfer_params: _Params | None = None

    @property
    def tokens(self) -> int:
        """What a client wants."""
        return self.max_completion_tokens or self.max_tokens or 16


_body = msgspec.json.Decoder(_Body)
_ticket = msgspec.msgpack.Decoder(Ticket)


class Mock:
    """One engine."""

    def __init__(self, role: str, pace: list[float]) -> None:
        self.role = role
        self.port = 0
        self.pace = pace
        """[seconds between two events], shared by both engines."""
        self._identity = Identity(EngineId(f"mock-{role}"), new_epoch())
        self._for_vllm_router = _prefill_answer(_NIXL_PARAMS)
        self._records: deque[LegRecord] = deque(maxlen=_KEPT_RECORDS)
        self._ended = 0

    def state(self, after: int) -> bytes:
        """The report for kvhandoff's router."""
        fresh = min(max(self._ended - after, 0), len(self._records))
        records = [self._records[i] for i in range(len(self._records) - fresh, len(self._records))]
        state = EngineState(
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            role=cast(Any, self.role),
            model=MODEL,
            model_fingerprint="mock",
            max_model_len=32_768,
            block_size=16,
            control_address=f"tcp://127.0.0.1:{self.port}",
            data_plane="shm",
            now=monotonic(),
            running=0,
            waiting=0,
            loading=0,
            blocks=BlockCounts(
                total=100_000, free=100_000, cached=0, used=0, offered=0, loading=0, quarantined=0
            ),
            records=records,
            cursor=self._ended,
        )
        return msgspec.json.encode(state)

    def prefill(self, body: _Body, request_id: bytes) -> bytes:
        """The answer to a prefill leg, its first attempt; kvhandoff's router names the handoff in the header
        too."""
        if body.kv_transfer_params is None or body.kv_transfer_params.ticket is None:
            return self._for_vllm_router
        return self._offered.replace(_HANDOFF, request_id)

    @cached_property
    def _offered(self) -> bytes:
        """For kvhandoff's router, but for the handoff's name."""
        offer = OfferDescriptor(
            key=HandoffKey(HandoffId(_HANDOFF.decode()), 0),
            source=self._identity,
            control_address=f"tcp://127.0.0.1:{self.port}",
            spans=((0, 32),),
            n_tokens=PROMPT_TOKENS,
            digest="d" * 32,
        )
        return _prefill_answer({"offer": offer, "prompt_token_ids": _TOKEN_IDS})

    def prefilled(self, body: _Body) -> None:
        """Account for a prefill leg."""
        ticket = _open(body)
        if ticket is not None:
            # Nothing of its computing, whose queue the cost model would weigh: every prompt is handed over.
            phases = {Phase.PREFILL_QUEUE.value: 0.0, Phase.PREFILL_OFFER.value: 0.0}
            self._note(ticket, phases=phases, computed_tokens=PROMPT_TOKENS, finish_reason="length")

    def decoded(self, body: _Body) -> None:
        """Account for a decode leg."""
        ticket = _open(body)
        if ticket is None:
            return
        pulled = ticket.offer is not None
        self._note(
            ticket,
            phases={Phase.DECODE_QUEUE.value: 0.0, Phase.WIRE.value: 0.0, Phase.FIRST_STEP.value: 0.0},
            transferred_tokens=PROMPT_TOKENS if pulled else 0,
            computed_tokens=0 if pulled else PROMPT_TOKENS,
            bytes=PROMPT_TOKENS * _TOKEN_BYTES if pulled else 0,
            completion_tokens=body.tokens,
            retained_tokens=PROMPT_TOKENS if ticket.retain is not None else 0,
            finish_reason="length",
        )

    def _note(self, ticket: Ticket, **facts: Any) -> None:
        self._ended += 1
        self._records.append(
            LegRecord(
                handoff_id=ticket.key.handoff_id,
                attempt=ticket.key.attempt,
                leg=ticket.leg,
                engine_id=self._identity.engine_id,
                epoch=self._identity.epoch,
                prompt_tokens=PROMPT_TOKENS,
                **facts,
            )
        )


_HANDOFF = b"HANDOFF"
_TOKEN_IDS = msgspec.Raw(msgspec.json.encode(list(range(PROMPT_TOKENS))))
_NIXL_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": list(range(32)),
    "remote_engine_id": "mock-prefill",
    "remote_request_id": "mock",
    "remote_host": "127.0.0.1",
    "remote_port": 20_000,
    "tp_size": 1,
}


def _prefill_answer(params: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {
            "id": "chatcmpl-mock",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [
                {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "x"}}
            ],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": 1,
                "total_tokens": PROMPT_TOKENS + 1,
            },
            "kv_transfer_params": params,
        }
    )


def _open(body: _Body) -> Ticket | None:
    """A leg's ticket, its signature not looked at."""
    params = body.kv_transfer_params
    if params is None or params.ticket is None:
        return None
    return _ticket.decode(urlsafe_b64decode(params.ticket.partition(".")[0]))


EVENT = (
    b'data: {"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1,"model":"mock","choices":'
    b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT_CHUNK = _chunk(EVENT)
_LAST_CHUNKS = _chunk(DONE) + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = self._body = self._request_id = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body, self._request_id = url, b"", b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        path, _, query = self._url.partition(b"?")
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            self._leg(_body.decode(self._body))
        elif path == b"/internal/state":
            self._answer(self._mock.state(int(query.partition(b"=")[2])))
        elif path == b"/pace":
            self._mock.pace[0] = float(self._body) / 1e3
            self._answer(b"{}")
        elif path == b"/v1/models":
            self._answer(msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:
            self._answer(b"{}")

    def _leg(self, body: _Body) -> None:
        if not body.stream:
            self._answer(self._mock.prefill(body, self._request_id))
            self._mock.prefilled(body)
            return
        self._write(_STREAM_HEAD + _EVENT_CHUNK)
        self._stream(body, body.tokens - 1)

    def _stream(self, body: _Body, left: int) -> None:
        """The event after the next turn of the loop, or after the pace."""
        if self._transport is None:
            return
        pace = self._mock.pace[0]
        if left == 0:
            self._write(_LAST_CHUNKS)
            self._mock.decoded(body)
        elif pace:
            self._loop.call_later(pace, self._next, body, left)
        else:
            self._loop.call_soon(self._next, body, left)

    def _next(self, body: _Body, left: int) -> None:
        self._write(_EVENT_CHUNK)
        self._stream(body, left - 1)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._write(head + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve() -> None:
    loop, pace, urls = asyncio.get_running_loop(), [0.0], {}
    for role in ("prefill", "decode"):
        mock = Mock(role, pace)
        server = await loop.create_server(lambda mock=mock: _Connection(mock), "127.0.0.1", 0, backlog=1024)
        mock.port = server.sockets[0].getsockname()[1]
        urls[role] = f"http://127.0.0.1:{mock.port}"
    sys.stdout.write(json.dumps(urls) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it ends


if __name__ == "__main__":
    uvloop.run(_serve())
