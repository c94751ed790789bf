from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.vllm import idle
from kvhandoff.vllm.scheduler_half import SchedulerHalf
from tests.vllm_plugin.fake_handoff import (
    FakeHandoff,
    descriptor,
    history_ref,
    new_key,
    offer_ref,
    signed,
)
from tests.vllm_plugin.fake_vllm import BLOCK, FakePool, FakeRequest, FakeScheduler, Status, alone

LAYOUT = KVLayout("fake", "float32", 1, 1, 1, BLOCK, BLOCK)
PROMPT = list(range(10, 20))  # two and a half blocks


@dataclass
class Engine:
    """A scheduler, the half under test, and a handoff side that does what it is told."""

    vllm: FakeScheduler
    half: SchedulerHalf
    handoff: FakeHandoff
    pool: FakePool

    def add(self, prompt: list[int], ticket: str | None = None, **fields: Any) -> FakeRequest:
        params = None if ticket is None else {"ticket": ticket}
        name = f"r{len(self.vllm.requests) + len(self.vllm.ended)}"
        return self.vllm.add(FakeRequest(name, prompt, kv_transfer_params=params, **fields))

    def run(self, request: FakeRequest, steps: int = 60) -> FakeRequest:
        """Until a request has ended."""
        for _ in range(steps):
            if request.status.finished:
                return request
            self.handoff.run()
            self.vllm.step()
        raise AssertionError(f"{request.status}: it does not end")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.handoff.run()
            self.vllm.step()
        self.handoff.run()

    def called(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.handoff.calls if call[0] in names]

    @property
    def load(self) -> Any:
        """The key of the one load under way."""
        self.handoff.run()
        (key,) = self.handoff.transfers
        return key

    def at_rest(self) -> None:
        """Everything is given back, and vLLM has taken it."""
        self.handoff.run()
        self.handoff.give_up()
        self.run(self.add([1, 2], max_tokens=1))
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert self.half.load()["blocks_free"] == self.half.load()["blocks_total"]


def engine(*, blocks: int = 30, reports_failures: bool = True, prefix_caching: bool = True) -> Engine:
    pool = FakePool(blocks)
    half = SchedulerHalf(
        pool, LAYOUT, "model", 1000, reports_failures=reports_failures, prefix_caching=prefix_caching
    )
    handoff = FakeHandoff(half, pool)
    half.connect(handoff)
    vllm = FakeScheduler(half, pool)
    handoff.scheduler = vllm
    return Engine(vllm, half, handoff, pool)


@pytest.fixture
def e() -> Iterator[Engine]:
    made = engine()
    yield made
    made.at_rest()


# ---------------------------------------------------------------------------------- tickets


def test_a_plain_request_is_none_of_its_business(e: Engine) -> None:
    request = e.run(e.add(PROMPT))
    assert request.output_token_ids == alone(PROMPT, 4)
    assert (request.answer, e.handoff.calls, e.handoff.records) == (None, [], [])


@pytest.mark.parametrize(
    "params", [{}, {"do_remote_prefill": True, "remote_block_ids": [1]}, {"ticket": None}]
)
def test_nothing_but_a_ticket_is_obeyed(e: Engine, params: dict[str, Any]) -> None:
    request = e.vllm.add(FakeRequest("r", PROMPT, kv_transfer_params=params))
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert (request.answer, e.handoff.refusals, e.handoff.calls) == (None, 0, [])


@pytest.mark.parametrize("ticket", ["x.y", "", 7, ["a"], {"b": 1}, "A" * 100_000])
def test_a_ticket_that_is_none(e: Engine, ticket: Any) -> None:
    request = e.vllm.add(FakeRequest("r", PROMPT, kv_transfer_params={"ticket": ticket}))
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert (request.answer, e.handoff.refusals, e.handoff.calls) == ({"error": "bad_ticket"}, 1, [])


def test_a_ticket_that_was_used_before(e: Engine) -> None:
    ticket = signed("prefill")
    first = e.run(e.add(PROMPT, ticket, max_tokens=1))
    assert first.answer is not None
    assert "offer" in first.answer
    again = e.run(e.add(PROMPT, ticket, max_tokens=1))
    assert (again.answer, e.handoff.refusals) == ({"error": "bad_ticket"}, 1)


