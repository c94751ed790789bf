"""Re-binding by an operator: a request goes to another decode engine before its answer begins, and its
prefill leg goes on. Orders are checked here, and handed over to who carries the request (`relay.py`)."""

from __future__ import annotations

import msgspec

from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.core.reasons import Reason
from kvhandoff.router.engine import Engine
from kvhandoff.router.exchange import Exchange
from kvhandoff.router.fleet import Fleet
from kvhandoff.router.moves import Bound, Move, Rebound
from kvhandoff.router.orders import read_order
from kvhandoff.router.policy import Policies
from kvhandoff.router.records import Draft


class RebindOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/handoffs/{id}/rebind`; it may be empty."""

    decode: str | None = None
    """Engine id; None: the router chooses."""


def read_rebind(raw: bytes) -> RebindOrder:
    """The order in a body. Raises RequestError (400)."""
    return read_order(raw, RebindOrder) if raw.strip() else RebindOrder()


async def rebind(
    draft: Draft, x: Exchange | None, fleet: Fleet, policies: Policies, order: RebindOrder
) -> Rebound:
    """Move the request's decode leg; returns when the new one is about to be sent.

    `x`: the request while it runs. Raises RequestError: 400 for an engine that there isn't, 409 for a request
    that can't be moved, or not any more.
    """
    if x is None:
        raise _refused("the request has ended" if draft.status is not None else _NOT_BOUND)
    if x.path == "local":
        raise _refused("its path is local: there is no prefill leg that could go on")
    if x.move is not None:
        raise _refused("it is being moved already")
    bound = x.bound
    if bound is None:
        raise _refused(
            _NOT_BOUND if x.draft.decode is None else "its answer has begun, or it is being retried"
        )
    x.move = move = Move(_target(x, bound.engine, fleet, policies, order))
    fleet.spawn(_carry_out(x, bound, move))
    moved = await move.done
    if moved is None:
        raise _refused("its answer has begun, or the request has ended")
    return moved


async def _carry_out(x: Exchange, bound: Bound, move: Move) -> None:
    """To its end, though whoever gave the order may leave: an engine that has been asked may have ended its
    leg, which nobody but the router would begin again."""
    leg, yielded = x.draft.decode, False
    try:
        # The engine decides: an answer that is not streamed shows nothing here until it is complete.
        yielded = leg is None or await bound.engine.yields(leg)
    finally:
        if yielded and x.bound is bound:
            bound.cut_short()
        elif not yielded:
            move.overtaken()
            if x.move is move:
                x.move = None


_NOT_BOUND = "it has no decode engine yet"


def _target(x: Exchange, present: Engine, fleet: Fleet, policies: Policies, order: RebindOrder) -> Engine:
    model = x.summary.model
    if order.decode is None:
        avoid = {present.url} | x.avoid
        source = x.source.engine if x.source is not None else None
        choice = policies.choose_decode(fleet.partners(source), model, avoid, tokens=x.tokens)
        if isinstance(choice, Reason) or choice.url == present.url:
            raise _refused(f"no other decode engine for {model!r} is healthy", code=Reason.NO_DECODE_ENGINE)
        return fleet.engine(choice)
    named = {engine.state.engine_id: engine for engine in fleet.decode if engine.state is not None}
    target = named.get(order.decode)
    if target is None:
        raise invalid("decode", order.decode, ", ".join(sorted(named)), code="engine_not_found")
    if target is present:
        raise _refused(f"it is bound to {order.decode} already")
    if target.obstacle is not None:
        raise _refused(f"{target}: {target.obstacle}", code=Reason.NO_DECODE_ENGINE)
    if target.view().model != model:
        raise _refused(f"{target} serves {target.view().model!r}, not {model!r}")
    return target


def _refused(why: str, *, code: str = "not_rebound") -> RequestError:
    return RequestError(f"can't re-bind: {why}", status=409, code=code)
