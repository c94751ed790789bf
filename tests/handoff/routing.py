"""What the router does in the random schedules: requests, bindings, re-bindings, withdrawals.

Each method that a schedule may choose says whether there was anything to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvhandoff.core.ids import HandoffId, HandoffKey, Identity
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import OfferDescriptor, OfferRef
from tests.handoff.toy import Engine, Job, Load, Path, Prompt, prompt
from tests.handoff.traffic import MAX_TOKENS, PROMPTS, Handoff

if TYPE_CHECKING:
    from tests.handoff.world import World


class Router:
    """All handoffs, and the legs that are on their way to engines."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.traffic = world.traffic
        self.rng = world.rng
        self.legs: list[tuple[Identity, Job | Load]] = []
        """On their way to one life of an engine."""
        self.serial = 0
        self.crowd = self.rng.choice((2, 4, 8))
        """With so many legs under way there are no new requests."""

    def request(self) -> bool:
        """A new request, on any path."""
        rng = self.rng
        if len(self.legs) + sum(len(e.jobs) + len(e.loads) for e in self.world.engines) >= self.crowd:
            return False
        source, destination = rng.sample(self.world.engines, 2)
        wanted, history = prompt(*rng.choice(PROMPTS)), None
        if self.traffic.histories and rng.random() < 0.7:
            history, past = rng.choice(self.traffic.histories[-3:])
            wanted = self._next_turn(past)
            if history.source.engine_id == source.name:
                source, destination = destination, source
        paths: tuple[Path, ...] = (
            ("pull", "local") if self.world.sluggish else ("pull", "push", "push", "local")
        )
        path = rng.choice(paths if history else paths[:-1])
        self.serial += 1
        key = HandoffKey(HandoffId(f"h{self.serial}"), 0)
        job = Job(key, wanted, path)
        if history is not None:
            job.load = Load(key, wanted, history, "return", rng.choice((1, 1, 8)), job)
        self.legs.append((source.identity, job))
        if path != "local":
            offer = OfferRef(key=key, source=source.identity, control_address=source.address)
            handoff = self.traffic.handoffs[key] = Handoff(wanted, offer, path)
            if path == "push":
                self._bind(handoff, destination, "push")
        return True

    def bind(self) -> bool:
        """A decode leg for an offer that is complete, the first one or another."""
        ready = [handoff for handoff in self._recent(6) if handoff.descriptor is not None]
        fresh = [handoff for handoff in ready if not handoff.loads]
        if not fresh and self.rng.random() < 0.9:
            return False
        handoff = self.rng.choice(fresh or ready) if ready else None
        if handoff is None:
            return False
        self._bind(handoff, self._other_engine(handoff.offer.source), "pull")
        return True

    def rebind(self) -> bool:
        """Another decode engine for a pushed request; the former one's leg is dropped before, after, or
        never."""
        bound = [handoff for handoff in self._recent(4) if handoff.path == "push"]
        if self.rng.random() < 0.9:
            bound = [handoff for handoff in bound if handoff.loads[-1].waits]
        if not bound:
            return False
        handoff = self.rng.choice(bound)
        former = list(handoff.loads)
        path = "pull" if handoff.descriptor is not None and self.rng.random() < 0.3 else "push"
        drop = self.rng.choice(("before", "after", "never"))
        if drop == "before":
            self._drop_all(former)
        self._bind(handoff, self._other_engine(handoff.offer.source), path)
        if drop == "after":
            self._drop_all(former)
        return True

    def withdraw(self) -> bool:
        """The router gives an offer up, a retained one perhaps."""
        histories = [reference for reference, _ in self.traffic.histories[-2:]]
        offers = [*histories, *(handoff.offer for handoff in self._recent(4))]
        if not offers:
            return False
        offer = self.rng.choice(offers)
        engine = self.world.living(offer.source)
        if engine is not None:
            self.world.feed(engine, ev.Withdrawn(offer.key))
        return engine is not None

    def leg(self) -> bool:
        """A leg arrives, in any order, unless the life that it is for has ended."""
        if not self.legs:
            return False
        audience, work = self.legs.pop(self.rng.randrange(len(self.legs)))
        engine = self.world.living(audience)
        if engine is None:
            return True
        if isinstance(work, Load):
            self.traffic.want(engine, work)
            return True
        engine.jobs[work.key] = work
        if work.path == "push":
            self.world.feed(engine, ev.OfferStarted(work.key, work.prompt.chain))
        if work.load is not None:
            self.traffic.want(engine, work.load)
        return True

    def _recent(self, count: int) -> list[Handoff]:
        return list(self.traffic.handoffs.values())[-count:]

    def _other_engine(self, source: Identity) -> Engine:
        return self.rng.choice([e for e in self.world.engines if e.name != source.engine_id])

    def _bind(self, handoff: Handoff, engine: Engine, path: str) -> None:
        rng, offer, wanted = self.rng, handoff.offer, handoff.prompt
        key = HandoffKey(offer.key.handoff_id, handoff.attempts)
        handoff.attempts += 1
        if path == "pull":
            assert handoff.descriptor is not None
            offer = handoff.descriptor
            if rng.random() < 0.05:
                offer = _forged(handoff.descriptor, wanted)
        if rng.random() < 0.1:  # another prompt's reference: of equal tokens under another salt, or any
            wanted = prompt(*rng.choice((*PROMPTS, (1 - wanted.salt, wanted.tokens))))
        load = Load(key, wanted, offer, "pull" if path == "pull" else "push")
        handoff.loads.append(load)
        self.legs.append((engine.identity, load))

    def _drop_all(self, loads: list[Load]) -> None:
        for load in loads:
            for engine in self.world.engines:
                if engine.loads.get(load.key) is load:
                    self.traffic.drop_load(engine, load, done=False)

    def _next_turn(self, past: Prompt) -> Prompt:
        """The conversation goes on: its history whole, or edited somewhere."""
        tokens = past.tokens
        if self.rng.random() < 0.4:
            tokens = (*tokens[: self.rng.randrange(1, len(tokens))], 80)
        fresh = self.rng.randrange(1, 6)
        return prompt(past.salt, (*tokens[: MAX_TOKENS - fresh], *range(90, 90 + fresh)))


def _forged(descriptor: OfferDescriptor, wanted: Prompt) -> OfferDescriptor:
    """A reference whose blocks are others than the offer's."""
    return OfferDescriptor(
        key=descriptor.key,
        source=descriptor.source,
        control_address=descriptor.control_address,
        spans=((descriptor.spans[0][0] + 1, len(wanted.labels)),),
        n_tokens=wanted.chain.n_tokens,
        digest=wanted.chain.digest(),
    )