def test_a_ticket_of_another_salt(e: Engine) -> None:
    """vLLM keeps its own cache apart by the body's salt: it has to be the ticket's."""
    request = e.run(e.add(PROMPT, signed("decode", cache_salt="a", offer=descriptor(10)), cache_salt="b"))
    assert (request.answer, e.handoff.refusals, e.handoff.calls) == ({"error": "bad_ticket"}, 1, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True]},
        {"pooling_params": object()},
        {"resumable": True},
    ],
)
def test_prompts_that_are_no_token_ids(e: Engine, fields: dict[str, Any]) -> None:
    request = e.run(e.add(PROMPT, signed("prefill"), max_tokens=1, **fields))
    assert (request.answer, e.handoff.calls) == ({"error": "unsupported_prompt"}, [])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_that_no_chain_can_hold(e: Engine, token: int) -> None:
    request = e.run(e.add([*PROMPT, token], signed("prefill"), max_tokens=1))
    assert request.answer == {"error": "unsupported_prompt"}


# ---------------------------------------------------------------------------------- loads


def test_a_prompt_that_is_loaded(e: Engine) -> None:
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert [len(call) - 2 for call in e.called("load_allocated")] == [3]
    assert e.half.load()["loading"] == 1
    load = e.load
    e.handoff.arrive(load)
    assert e.called("report") == [("report", request.request_id, False, ())]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    e.handoff.run()
    (record,) = e.handoff.records
    assert (record.cached_tokens, record.transferred_tokens, record.computed_tokens) == (0, 9, 1)
    assert (record.prefill_chunks, record.finish_reason, record.completion_tokens) == (1, "length", 4)
    assert record.kv_source == "transferred"


def test_what_the_prefix_cache_has_is_not_loaded(e: Engine) -> None:
    e.run(e.add(PROMPT[:9]))
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    assert (len(transfer.blocks), transfer.cached_blocks) == (3, 2)
    e.handoff.arrive(transfer.key)
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    e.handoff.run()
    assert (e.handoff.records[0].cached_tokens, e.handoff.records[0].transferred_tokens) == (8, 1)


def test_a_load_that_could_bring_nothing_is_skipped(e: Engine) -> None:
    e.run(e.add(PROMPT[:9]))
    request = e.run(e.add(PROMPT[:9], signed("decode", offer=descriptor(9))))
    assert request.output_token_ids == alone(PROMPT[:9], 4)
    e.handoff.run()
    assert e.called("load_skipped", "load_allocated") == [("load_skipped", request.request_id)]
    assert e.handoff.records[0].reasons == [Reason.ALREADY_CACHED]


def test_prompt_logprobs_need_the_prompt_computed(e: Engine) -> None:
    ticket = signed("decode", offer=descriptor(10))
    request = e.run(e.add(PROMPT, ticket, skip_reading_prefix_cache=True))
    assert request.output_token_ids == alone(PROMPT, 4)
    e.handoff.run()
    assert e.handoff.records[0].reasons == [Reason.PROMPT_LOGPROBS]


