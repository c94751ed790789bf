"""What the legs to stock vLLM engines are sent, and what their answers say.

`kv_transfer_params` of vLLM's NIXL connectors, by mode:

    pull   prefill leg   do_remote_decode, and empty places for the source
           decode leg    what the prefill leg's answer had there, as it is
           next turn     prefill leg: what the decode leg's answer had there, as it is (bidirectional_kv_xfer)
    push   prefill leg   do_remote_decode
           decode leg    do_remote_prefill, and the prefill engine's id and side channel

A reference names blocks and an address. It says nothing of the tokens that they stand for, so that nobody can
check them: not the router, and not the engine that reads.
"""

from __future__ import annotations

import msgspec

from kvhandoff.router.body import Fields
from kvhandoff.router.dialect import VLLM_ROWS
from kvhandoff.router.legs import ROWS, Rewriting
from kvhandoff.router.upstream_config import UpstreamAddress

PARAMS = "kv_transfer_params"

_rewriting = Rewriting({**ROWS, **VLLM_ROWS})
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Prefill(msgspec.Struct, frozen=True):
    do_remote_decode: bool = True
    do_remote_prefill: bool = False


class _PullPrefill(_Prefill, frozen=True):
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class _PushDecode(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_decode: bool = False
    do_remote_prefill: bool = True
    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_request_id: str = ""
    """Has to be there, and is not used: engines find each other's request by the header X-Request-Id."""


def _raw(value: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


PULL_PREFILL = _raw(_PullPrefill())
PUSH_PREFILL = _raw(_Prefill())


def push_decode(source: UpstreamAddress) -> msgspec.Raw:
    """`kv_transfer_params` of a decode leg whose prompt `source` computes and writes."""
    host, port = source.side_channel
    return _raw(
        _PushDecode(
            remote_engine_id=source.engine_id, remote_host=host, remote_port=port, tp_size=source.tp_size
        )
    )


def prefill_body(client: Fields, params: msgspec.Raw) -> bytes:
    """The prefill leg's body: the prompt, and one token."""
    return msgspec.json.encode({**_rewriting.prefill(client), PARAMS: params})


def decode_body(client: Fields, params: msgspec.Raw | None) -> bytes:
    """The decode leg's body: the client's own; `params` None: it computes the prompt itself."""
    fields = _rewriting.decode(client)
    return msgspec.json.encode(fields if params is None else {**fields, PARAMS: params})


_PROBE_PROMPT = [1, 2, 3, 4]
"""Token ids that every vocabulary has. Several, since some models' prefill engines leave the last one to the
decode engine."""


def probe_body(model: str) -> bytes:
    """A prefill leg that serves no request, with the fields that either connector's takes."""
    fields = {"model": model, "prompt": _PROBE_PROMPT, "max_tokens": 1, "temperature": 0, "stream": False}
    return msgspec.json.encode({**fields, PARAMS: PULL_PREFILL})


def read_reference(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of an engine's answer, unread; None when it has none."""
    try:
        params = _object.decode(answer).get(PARAMS)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return params if params is not None and bytes(params).startswith(b"{") else None


def without_reference(answer: bytes) -> bytes:
    """The same answer for a client, whom the engines' addresses and blocks are no business of."""
    return msgspec.json.encode({**_object.decode(answer), PARAMS: None})
