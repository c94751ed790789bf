"""References that are used again, are stale, stand for something else, or are none (field cases 1, 60).

vLLM's own connectors read such references as they are and answer with another prompt's text. Here the answer
is the right one, computed where the KV is not to be had, and the record says why.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.tickets import TicketKey
from tests.vllm.engines import eventually
from tests.vllm.marks import both, gqa
from tests.vllm.pair import Pair, Question, greedy, new_key

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 170
either_prompt = pytest.mark.parametrize("same_prompt", [True, False], ids=["same prompt", "another prompt"])


async def missed(pair: Pair, offer: OfferDescriptor, question: Question, reason: Reason) -> None:
    """Use a reference that can't be used: the right text, computed here, and one reason."""
    answer = await pair.decode(question.prompt, offer)
    assert answer.token_ids == question.expected
    record = await pair.d.record(answer.key.handoff_id)
    assert (record.transferred_tokens, record.computed_tokens) == (0, LENGTH)
    assert record.reasons == [reason]
    assert record.kv_source == "recomputed"


async def expired(pair: Pair) -> None:
    """Wait until the prefill engine keeps no offer any more."""

    async def gone() -> bool:
        return (await pair.p.blocks()).offered == 0

    await eventually(gone, 30.0, pair.where)


@both
@either_prompt
async def test_consumed_reference(pair: Pair, same_prompt: bool) -> None:
    """The reference was read before."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt, salt="first")
    first = await pair.decode(question.prompt, prefilled.offer, salt="first")
    assert first.token_ids == question.expected
    assert (await pair.d.record(first.key.handoff_id)).transferred_tokens == LENGTH - 1
    await expired(pair)
    # Under the first salt the decode engine has the prompt in its prefix cache, and needs no reference.
    again = question if same_prompt else await pair.question(LENGTH)
    await missed(pair, prefilled.offer, again, Reason.OFFER_CONSUMED)


@gqa
@either_prompt
async def test_recycled_reference(pair: Pair, same_prompt: bool) -> None:
    """Nobody came in time, and the blocks hold other prompts' KV now."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    await expired(pair)
    for _ in range(2):
        await pair.flood(pair.p)
    again = await pair.prefill(question.prompt)
    assert (await pair.p.record(again.key.handoff_id)).cached_tokens == 0, "the KV is still there"
    await pair.withdraw(pair.p, again.key)
    other = question if same_prompt else await pair.question(LENGTH)
    await missed(pair, prefilled.offer, other, Reason.OFFER_EXPIRED)


@gqa
async def test_held_reference_is_not_recycled(pair: Pair) -> None:
    """While the lease runs, no other prompt gets the blocks, however many there are."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    await pair.flood(pair.p)
    answer = await pair.decode(question.prompt, prefilled.offer)
    assert answer.token_ids == question.expected
    assert (await pair.d.record(answer.key.handoff_id)).transferred_tokens == LENGTH - 1


@both
async def test_reference_of_another_prompt(pair: Pair) -> None:
    """A live reference is declined to a prompt that it does not stand for, and stays for the one it does."""
    question, other = await pair.question(LENGTH), await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    await missed(pair, prefilled.offer, other, Reason.CHAIN_MISMATCH)
    answer = await pair.decode(question.prompt, prefilled.offer)
    assert answer.token_ids == question.expected
    assert (await pair.d.record(answer.key.handoff_id)).transferred_tokens == LENGTH - 1


@gqa
@either_prompt
async def test_expired_reference(pair: Pair, same_prompt: bool) -> None:
    """The blocks may still hold the right KV, but nothing says so any more."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    await expired(pair)
    other = question if same_prompt else await pair.question(LENGTH)
    await missed(pair, prefilled.offer, other, Reason.OFFER_EXPIRED)


@gqa
async def test_reference_of_a_prompt_that_begins_alike(pair: Pair) -> None:
    """Whole blocks of equal beginning are used, and not a token beyond; the rest is computed in place."""
    beginning = pair.tokens(80)
    question = await pair.question(LENGTH, begins=beginning)
    prefilled = await pair.prefill([*beginning, *pair.tokens(LENGTH - 80)])
    answer = await pair.decode(question.prompt, prefilled.offer)
    assert answer.token_ids == question.expected
    record = await pair.d.record(answer.key.handoff_id)
    assert (record.transferred_tokens, record.computed_tokens) == (64, LENGTH - 64)


def _spans(*spans: tuple[int, int]) -> dict[str, Any]:
    return {"spans": spans}


CHANGES: dict[str, tuple[dict[str, Any], Reason]] = {
    "blocks beyond the pool": (_spans((101, 6)), Reason.BAD_REFERENCE),
    "too few blocks": (_spans((1, 2)), Reason.BAD_REFERENCE),
    "somebody else's blocks": (_spans((2, 6)), Reason.BAD_REFERENCE),
    "an unknown handoff": ({"key": HandoffKey(HandoffId("never made"), 0)}, Reason.OFFER_UNKNOWN),
}