@pytest.mark.parametrize("tokens", [0, 4, 8])
def test_a_beginning_that_is_loaded(e: Engine, tokens: int) -> None:
    """Field case 2b: what is edited is computed, in the same blocks."""
    prompt = list(range(14))
    request = e.add(prompt, signed("local", history=history_ref(12)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    assert len(transfer.blocks) == 3
    e.handoff.arrive(transfer.key, tokens)
    bad = transfer.blocks[tokens // BLOCK :]
    assert e.called("report") == [("report", request.request_id, False, bad)]
    assert e.run(request).output_token_ids == alone(prompt, 4)
    e.handoff.run()
    assert e.handoff.records[0].transferred_tokens == tokens


def test_a_load_that_fails_is_not_asked_for_again(e: Engine) -> None:
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    load = e.load
    e.handoff.miss(load)
    assert e.called("report") == [("report", request.request_id, True, ())]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert len(e.called("load_allocated")) == 1
    e.handoff.run()
    assert e.handoff.records[0].reasons == [Reason.CLAIM_TIMEOUT]
    assert e.handoff.records[0].kv_source == "recomputed"
    if load in e.handoff.transfers:
        e.handoff.fence(load)


def test_late_bytes_land_in_blocks_that_nobody_has(e: Engine) -> None:
    """Rule 2: until the fence the targets are nobody's, though their request goes on at once."""
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    transfer.in_flight = True
    e.handoff.miss(transfer.key)
    e.steps(2)
    assert not {block.block_id for block in request.blocks} & set(transfer.targets)
    e.handoff.land(transfer.key)
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert all(e.pool.blocks[block].ref_cnt == 1 for block in transfer.targets)
    e.handoff.fence(transfer.key)


def test_a_miss_before_there_are_blocks(e: Engine) -> None:
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.handoff.run()
    (load,) = e.handoff.early
    e.handoff.miss(load)
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert e.called("load_allocated", "load_skipped", "report") == []


def test_a_miss_between_the_match_and_the_allocation(e: Engine) -> None:
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.handoff.run()
    (load,) = e.handoff.early
    assert e.half.matched_tokens(request, 0) == (10, True)
    e.handoff.miss(load)
    request.blocks = e.pool.get_new_blocks(3)
    e.half.allocated(request, [block.block_id for block in request.blocks], 10)
    request.status, request.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 10
    e.handoff.run()
    assert e.called("report") == [("report", request.request_id, True, ())]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)


def test_an_abort_while_loading_is_reported_once(e: Engine) -> None:
    """Field case 18b."""
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    load = e.load
    e.vllm.abort(request)
    assert request.request_id in e.vllm.requests
    e.steps(2)
    assert request.request_id not in e.vllm.requests
    assert e.called("report") == [("report", request.request_id, False, ())]
    if load in e.handoff.transfers:
        e.handoff.land(load)
        e.handoff.fence(load)


def test_an_abort_when_the_report_is_on_its_way(e: Engine) -> None:
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    e.handoff.arrive(e.load)
    e.vllm.abort(request)
    e.steps(2)
    assert len(e.called("report")) == 1
    assert e.called("load_abandoned") == []


def test_kv_that_arrives_when_its_request_has_just_ended(e: Engine) -> None:
    """The handoff side hears of the end after it has said that the KV is in: it gives the blocks back."""
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    load = e.load
    e.vllm.abort(request)
    e.handoff.arrive(load)
    e.steps(2)
    assert len(e.called("report")) == 1
    assert e.called("load_abandoned") == [("load_abandoned", request.request_id)]


def test_a_leg_that_yields_waits_for_nothing(e: Engine) -> None:
    """Its client has the answer of another engine; until its connection closes it runs on its own."""
    request = e.add(PROMPT, signed("decode", push_from=offer_ref()))
    e.steps(1)
    load = e.load
    e.handoff.yields(load)
    assert e.called("report") == [("report", request.request_id, True, ())]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    if load in e.handoff.transfers:
        e.handoff.fence(load)


def test_sequences_of_one_body_load_once(e: Engine) -> None:
    """n = 3: the others wait for the first one, and find its prompt in the cache."""
    ticket = signed("decode", offer=descriptor(10))
    requests = [e.add(PROMPT, ticket) for _ in range(3)]
    e.steps(3)
    assert [request.status.name for request in requests[1:]] == ["WAITING", "WAITING"]
    e.handoff.arrive(e.load)
    for request in requests:
        assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert (len(e.called("load_allocated")), e.handoff.refusals) == (1, 0)


def test_sequences_wait_for_no_cache_where_there_is_none() -> None:
    e = engine(prefix_caching=False)
    ticket = signed("decode", offer=descriptor(10))
    first, second = [e.add(PROMPT, ticket) for _ in range(2)]
    assert e.run(second).output_token_ids == alone(PROMPT, 4)
    assert first.status is Status.WAITING_FOR_REMOTE_KVS
    e.handoff.arrive(e.load)
    e.run(first)
    e.at_rest()


def test_sequences_whose_first_is_aborted(e: Engine) -> None:
    ticket = signed("decode", offer=descriptor(10))
    requests = [e.add(PROMPT, ticket) for _ in range(2)]
    e.steps(2)
    load = e.load
    e.vllm.abort(requests[0])
    assert e.run(requests[1]).output_token_ids == alone(PROMPT, 4)
    e.handoff.run()
    if load in e.handoff.transfers:
        e.handoff.fence(load)


# ----------------------------------------------------------------- a vLLM that hears of bad blocks only


def test_without_failed_recving_all_blocks_are_bad() -> None:
    e = engine(reports_failures=False)
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    transfer.in_flight = True
    e.handoff.miss(transfer.key)
    assert e.called("report") == [("report", request.request_id, False, transfer.targets)]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    e.handoff.fence(transfer.key)
    e.at_rest()


def test_blocks_that_are_computed_in_place_are_fenced_before() -> None:
    """With a beginning in its cache that vLLM would compute the rest in the targets themselves."""
    e = engine(reports_failures=False)
    e.run(e.add(PROMPT[:5]))
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    assert transfer.cached_blocks == 1
    transfer.in_flight = True
    e.handoff.miss(transfer.key)
    e.handoff.miss(transfer.key)
    e.steps(3)
    assert e.called("report") == []
    e.handoff.land(transfer.key)
    e.handoff.fence(transfer.key)
    assert e.called("report") == [("report", request.request_id, False, transfer.targets)]
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    e.at_rest()


def test_an_abort_while_a_fence_is_awaited() -> None:
    e = engine(reports_failures=False)
    e.run(e.add(PROMPT[:5]))
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.steps(1)
    transfer = e.handoff.transfers[e.load]
    transfer.in_flight = True
    e.handoff.miss(transfer.key)
    e.vllm.abort(request)
    e.steps(2)
    assert e.called("report") == [("report", request.request_id, False, ())]
    e.handoff.fence(transfer.key)
    assert len(e.called("report")) == 1
    e.at_rest()


# ---------------------------------------------------------------------------------- offers and turns


def test_a_prompt_that_is_offered(e: Engine) -> None:
    key = new_key()
    request = e.run(e.add(PROMPT, signed("prefill", key=key), max_tokens=1))
    assert request.answer is not None
    offer = request.answer["offer"]
    chain = TokenChain.of(chain_root("model", LAYOUT.fingerprint(), "0:"), BLOCK, PROMPT)
    assert request.answer["prompt_token_ids"] == PROMPT
    assert offer["key"] == {"handoff_id": key.handoff_id, "attempt": 0}
    assert (offer["n_tokens"], offer["digest"]) == (10, chain.digest())
    assert offer["first_token"] == request.output_token_ids[0]
    ((_, _, *blocks),) = e.called("offered")
    assert len(blocks) == 3
    assert [e.pool.blocks[block].ref_cnt for block in blocks] == [1, 1, 1]
    e.handoff.run()
    (record,) = e.handoff.records
    assert (record.leg, record.computed_tokens, record.prefill_chunks, record.blocks) == ("prefill", 10, 2, 3)
    assert set(record.phases) == {"prefill_queue", "prefill_compute", "prefill_offer"}


def test_an_offer_grows_with_each_step_that_has_come_back(e: Engine) -> None:
    request = e.add(list(range(22)), signed("prefill", push=True), max_tokens=1)
    grown = []
    while not request.status.finished:
        e.steps(1)
        grown.append(len(e.called("offer_grown")))
    assert grown == [1, 2, 2]
    assert [len(call) - 2 for call in e.called("offer_grown")] == [2, 2]
    assert [len(call) - 2 for call in e.called("offered")] == [2]
    assert request.answer is not None
    blocks = [block for call in e.called("offer_grown", "offered") for block in call[2:]]
    assert sum(count for _, count in request.answer["offer"]["spans"]) == len(blocks) == 6


def test_what_is_there_already_is_handed_over_at_once(e: Engine) -> None:
    """A cached beginning of a pushed prompt need not wait for the first step."""
    prompt = list(range(22))
    e.run(e.add(prompt[:13]))
    request = e.add(prompt, signed("prefill", push=True), max_tokens=1)
    e.vllm._schedule()
    assert [len(call) - 2 for call in e.called("offer_grown")] == [3]
    e.vllm.abort(request)


def test_a_history_is_pushed_on_as_soon_as_it_is_loaded(e: Engine) -> None:
    prompt = list(range(22))
    request = e.add(prompt, signed("prefill", push=True, history=history_ref(16)), max_tokens=1)
    e.steps(1)
    e.handoff.arrive(e.load)
    e.vllm.step()
    e.vllm._schedule()
    assert [len(call) - 2 for call in e.called("offer_grown")] == [4]
    e.vllm.abort(request)


def test_a_prompt_that_is_aborted_is_not_offered(e: Engine) -> None:
    request = e.add(list(range(22)), signed("prefill", push=True), max_tokens=1)
    e.steps(1)
    e.vllm.abort(request)
    assert [call[0] for call in e.called("offer_grown", "offered", "offer_abandoned")] == [
        "offer_grown",
        "offer_abandoned",
    ]


@pytest.mark.parametrize("ends", ["length", "abort"])
def test_a_turn_that_is_kept(e: Engine, ends: str) -> None:
    """A stop string ends as an abort: then as well."""
    request = e.add(PROMPT, signed("local", retain="renewable"), max_tokens=8 if ends == "length" else 100)
    while len(request.output_token_ids) < 8:
        e.steps(1)
    e.vllm.abort(request)
    ((_, _, *blocks),) = e.called("retained")
    tokens = [*PROMPT, *alone(PROMPT, 8)][:-1]  # the last one was sampled, and never computed
    assert len(blocks) == len(tokens) // BLOCK
    e.handoff.run()
    (record,) = e.handoff.records
    assert (record.retained_tokens, record.finish_reason) == (16, ends)


def test_the_chain_of_a_turn_goes_on_from_its_prompt(e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[bytes]] = []
    monkeypatch.setattr(e.handoff, "retained", lambda _id, hashes, _blocks: heard.append(list(hashes)))
    request = e.run(
        e.add(PROMPT[:3], signed("local", retain="renewable", cache_salt="s"), cache_salt="s", max_tokens=8)
    )
    root = chain_root("model", LAYOUT.fingerprint(), "0:s")
    tokens = [*PROMPT[:3], *request.output_token_ids][:-1]
    assert heard == [list(TokenChain.of(root, BLOCK, tokens).blocks)]
    blocks = [block for block, _ in zip(e.half._references._held, heard[0], strict=True)]
    e.half.release_blocks(blocks)


def test_preemption_ends_a_growing_offer_and_nothing_else() -> None:
    e = engine(blocks=7)
    first = e.add(list(range(8)), max_tokens=12)
    second = e.add(list(range(100, 110)), signed("prefill", push=True), max_tokens=6)
    e.run(first)
    e.run(second)
    assert second.num_preemptions > 0
    assert second.output_token_ids == alone(list(range(100, 110)), 6)
    assert len(e.called("offer_abandoned")) == 1
    assert e.called("offered") == []
    assert second.answer == {"offer": None, "prompt_token_ids": list(range(100, 110))}
    e.at_rest()


# ---------------------------------------------------------------------------------- identity


def test_adapters_and_images_have_chains_of_their_own(e: Engine) -> None:
    """Equal tokens stand for other KV there."""

    def feature(identifier: str, offset: int = 1) -> Any:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=3))

    def digest(**fields: Any) -> str:
        request = e.run(
            e.add(PROMPT, signed("prefill", cache_salt=fields.get("cache_salt", "")), max_tokens=1, **fields)
        )
        assert request.answer is not None
        found: str = request.answer["offer"]["digest"]
        return found

    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"lora_request": SimpleNamespace(lora_name="l", lora_path="/l")},
        {"lora_request": SimpleNamespace(lora_name="m", lora_path="/l")},
        {"lora_request": SimpleNamespace(lora_name="l", lora_path="/m")},
        {"mm_features": [feature("cat")]},
        {"mm_features": [feature("dog")]},
        {"mm_features": [feature("cat", 2)]},
        {"mm_features": [feature("cat"), feature("dog")]},
    ]
    digests = [digest(**fields) for fields in variants]
    assert len(set(digests)) == len(variants)
    assert digest(mm_features=[feature("cat")]) == digests[5]


