"""The engine core, stepped by hand on a fake model: outputs, the contract with the hooks, leaks, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep
from kvhandoff.embedded.core import EngineFault
from tests.embedded.fakes import EOS, VOCAB, Bench, fake_logits, greedy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- outputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
def test_greedy_tokens_are_the_models(length: int):
    bench = Bench(max_step_tokens=6)
    client = bench.submit("a", prompt_of(length), 12, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt_of(length), 12, eos=None)
    assert [output.finish_reason for output in client.outputs] == [None] * 11 + ["length"]
    bench.assert_baseline()


def test_requests_in_a_batch_get_the_same_as_alone():
    bench = Bench(max_step_tokens=8, max_num_seqs=3)
    clients = {seed: bench.submit(f"r{seed}", prompt_of(5 + seed, seed), 10) for seed in range(8)}
    bench.run()
    for seed, client in clients.items():
        assert client.tokens == greedy(prompt_of(5 + seed, seed), 10)
    assert max(len(step) for step in bench.runner.steps) == 3
    bench.assert_baseline()


def prompt_ending_in_eos_after(count: int) -> list[int]:
    for seed in range(10_000):
        answer = greedy(prompt_of(7, seed), count)
        if len(answer) == count and answer[-1] == EOS and EOS not in answer[:-1]:
            return prompt_of(7, seed)
    raise AssertionError("no such prompt")


def test_eos_ends_the_answer_and_is_reported():
    bench = Bench()
    client = bench.submit("a", prompt_ending_in_eos_after(3), 10)
    ignoring = bench.submit("b", prompt_ending_in_eos_after(3), 10, ignore_eos=True)
    bench.run()
    assert len(client.tokens) == 3
    last = client.outputs[-1]
    assert (last.token_id, last.finish_reason, last.stop_token) == (EOS, "stop", EOS)
    assert len(ignoring.tokens) == 10
    assert ignoring.tokens[:3] == client.tokens
    assert ignoring.outputs[-1].stop_token is None


def test_stop_tokens_end_the_answer_also_at_the_last_one():
    answer = greedy(PROMPT, 6, eos=None)
    bench = Bench()
    client = bench.submit("a", PROMPT, 6, ignore_eos=True, stop_token_ids=(answer[5], answer[2]))
    at_limit = bench.submit("b", PROMPT, 3, ignore_eos=True, stop_token_ids=(answer[2],))
    bench.run()
    for one in (client, at_limit):
        assert one.tokens == answer[:3]
        assert (one.outputs[-1].finish_reason, one.outputs[-1].stop_token) == ("stop", answer[2])


def test_min_tokens_puts_the_end_off():
    prompt = prompt_ending_in_eos_after(2)
    bench = Bench()
    client = bench.submit("a", prompt, 9, min_tokens=7)
    bench.run()
    expected = list(prompt)
    for _ in range(7):
        logits = fake_logits(expected)
        logits[EOS] = -math.inf
        expected.append(int(logits.argmax()))
    assert client.tokens[:7] == expected[7:]
    assert len(client.tokens) >= 7


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 5, "temperature": 2.0}])
def test_seeded_tokens_are_the_same_alone_batched_and_after_preemption(params: dict[str, float]):
    def answers(bench: Bench, names: Sequence[int]) -> list[list[int]]:
        sampled = {"temperature": 1.0, "ignore_eos": True, **params}
        clients = [bench.submit(f"r{n}", prompt_of(9, n), 14, seed=n, **sampled) for n in names]
        bench.run()
        bench.assert_baseline()
        return [client.tokens for client in clients]

    alone = [answers(Bench(), [name])[0] for name in range(5)]
    assert answers(Bench(), range(5)) == alone
    crowded = Bench(num_blocks=10)
    assert answers(crowded, range(5)) == alone
    assert sum(request.stats.preemptions for request in crowded.requests.values()) > 0
    assert alone[0] != greedy(prompt_of(9, 0), 14, eos=None)


def test_logprobs_come_with_each_token():
    bench = Bench()
    client = bench.submit("a", PROMPT, 3, ignore_eos=True, logprobs=2)
    bench.run()
    context = list(PROMPT)
    for output in client.outputs:
        expected = fake_logits(context).log_softmax(-1)
        assert output.logprob is not None
        assert (output.logprob.token_id, output.logprob.rank) == (output.token_id, 1)
        assert output.logprob.logprob == pytest.approx(float(expected.max()))
        assert [token for token, _ in output.logprob.top] == expected.topk(2).indices.tolist()
        context.append(output.token_id)


@pytest.mark.parametrize("budget", [3, 4, 512])
def test_prompt_logprobs_come_with_the_first_token_whatever_the_chunks_and_the_cache(budget: int):
    bench = Bench(max_step_tokens=budget)
    bench.submit("before", PROMPT, 1)
    bench.run()
    client = bench.submit("a", PROMPT, 3, ignore_eos=True, prompt_logprobs=1)
    bench.run()
    found = client.outputs[0].prompt_logprobs
    assert found is not None
    assert len(found) == len(PROMPT)
    assert found[0] is None
    for position in range(1, len(PROMPT)):
        one = found[position]
        expected = fake_logits(PROMPT[:position]).log_softmax(-1)
        assert one is not None
        assert one.token_id == PROMPT[position]
        assert one.logprob == pytest.approx(float(expected[PROMPT[position]]))
        assert one.rank == int((expected >= expected[PROMPT[position]]).sum())
    assert [output.prompt_logprobs for output in client.outputs[1:]] == [None, None]
    assert bench.requests["a"].stats.cached_tokens == 0


def test_a_preempted_decode_continues_where_it_was():
    # Field case 41: the pool is full in the middle of the answer.
    bench = Bench(num_blocks=8)
    older = bench.submit("a", prompt_of(8, 1), 24, ignore_eos=True)
    younger = bench.submit("b", prompt_of(8, 2), 24, ignore_eos=True)
    bench.run()
    assert bench.requests["b"].stats.preemptions == 1
    assert bench.requests["a"].stats.preemptions == 0
    assert older.tokens == greedy(prompt_of(8, 1), 24, eos=None)
    assert younger.tokens == greedy(prompt_of(8, 2), 24, eos=None)
    assert bench.requests["b"].stats.computed_tokens == 8  # of its prompt, up to the first token
    bench.assert_baseline()


# -- prefix cache ----------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_taken_from_the_cache_within_one_salt_only():
    bench = Bench()
    cached = {}
    for name, salt in [("a", ""), ("b", ""), ("c", "red"), ("d", "red"), ("e", "blue"), ("f", "")]:
        client = bench.submit(name, PROMPT, 3, salt=salt)
        bench.run()
        assert client.tokens == greedy(PROMPT, 3)
        cached[name] = bench.requests[name].stats.cached_tokens
    assert cached == {"a": 0, "b": 8, "c": 0, "d": 8, "e": 0, "f": 8}


def test_the_next_turn_finds_the_answer_of_the_last_one():
    bench = Bench()
    first = bench.submit("a", PROMPT, 8, ignore_eos=True)
    bench.run()
    history = [*PROMPT, *first.tokens]
    second = bench.submit("b", [*history, 7, 7], 4)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 16  # 18 tokens, the last one without KV
    assert second.tokens == greedy([*history, 7, 7], 4)


def test_blocks_filled_by_the_answer_belong_to_the_salt_too():
    bench = Bench()
    first = bench.submit("a", PROMPT[:2], 9, salt="red", ignore_eos=True)
    bench.run()
    history = [*PROMPT[:2], *first.tokens]
    for name, salt, cached in [("b", "", 0), ("c", "red", 8)]:
        bench.submit(name, history, 1, salt=salt)
        bench.run()
        assert bench.requests[name].stats.cached_tokens == cached


def test_the_prefix_cache_can_be_switched_off():
    bench = Bench(prefix_cache=False)
    for name in "ab":
        client = bench.submit(name, PROMPT, 3)
        bench.run()
        assert client.tokens == greedy(PROMPT, 3)
        assert bench.requests[name].stats.computed_tokens == len(PROMPT)
    assert bench.core.load()["blocks_free"] == 64


def test_chain_is_rooted_in_model_layout_and_salt():
    bench = Bench()
    root = chain_root("fake", bench.runner.layout.fingerprint(), "red")
    assert bench.core.chain(PROMPT, "red") == TokenChain.of(root, 4, PROMPT)
    assert bench.core.chain(PROMPT, "") != bench.core.chain(PROMPT, "red")


# -- stats -----------------------------------------------------------------------------------------------


def test_stats_tell_where_the_time_and_the_tokens_went():
    bench = Bench(max_step_tokens=4)
    bench.runner.before = lambda steps: bench.clock.advance(1.0)
    bench.clock.advance(10.0)
    bench.submit("a", PROMPT, 2)
    bench.clock.advance(5.0)
    bench.run()
    stats = bench.requests["a"].stats
    assert (stats.admitted_at, stats.runnable_at, stats.prefilled_at) == (15.0, 15.0, 18.0)
    assert (stats.prompt_tokens, stats.computed_tokens, stats.prefill_chunks) == (10, 10, 3)
    assert (stats.cached_tokens, stats.transferred_tokens, stats.preemptions) == (0, 0, 0)


def test_stats_are_complete_when_the_first_token_is_given_out():
    bench = Bench()
    seen = []
    client = bench.submit("a", PROMPT, 2)
    request = bench.requests["a"]
    request.on_output = lambda output: seen.append(replace(request.stats)) or client(output)
    bench.clock.advance(3.0)
    bench.run()
    assert seen[0] == request.stats
    assert (seen[0].prefilled_at, seen[0].computed_tokens) == (3.0, 10)


# -- loads and offers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 30])
def test_a_loaded_prompt_computes_its_last_token_only(length: int):
    bench = Bench()
    prompt = prompt_of(length)
    client = bench.submit("a", prompt, 6, load=True)
    bench.run()
    assert client.outputs == []
    blocks, cached = bench.hooks.loads["a"]
    assert (len(blocks), cached) == (math.ceil(length / 4), 0)
    assert bench.core.load()["loading"] == 1
    bench.land("a")
    bench.run()
    assert client.tokens == greedy(prompt, 6)
    assert bench.runner.steps[0] == [(length - 1, 1)]
    stats = bench.requests["a"].stats
    assert (stats.transferred_tokens, stats.computed_tokens) == (length - 1, 1)
    assert bench.hooks.calls == [("load_allocated", "a"), ("end", "a")]
    bench.assert_baseline()


@pytest.mark.parametrize("loaded", range(12))
def test_a_partial_load_is_completed_by_computing(loaded: int):
    bench = Bench()
    prompt = prompt_of(11)
    client = bench.submit("a", prompt, 6, load=True)
    bench.run()
    bench.land("a", loaded)
    bench.run()
    assert client.tokens == greedy(prompt, 6)
    assert bench.requests["a"].stats.transferred_tokens == min(loaded, 10)


def test_a_load_behind_a_cached_prefix_awaits_the_rest():
    bench = Bench()
    bench.submit("before", PROMPT[:8], 1)
    bench.run()
    kept = [bench.runner.memory[block] for block in range(2)]
    client = bench.submit("a", [*PROMPT, 8, 8, 8], 4, load=True)
    bench.run()
    blocks, cached = bench.hooks.loads["a"]
    assert (len(blocks), cached) == (4, 2)
    assert [bench.runner.memory[block] for block in blocks[:2]] == kept
    bench.land("a")
    bench.run()
    assert client.tokens == greedy([*PROMPT, 8, 8, 8], 4)
    stats = bench.requests["a"].stats
    assert (stats.cached_tokens, stats.transferred_tokens, stats.computed_tokens) == (8, 4, 1)


def test_loaded_blocks_serve_others_once_they_are_verified():
    bench = Bench()
    bench.submit("a", PROMPT, 2, load=True)
    bench.run()
    bench.submit("b", PROMPT, 2)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 0  # nothing is known of a's blocks yet
    bench.land("a")
    bench.submit("c", PROMPT, 2)
    bench.run()
    assert bench.requests["c"].stats.cached_tokens == 8


def test_a_skipped_load_runs_on_its_own():
    bench = Bench()
    bench.submit("before", PROMPT[:9], 1)
    bench.run()
    client = bench.submit("a", PROMPT[:9], 4, load=True)
    bench.run()
    assert client.tokens == greedy(PROMPT[:9], 4)
    assert bench.hooks.calls[1:] == [("load_skipped", "a"), ("end", "a")]


def test_a_failed_load_is_computed_in_other_blocks_while_bytes_still_land():
    bench = Bench()
    client = bench.submit("a", PROMPT, 4, load=True)
    bench.run()
    bench.fail_load("a")
    bench.core.step()
    bench.scribble("a", [9] * 10)  # late bytes of the transfer
    bench.run()
    assert client.tokens == greedy(PROMPT, 4)
    assert bench.core.load()["blocks_free"] + bench.core.load()["blocks_cached"] == 61
    bench.fence("a")
    bench.run()
    bench.assert_baseline()
    assert bench.hooks.calls == [("load_allocated", "a"), ("end", "a")]


def test_a_preempted_loaded_request_is_recomputed_and_not_loaded_again():
    # Field case 16: seven blocks, A needs 4+1, B needs 3+1, both loaded.
    bench = Bench(num_blocks=7)
    a = bench.submit("a", prompt_of(16, 1), 4, load=True, ignore_eos=True)
    bench.run()
    b = bench.submit("b", prompt_of(11, 2), 9, load=True, ignore_eos=True)
    bench.core._scheduler._has_room = lambda state, cached: True  # type: ignore[method-assign]
    bench.run()
    del bench.core._scheduler._has_room
    assert set(bench.hooks.loads) == {"a", "b"}
    bench.land("a")
    bench.run()
    assert len(a.tokens) == 1  # its fifth block is not to be had until b's load ends
    bench.land("b")
    bench.run()
    assert a.tokens == greedy(prompt_of(16, 1), 4, eos=None)
    assert b.tokens == greedy(prompt_of(11, 2), 9, eos=None)
    assert bench.requests["b"].stats.preemptions == 1
    assert [call for call in bench.hooks.calls if call[0] != "end"] == [
        ("load_allocated", "a"),
        ("load_allocated", "b"),
    ]
    bench.assert_baseline()


@pytest.mark.parametrize("length", [1, 4, 9])
def test_an_offer_is_made_before_the_end_and_keeps_its_blocks(length: int):
    bench = Bench(num_blocks=8)
    prompt = prompt_of(length)
    client = bench.submit("a", prompt, 1, offer=True, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt, 1)
    assert bench.hooks.calls == [("offered", "a"), ("end", "a")]
    blocks = bench.hooks.offers["a"]
    assert len(blocks) == math.ceil(length / 4)
    # Others come and go; what was offered stays.
    for seed in range(20, 24):
        bench.submit(f"r{seed}", prompt_of(9, seed), 6)
        bench.run()
    assert bench.runner.read(blocks, length) == prompt
    counts = bench.core.load()
    assert counts["blocks_free"] + counts["blocks_cached"] == 8 - len(blocks)
    bench.core.release_blocks(blocks)
    bench.run()
    bench.assert_baseline()


def test_an_offer_is_made_when_the_first_token_is_eos():
    bench = Bench()
    client = bench.submit("a", prompt_ending_in_eos_after(1), 1, offer=True)
    bench.run()
    assert client.ended == "stop"
    assert bench.hooks.calls == [("offered", "a"), ("end", "a")]


def test_an_offer_of_a_longer_answer_is_made_with_its_first_token():
    bench = Bench()
    client = bench.submit("a", PROMPT, 5, offer=True, ignore_eos=True)
    bench.core.step()
    assert "a" in bench.hooks.offers
    bench.run()
    assert bench.runner.read(bench.hooks.offers["a"], 10) == PROMPT
    assert client.tokens == greedy(PROMPT, 5, eos=None)
    bench.core.release_blocks(bench.hooks.offers["a"])
    bench.run()
    bench.assert_baseline()


def test_blocks_returned_twice_stay_with_their_owner(caplog: pytest.LogCaptureFixture):
    bench = Bench(num_blocks=4)
    bench.submit("a", prompt_of(8), 1, offer=True)
    bench.run()
    blocks = bench.hooks.offers["a"]
    bench.core.release_blocks(blocks)
    client = bench.submit("b", prompt_of(9, 1), 5, ignore_eos=True)
    bench.core.step()
    bench.core.release_blocks(blocks)
    bench.run()
    assert client.tokens == greedy(prompt_of(9, 1), 5, eos=None)
    bench.assert_baseline()
    assert f"blocks {blocks[::-1]} were not at the handoff side" in caplog.text


# -- abort: state by state (field cases 18b, 29) ---------------------------------------------------------


def _waiting(bench: Bench) -> None:
    pass


def _in_prompt(bench: Bench) -> None:
    bench.core.step()
    bench.core.step()


def _decoding(bench: Bench) -> None:
    for _ in range(6):
        bench.core.step()


@pytest.mark.parametrize("reach", [_waiting, _in_prompt, _decoding])
@pytest.mark.parametrize("offer", [False, True])
def test_an_abort_releases_everything_at_the_next_step(reach: Callable[[Bench], None], offer: bool):
    bench = Bench(max_step_tokens=4)
    client = bench.submit("a", prompt_of(15), 10, offer=offer, ignore_eos=True)
    reach(bench)
    tokens, forwards = client.tokens, len(bench.runner.steps)
    bench.core.abort("a")
    assert not client.ended
    assert not bench.core.step()
    assert client.ended == "abort"
    assert client.outputs[-1].token_id is None
    assert client.tokens == tokens == greedy(prompt_of(15), 10, eos=None)[: len(tokens)]
    assert len(bench.runner.steps) == forwards
    assert ("offered", "a") not in bench.hooks.calls or reach is _decoding
    for blocks in bench.hooks.offers.values():
        bench.core.release_blocks(blocks)
    bench.run()
    bench.assert_baseline()


def test_an_aborted_load_leaves_its_blocks_to_the_handoff_side_until_the_fence():
    bench = Bench(num_blocks=8)
    client = bench.submit("a", prompt_of(15), 10, load=True)
    bench.run()
    bench.core.abort("a")
    bench.run()
    assert client.ended == "abort"
    assert bench.hooks.calls == [("load_allocated", "a"), ("load_abandoned", "a"), ("end", "a")]
    # Four blocks are left; a request that needs more waits for the fence, and late bytes harm nobody.
    small = bench.submit("b", prompt_of(9, 2), 3, ignore_eos=True)
    large = bench.submit("c", prompt_of(18, 3), 3, ignore_eos=True)
    bench.run()
    bench.scribble("a", prompt_of(15))
    assert small.tokens == greedy(prompt_of(9, 2), 3, eos=None)
    assert large.outputs == []
    bench.core.load_finished("a", 15)  # too late: ignored
    bench.fail_load("a")
    bench.run()
    bench.fence("a")
    bench.run()
    assert large.tokens == greedy(prompt_of(18, 3), 3, eos=None)
    bench.assert_baseline()


def test_an_abort_and_a_load_that_ends_may_come_in_either_order():
    for first in ("abort", "finish", "fail"):
        bench = Bench()
        client = bench.submit("a", PROMPT, 4, load=True)
        bench.run()
        if first == "abort":
            bench.core.abort("a")
            bench.land("a")
        else:
            bench.land("a") if first == "finish" else bench.fail_load("a")
            bench.core.abort("a")
        bench.run()
        assert client.ended == "abort"
        assert (("load_abandoned", "a") in bench.hooks.calls) == (first == "abort")
        if first != "finish":
            bench.fence("a")
        bench.run()
        bench.assert_baseline()


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_second_answer_to_a_load_is_ignored(fails_first: bool):
    bench = Bench()
    client = bench.submit("a", PROMPT, 6, load=True, ignore_eos=True)
    bench.run()
    bench.fail_load("a") if fails_first else bench.land("a")
    bench.core.step()
    bench.core.load_finished("a", 10)
    bench.core.load_failed("a", Reason.READ_TIMEOUT)
    bench.run()
    assert client.tokens == greedy(PROMPT, 6, eos=None)
    assert bench.requests["a"].stats.transferred_tokens == (0 if fails_first else 9)
    if fails_first:
        bench.fence("a")
        bench.run()
    bench.assert_baseline()


def test_aborts_of_preempted_ended_and_unknown_requests():
    bench = Bench(num_blocks=8)
    older = bench.submit("a", prompt_of(8, 1), 24, ignore_eos=True)
    younger = bench.submit("b", prompt_of(8, 2), 24, ignore_eos=True)
    while bench.requests["b"].stats.preemptions == 0:
        bench.core.step()
    bench.core.abort("b")
    bench.core.abort("nobody")
    bench.run()
    bench.core.abort("a")
    bench.run()
    assert younger.ended == "abort"
    assert younger.tokens == greedy(prompt_of(8, 2), 24, eos=None)[: len(younger.tokens)]
    assert older.ended == "length"
    bench.assert_baseline()


def test_an_abort_from_inside_on_output_ends_the_request_at_once():
    bench = Bench()
    client = bench.submit("a", PROMPT, 10, ignore_eos=True)

    def stop_after_two(output: object) -> None:
        client(output)  # type: ignore[arg-type]
        if len(client.tokens) == 2 and not client.ended:
            bench.core.abort("a")

    bench.requests["a"].on_output = stop_after_two
    bench.run()
    assert (len(client.tokens), client.ended) == (2, "abort")
    bench.assert_baseline()


# -- refusals --------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers():
    bench = Bench(num_blocks=8)  # 32 tokens, less than the model's 4096
    assert bench.core.max_model_len == 32
    with pytest.raises(RequestError) as caught:
        bench.submit("a", prompt_of(30), 3)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "prompt"
    assert caught.value.message == (
        "This model's maximum context length is 32 tokens. However, you requested 33 tokens (30 in the "
        "prompt, 3 in the completion). Please reduce the length of the prompt or of the completion."
    )
    client = bench.submit("a", prompt_of(30), 2, ignore_eos=True)
    bench.run()
    assert client.tokens == greedy(prompt_of(30), 2, eos=None)


def test_the_models_context_counts_when_it_is_smaller():
    bench = Bench()
    bench.runner.max_context = 20
    core = type(bench.core)(bench.runner, num_blocks=64)
    assert core.max_model_len == 20


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "prompt: got .*at least one token"),
        ([1, VOCAB], {}, f"prompt: got {VOCAB}, allowed is token ids from 0 to {VOCAB - 1}"),
        ([1, -1], {}, "prompt: got -1"),
        ([1], {"top_p": 2.0}, "top_p: got 2.0"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], params: dict[str, object], named: str):
    bench = Bench()
    with pytest.raises(RequestError, match=named) as caught:
        bench.submit("a", prompt, **params)
    assert caught.value.status == 400
    bench.assert_baseline()


def test_a_callers_mistakes_are_faults():
    bench = Bench()
    bench.submit("a", PROMPT)
    with pytest.raises(EngineFault, match="a is in the engine already"):
        bench.submit("a", PROMPT)
    other = EngineRequest("b", PROMPT, SamplingParams(), print, chain=bench.core.chain(PROMPT[:-1], ""))
    with pytest.raises(EngineFault, match="a chain of 9 tokens in blocks of 4 for a prompt of 10"):
        bench.core.submit(other)
    bench.core.hooks = None
    with pytest.raises(EngineFault, match="no hooks are set"):
        bench.submit("c", PROMPT, load=True)
    bench.run()
    bench.submit("a", PROMPT)  # an id is free again after its end


def test_bounds_are_checked():
    with pytest.raises(ConfigError, match="max_num_seqs: got 0"):
        Bench(max_num_seqs=0)
    with pytest.raises(ConfigError, match="num_blocks: got 0"):
        Bench(num_blocks=0)


# -- failures --------------------------------------------------------------------------------------------


def test_a_model_that_raises_ends_the_requests_of_that_step_only(caplog: pytest.LogCaptureFixture):
    bench = Bench(max_num_seqs=2)
    victims = [bench.submit(name, prompt_of(9, 1), 8, offer=True) for name in "ab"]
    spared = bench.submit("c", prompt_of(9, 2), 8, ignore_eos=True)

    def fail(steps: Sequence[SequenceStep]) -> None:
        raise ArithmeticError("no memory for 12 tokens")

    bench.runner.before = fail
    assert bench.core.step()
    bench.runner.before = lambda steps: None
    bench.run()
    for client in victims:
        [output] = client.outputs
        assert output.finish_reason == "error"
        assert output.error is not None
        assert (output.error.status, output.error.code) == (500, "engine_error")
        assert "ArithmeticError" in output.error.message
        assert "12 tokens" not in output.error.message  # the log's business
    assert "no memory for 12 tokens" in caplog.text
    assert spared.tokens == greedy(prompt_of(9, 2), 8, eos=None)
    assert bench.hooks.offers == {}
    assert bench.core.healthy
    bench.assert_baseline()


def test_nothing_of_a_failed_step_is_found_in_the_cache():
    bench = Bench()

    def fail(steps: Sequence[SequenceStep]) -> None:
        raise ArithmeticError

    bench.runner.before = fail
    bench.submit("a", PROMPT, 2)
    bench.core.step()
    bench.runner.before = lambda steps: None
    client = bench.submit("b", PROMPT, 2)
    bench.run()
    assert bench.requests["b"].stats.cached_tokens == 0
    assert client.tokens == greedy(PROMPT, 2)


def test_logits_that_are_no_numbers_end_their_request_alone():
    bench = Bench()
    bad = bench.submit("a", [1, 2, 3], 8, ignore_eos=True, offer=True)
    good = bench.submit("b", PROMPT, 8, ignore_eos=True)
    bench.runner.logits = lambda c: fake_logits(c) * (math.nan if c[:3] == [1, 2, 3] else 1)
    bench.run()
    [output] = bad.outputs
    assert output.error is not None
    assert (output.finish_reason, output.error.code) == ("error", "bad_logits")
    assert bench.hooks.offers == {}
    assert good.tokens == greedy(PROMPT, 8, eos=None)
    bench.assert_baseline()


def test_a_client_that_raises_is_aborted_and_harms_nobody(caplog: pytest.LogCaptureFixture):
    bench = Bench()
    bench.submit("a", PROMPT, 50, ignore_eos=True)
    good = bench.submit("b", prompt_of(9), 8, ignore_eos=True)

    def refuse(output: object) -> None:
        raise RuntimeError("Event loop is closed")

    bench.requests["a"].on_output = refuse
    bench.run()
    assert good.tokens == greedy(prompt_of(9), 8, eos=None)
    assert len(bench.runner.steps) == 8
    assert "nobody takes the output of request a" in caplog.text
    bench.assert_baseline()


def test_a_standstill_without_anything_to_wait_for_is_a_fault():
    bench = Bench(num_blocks=4)
    bench.core._pool.allocate(2)  # a leak
    bench.submit("a", prompt_of(9), 2)
    with pytest.raises(EngineFault, match=r"no progress is possible: .*waiting 1.*blocks_free 2"):
        bench.core.step()


# -- load ------------------------------------------------------------------------------------------------


def test_load_counts_each_request_once():
    bench = Bench(num_blocks=8, max_num_seqs=1)
    assert bench.core.load() == {
        "running": 0,
        "waiting": 0,
        "loading": 0,
        "blocks_total": 8,
        "blocks_free": 8,
        "blocks_cached": 0,
    }
    bench.submit("a", prompt_of(5), 4, ignore_eos=True)
    bench.submit("b", prompt_of(5, 1), 1, load=True)
    bench.submit("c", prompt_of(5, 2), 1)
    assert bench.core.load()["waiting"] == 3
    bench.core.step()
    counts = bench.core.load()
    assert (counts["running"], counts["loading"], counts["waiting"]) == (1, 1, 1)
    assert (counts["blocks_free"], counts["blocks_cached"]) == (4, 0)


def test_the_counts_are_at_the_baseline_when_the_last_output_comes():
    bench = Bench()
    client = bench.submit("a", PROMPT, 3)
    seen = []

    def look(output: object) -> None:
        client(output)  # type: ignore[arg-type]
        seen.append(bench.core.load())

    bench.requests["a"].on_output = look
    bench.run()
    assert seen[0]["running"] == 1
    assert seen[-1] == bench.core.load()
    assert (seen[-1]["running"], seen[-1]["waiting"]) == (0, 0)
    assert seen[-1]["blocks_free"] + seen[-1]["blocks_cached"] == 64