@gqa
@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES.keys())
async def test_changed_reference(pair: Pair, change: dict[str, Any], reason: Reason) -> None:
    """A reference that says something else than the engine did."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    changed = msgspec.structs.replace(prefilled.offer, **change)
    assert changed != prefilled.offer
    await missed(pair, changed, question, reason)
    await pair.withdraw(pair.p, prefilled.key)


@gqa
@pytest.mark.parametrize("change", [{"epoch": Epoch("former")}, {"engine_id": EngineId("somebody")}])
async def test_reference_of_another_life(pair: Pair, change: dict[str, Any]) -> None:
    """Whoever listens at the address now has not made the offer."""
    question = await pair.question(LENGTH)
    prefilled = await pair.prefill(question.prompt)
    source = msgspec.structs.replace(prefilled.offer.source, **change)
    stale = msgspec.structs.replace(prefilled.offer, source=source)
    await missed(pair, stale, question, Reason.EPOCH_CHANGED)
    await pair.withdraw(pair.p, prefilled.key)


# --------------------------------------------------------------------------------- what no router sent


@gqa
@pytest.mark.parametrize(
    "fault", ["foreign", "garbled", "late", "for another engine", "no text", "used before"]
)
async def test_bad_ticket_is_not_obeyed(pair: Pair, fault: str) -> None:
    """vLLM has no way to refuse a request from a connector: the prompt is served as a plain one, and the
    prefill leg's answer says so."""
    question = await pair.question(LENGTH)
    key = new_key()
    state = await pair.p.state()
    match fault:
        case "foreign":
            ticket: Any = await Pair(pair.p, pair.d, pair.session, b"another cluster").ticket(
                pair.p, "prefill", key=key
            )
        case "late":
            ticket = await pair.ticket(pair.p, "prefill", key=key, not_after=state.now - 0.1)
        case "for another engine":
            ticket = await pair.ticket(pair.p, "prefill", key=key, audience=await pair.d.identity())
        case "used before":
            ticket = await pair.ticket(pair.p, "prefill", key=key)
            body = {"prompt": pair.tokens(40), "max_tokens": 1}
            await pair.post(pair.p, body, key=key, ticket=ticket)
            await pair.withdraw(pair.p, key)
        case _:
            ticket = {"garbled": "x.y", "no text": 7}[fault]
    answer = await pair.post(
        pair.p, greedy(question.prompt, 8, kv_transfer_params={"ticket": ticket}), key=new_key()
    )
    assert answer.token_ids == question.expected
    assert answer.body["kv_transfer_params"]["error"] == "bad_ticket"
    assert "offer" not in answer.body["kv_transfer_params"]
    assert (await pair.p.blocks()).offered == 0


@gqa
@pytest.mark.parametrize("salt", ["", "another"])
async def test_ticket_of_another_salt_is_not_obeyed(pair: Pair, salt: str) -> None:
    """vLLM keeps its prefix cache apart by the body's salt: it must be the one that was signed."""
    question = await pair.question(LENGTH)
    key = new_key()
    ticket = await pair.ticket(pair.p, "prefill", key=key, cache_salt="tenant")
    answer = await pair.post(pair.p, greedy(question.prompt, 8), key=key, ticket=ticket, salt=salt)
    assert answer.token_ids == question.expected
    assert answer.body["kv_transfer_params"]["error"] == "bad_ticket"


@gqa
@pytest.mark.parametrize(
    "params",
    [
        {
            "do_remote_prefill": True,
            "remote_host": "169.254.169.254",
            "remote_port": 1,
            "remote_block_ids": [1],
        },
        {"do_remote_decode": True, "do_remote_prefill": False},
        {},
        {"ticket": None},
        {"prompt_token_ids": [1, 2]},
    ],
)
async def test_parameters_of_other_connectors_steer_nothing(pair: Pair, params: dict[str, Any]) -> None:
    """Field case 60: what a client sends under that name is no order."""
    question = await pair.question(LENGTH)
    answer = await pair.post(pair.d, greedy(question.prompt, 8, kv_transfer_params=params))
    assert answer.token_ids == question.expected


@gqa
async def test_ticket_of_one_leg_is_none_for_another(pair: Pair) -> None:
    """A ticket that allows to end an offer starts nothing."""
    question = await pair.question(LENGTH)
    key = new_key()
    ticket = TicketKey(pair.cluster_key).open(await pair.ticket(pair.p, "withdraw", key=key))
    signed = TicketKey(pair.cluster_key).sign(ticket)
    answer = await pair.post(pair.p, greedy(question.prompt, 8), key=key, ticket=signed)
    assert answer.token_ids == question.expected
    assert answer.body["kv_transfer_params"]["error"] == "bad_ticket"