@pytest.mark.parametrize("reports_failures", [True, False])
@pytest.mark.parametrize("given_up", ["yields", "withdraw", "miss"])
def test_a_load_given_up_between_the_match_and_the_allocation(
    given_up: str, reports_failures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then waits for a report of blocks that were not there when the load ended."""
    e = engine(reports_failures=reports_failures)
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.handoff.run()
    (key,) = e.handoff.early

    def meanwhile() -> None:
        monkeypatch.undo()
        getattr(e.handoff, given_up)(key)

    matched = e.half.matched_tokens

    def raced(asking: Any, local_tokens: int) -> tuple[int | None, bool]:
        answer = matched(asking, local_tokens)
        meanwhile()
        return answer

    monkeypatch.setattr(e.half, "matched_tokens", raced)
    assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert len(e.called("report")) == 1
    e.at_rest()


def test_a_handoff_side_that_has_ended() -> None:
    e = engine()
    e.handoff.has_ended = True
    ticket = signed("decode", offer=descriptor(10), retain="renewable")
    requests = [e.add(PROMPT, ticket) for _ in range(2)]
    for request in requests:
        assert e.run(request).output_token_ids == alone(PROMPT, 4)
    assert requests[0].answer == {"error": "handoff_ended"}
    assert (e.handoff.refusals, e.handoff.calls) == (2, [])
    e.at_rest()


# ---------------------------------------------------------------------------------- memory


def test_kept_turns_make_room_for_a_waiting_request() -> None:
    e = engine(blocks=10)
    e.run(e.add(list(range(20)), signed("local", retain="renewable"), max_tokens=8))
    request = e.add(list(range(100, 125)), max_tokens=1)
    assert e.run(request).output_token_ids == alone(list(range(100, 125)), 1)
    assert e.called("memory_short")
    e.at_rest()


def test_kept_turns_make_room_for_the_rest_of_a_history() -> None:
    """vLLM doesn't look anew at a request that has a beginning: nothing else would notice that it waits."""
    e = engine(blocks=7)
    prompt = list(range(22))
    request = e.add(prompt, signed("local", history=history_ref(4)), max_tokens=1)
    e.steps(1)
    e.run(e.add(list(range(50, 70)), signed("local", retain="renewable"), max_tokens=5))
    assert e.pool.get_num_free_blocks() == 0
    e.handoff.arrive(e.load)
    assert e.run(request).output_token_ids == alone(prompt, 1)
    assert e.called("memory_short")
    e.at_rest()


def test_a_load_that_ends_on_an_idle_engine_with_room_leaves_kept_turns_alone() -> None:
    """Between the load's end and vLLM's taking the report the request waits, and nothing runs."""
    e = engine(blocks=100)
    e.run(e.add(list(range(20)), signed("local", retain="renewable"), max_tokens=8))
    e.handoff.run()
    for start, ticket in (
        (100, signed("decode", offer=descriptor(10))),
        (200, signed("local", history=history_ref(8))),
        (300, signed("decode", push_from=offer_ref())),
    ):
        request = e.add(list(range(start, start + 10)), ticket, max_tokens=2)
        e.steps(1)
        e.handoff.arrive(e.load)
        e.run(request)
    assert (len(e.handoff.lent), e.called("memory_short")) == (1, [])
    e.at_rest()


def test_a_request_that_vllm_refuses_for_its_own_cached_beginning_gets_room() -> None:
    """What it finds in the prefix cache is counted among the free blocks, and is not free for it."""
    e = engine(blocks=10)
    prompt = list(range(100, 122))
    e.run(e.add(prompt[:16], max_tokens=1))
    e.run(e.add(list(range(18)), signed("local", retain="renewable"), max_tokens=3))
    e.handoff.run()
    assert e.pool.get_num_free_blocks() == 5  # four of them the prompt's beginning: it takes six
    assert e.run(e.add(prompt, max_tokens=1)).output_token_ids == alone(prompt, 1)
    assert e.called("memory_short")
    e.at_rest()


def test_a_prompt_that_waits_for_what_is_under_plain_offers_is_told_of_at_each_step() -> None:
    """Only the handoff side knows whether anybody comes for them."""
    e = engine(blocks=6)
    e.run(e.add(list(range(20)), signed("prefill"), max_tokens=1))
    e.handoff.run()
    offered = sum(len(lent.blocks) for lent in e.handoff.lent.values())
    assert e.pool.get_num_free_blocks() == e.pool.num_gpu_blocks - 1 - offered  # the first one is nobody's
    prompt = list(range(100, 112))
    request = e.add(prompt, max_tokens=1)
    for _ in range(4):
        before = len(e.called("memory_short"))
        e.vllm.step()
        assert len(e.called("memory_short")) == before + 1
        e.handoff.tasks.clear()  # they are not given up
    assert e.handoff.lent
    e.handoff.give_up()
    assert e.run(request).output_token_ids == alone(prompt, 1)
    e.at_rest()


def test_kept_turns_are_given_up_before_a_request_is_preempted() -> None:
    e = engine(blocks=10)
    e.run(e.add(list(range(12)), signed("local", retain="renewable"), max_tokens=5))
    requests = [e.add([i, i + 1, i + 2], max_tokens=14) for i in (30, 60)]
    for request in requests:
        assert e.run(request, 100).output_token_ids == alone(request.prompt_token_ids, 14)
    assert [request.num_preemptions for request in requests] == [0, 0]
    e.at_rest()


def test_nobody_goes_without_for_ever(e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that don't come back: an offer under its lease."""
    e.run(e.add(PROMPT, signed("prefill"), max_tokens=1))
    monkeypatch.setattr(e.handoff, "give_up", lambda: None)
    answers = []
    for _ in range(6):
        answers.append(e.half.frees_are_coming())
        e.vllm.step()
    assert answers == [True, True, True, False, False, False]
    e.vllm.step()
    assert e.half.frees_are_coming()
    monkeypatch.undo()


def test_nothing_is_asked_for_when_nothing_is_kept() -> None:
    e = engine(blocks=6)
    requests = [e.add([i, i + 1, i + 2], max_tokens=14) for i in (30, 60)]
    for request in requests:
        e.run(request, 100)
    assert sum(request.num_preemptions for request in requests) > 0
    assert e.called("memory_short") == []
    e.at_rest()


def test_a_reset_gives_up_what_is_kept(e: Engine) -> None:
    e.run(e.add(list(range(12)), signed("local", retain="renewable"), max_tokens=5))
    e.handoff.run()
    assert e.handoff.lent
    e.half.reset()
    e.handoff.run()
    assert not e.handoff.lent


# ---------------------------------------------------------------------------------- threads


def test_a_step_without_work_waits_for_news(e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not spin while a load is under way, and goes on at once when that ends."""
    monkeypatch.setattr(idle, "FIRST_WAIT_S", 60.0)
    request = e.add(PROMPT, signed("decode", offer=descriptor(10)))
    e.handoff.run()
    allocated = threading.Event()
    monkeypatch.setattr(e.handoff, "load_allocated", _then(e.handoff.load_allocated, allocated))

    def arrive() -> None:
        assert allocated.wait(30)
        e.handoff.arrive(e.load)

    thread = threading.Thread(target=arrive)
    thread.start()
    e.vllm.step()
    thread.join(30)
    assert e.run(request).output_token_ids == alone(PROMPT, 4)


def _then(call: Any, event: threading.Event) -> Any:
    def both(*arguments: Any) -> None:
        call(*arguments)
        event.set()

    return both
