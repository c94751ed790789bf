"""The engine core, stepped by hand on a fake model: aborts in every state, refusals, failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import EngineRequest, SamplingParams, SequenceStep
from kvhandoff.embedded.outlet import EngineFault
from tests.embedded.fakes import PROMPT, VOCAB, Bench, fake_logits, greedy, prompt_of

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
