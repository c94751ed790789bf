"""The engine core, stepped by hand on a fake model: outputs, prefix cache, stats, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvhandoff.core.chain import TokenChain, chain_root
from tests.embedded.fakes import (
    EOS,
    PROMPT,
    Bench,
    fake_logits,
    greedy,
    prompt_ending_in_eos_after,
    prompt_of,
)

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
        "steps": 0,
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
