"""The rewriting table: a test per row (field cases 31, 32)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvhandoff.core.errors import RequestError
from kvhandoff.router.answers import TicketParams
from kvhandoff.router.body import parse_body
from kvhandoff.router.legs import RESPONSES_ROWS, ROWS, Rewriting, Rows, leg_body, leg_headers

ABSENT = object()

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

WANTED: list[tuple[str, Any, Any, Any]] = [
    # field, the client's, the prefill leg's, the decode leg's
    ("max_tokens", 500, 1, 500),
    ("max_completion_tokens", 500, ABSENT, 500),
    ("max_output_tokens", 500, ABSENT, 500),
    ("min_tokens", 5, 1, 5),
    ("n", 4, ABSENT, 4),
    ("best_of", 4, ABSENT, 4),
    ("use_beam_search", True, ABSENT, True),
    ("stop", ["\n"], ABSENT, ["\n"]),
    ("stop_token_ids", [7], ABSENT, [7]),
    ("include_stop_str_in_output", True, ABSENT, True),
    ("ignore_eos", True, True, True),
    ("logprobs", 5, ABSENT, 5),
    ("top_logprobs", 5, ABSENT, 5),
    ("return_token_ids", True, ABSENT, True),
    ("return_tokens_as_token_ids", True, ABSENT, True),
    ("prompt_logprobs", 1, ABSENT, 1),
    ("echo", True, ABSENT, True),
    ("stream", True, False, True),
    ("stream_options", {"include_usage": True}, ABSENT, {"include_usage": True}),
    ("temperature", 0.7, 0.7, 0.7),
    ("top_p", 0.9, 0.9, 0.9),
    ("top_k", 40, 40, 40),
    ("min_p", 0.1, 0.1, 0.1),
    ("seed", 1234, 1234, 1234),
    ("presence_penalty", 0.5, 0.5, 0.5),
    ("frequency_penalty", 0.5, 0.5, 0.5),
    ("repetition_penalty", 1.1, 1.1, 1.1),
    ("logit_bias", {"5": 1.0}, {"5": 1.0}, {"5": 1.0}),
    ("tools", [{"type": "function"}], [{"type": "function"}], [{"type": "function"}]),
    ("tool_choice", "required", "required", "required"),
    ("parallel_tool_calls", False, False, False),
    ("response_format", {"type": "json_object"}, ABSENT, {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}, ABSENT, {"regex": "a"}),
    ("guided_json", {"type": "object"}, ABSENT, {"type": "object"}),
    ("guided_regex", "a+", ABSENT, "a+"),
    ("guided_choice", ["a"], ABSENT, ["a"]),
    ("guided_grammar", "g", ABSENT, "g"),
    ("cache_salt", "tenant", "tenant", "tenant"),
    ("conversation_id", "mine", ABSENT, ABSENT),
    ("prompt_cache_key", "mine", ABSENT, ABSENT),
    ("request_id", "mine", ABSENT, ABSENT),
    ("kv_transfer_params", {"remote_host": "169.254.169.254"}, ABSENT, ABSENT),
    ("ec_transfer_params", {"remote_host": "169.254.169.254"}, ABSENT, ABSENT),
    ("logprob_token_ids", [5], ABSENT, [5]),
    ("return_token_offsets", True, ABSENT, True),
    ("return_prompt_text", True, ABSENT, True),
    ("vllm_xargs", {"kv_transfer_params": "x", "ec_transfer_params": [1], "a": 1}, {"a": 1}, {"a": 1}),
    # no row: kept
    ("messages", [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}], None),
    ("prompt", "hi", "hi", "hi"),
    ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}, None),
    ("add_generation_prompt", False, False, False),
    ("user", "u", "u", "u"),
]


OF_RESPONSES: list[tuple[str, Any, Any, Any]] = [
    ("max_output_tokens", 500, 1, 500),
    ("max_tokens", 500, 500, 500),  # unknown there
    ("store", True, False, False),
    ("include", ["message.output_text.logprobs"], ABSENT, ["message.output_text.logprobs"]),
    ("text", {"format": {"type": "json_object"}}, ABSENT, {"format": {"type": "json_object"}}),
    ("input", "hi", "hi", "hi"),
    ("instructions", "be kind", "be kind", "be kind"),
    ("reasoning", {"effort": "low"}, {"effort": "low"}, {"effort": "low"}),
]


def rewritten(rows: Rows = ROWS, **client: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    fields, table = parse_body(msgspec.json.encode(client)), Rewriting(rows)
    legs = table.prefill(fields), table.decode(fields)
    prefill, decode = (msgspec.json.decode(leg_body(leg, None)) for leg in legs)
    return prefill, decode


def test_every_row_has_a_test() -> None:
    assert set(ROWS) <= {name for name, *_ in WANTED}
    changed = {name for name, row in RESPONSES_ROWS.items() if ROWS.get(name) != row}
    assert changed <= {name for name, *_ in OF_RESPONSES}


@pytest.mark.parametrize(("name", "client", "prefill", "decode"), OF_RESPONSES)
def test_row_of_responses(name: str, client: Any, prefill: Any, decode: Any) -> None:
    p, d = rewritten(RESPONSES_ROWS, **{name: client})
    assert p.get(name, ABSENT) == prefill
    assert d.get(name, ABSENT) == decode


def test_a_response_s_prefill_leg_makes_one_token() -> None:
    p, d = rewritten(RESPONSES_ROWS, input="hi", stream=True)
    assert p == {"input": "hi", "max_output_tokens": 1, "stream": False, "store": False}
    assert d == {"input": "hi", "stream": True, "store": False}


@pytest.mark.parametrize(("name", "client", "prefill", "decode"), WANTED, ids=[row[0] for row in WANTED])
def test_row(name: str, client: Any, prefill: Any, decode: Any) -> None:
    p, d = rewritten(**{name: client})
    assert p.get(name, ABSENT) == prefill
    assert d.get(name, ABSENT) == (client if decode is None else decode)


def test_parameters_are_found_under_any_spelling() -> None:
    """Field case 60: what vLLM merges with `kv_transfer_params` is read as JSON, not as bytes."""
    spelt = b'{"vllm_xargs":{"kv_transfer_param\\u0073":"x","b":[1,{"kv_transfer_params":2}]}}'
    left = Rewriting(ROWS).decode(parse_body(spelt))["vllm_xargs"]
    assert msgspec.json.decode(left) == {"b": [1, {"kv_transfer_params": 2}]}
    for other in (b"5", b"[]", b'"kv_transfer_params"', b"null", b"{}"):
        fields = parse_body(b'{"vllm_xargs":' + other + b"}")
        assert bytes(Rewriting(ROWS).decode(fields)["vllm_xargs"]) == other
    with pytest.raises(RequestError, match="vllm_xargs"):
        Rewriting(ROWS).decode(parse_body(b'{"vllm_xargs":{"\xff":1,"kv_transfer_params":"x"}}'))


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_tokens": 500},
        {"max_completion_tokens": 500},
        {"max_tokens": 500, "max_completion_tokens": 400},
        {"max_output_tokens": 500},
        {"max_tokens": None},
        {"max_tokens": 100, "min_tokens": 5},
        {"max_tokens": 100, "n": 3, "best_of": 3, "ignore_eos": True},
    ],
)
def test_prefill_makes_one_token_in_all(limits: dict[str, Any]) -> None:
    p, d = rewritten(**limits)
    assert p["max_tokens"] == 1
    assert p["stream"] is False
    assert not {"max_completion_tokens", "max_output_tokens", "n", "best_of"} & set(p)
    assert p.get("min_tokens", 0) <= 1
    assert d == limits  # the client's own limit holds there


@pytest.mark.parametrize(("client", "prefill"), [(0, 0), (1, 1), (2, 1), (-3, -3), ("x", "x"), (1.5, 1.5)])
def test_min_tokens_is_capped_only_if_it_is_a_number(client: Any, prefill: Any) -> None:
    """What is wrong stays wrong, so that the prefill engine refuses it."""
    assert rewritten(min_tokens=client)[0]["min_tokens"] == prefill


def test_the_client_s_fields_are_not_changed() -> None:
    fields = parse_body(b'{"max_tokens":5,"kv_transfer_params":{}}')
    before = dict(fields)
    Rewriting(ROWS).prefill(fields)
    assert fields == before


def test_params_take_the_client_s_place() -> None:
    params = TicketParams("payload.signature", msgspec.Raw(b"[1,2]"))
    body = leg_body(Rewriting(ROWS).decode(parse_body(b'{"kv_transfer_params":{"a":1},"n":2}')), params)
    assert body == b'{"n":2,"kv_transfer_params":{"ticket":"payload.signature","prompt_token_ids":[1,2]}}'
    body = leg_body({}, TicketParams("payload.signature"))
    assert body == b'{"kv_transfer_params":{"ticket":"payload.signature"}}'


def test_headers() -> None:
    client = {
        "traceparent": f"00-{TRACE}-{PARENT}-01",
        "Authorization": "s",
        "X-Request-Id": "mine",
        "x-prefiller-host-port": "h",
    }
    assert leg_headers(client, "id") == {
        "traceparent": f"00-{TRACE}-{PARENT}-01",
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "X-Request-Id": "id",
    }


@pytest.mark.parametrize(
    ("client", "sent"),
    [
        ({"traceparent": f"00-{TRACE}-{PARENT}-01"}, ["traceparent"]),
        ({"traceparent": f"cc-{TRACE}-{PARENT}-00", "tracestate": "a=b"}, ["traceparent", "tracestate"]),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a" * 512}, ["traceparent", "tracestate"]),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a" * 513}, ["traceparent"]),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=\xff"}, ["traceparent"]),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": ""}, ["traceparent"]),
        ({"tracestate": "a=b"}, []),
        ({"traceparent": "0" * 9000, "tracestate": "a=b"}, []),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01\n"}, []),
        ({"traceparent": f"ff-{TRACE}-{PARENT}-01"}, []),
        ({"traceparent": f"00-{TRACE.upper()}-{PARENT}-01"}, []),
        ({"traceparent": f"00-{'0' * 32}-{PARENT}-01"}, []),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, []),
        ({"traceparent": f"00-{TRACE}-{PARENT}-01-more"}, []),
    ],
)
def test_a_trace_that_engines_could_not_read_is_none(client: dict[str, str], sent: list[str]) -> None:
    headers = leg_headers(client, "id")
    assert {name: headers[name] for name in headers if name.startswith("trace")} == {
        name: client[name] for name in sent
    }
