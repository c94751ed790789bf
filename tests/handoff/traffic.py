"""What engines do in the random schedules: prompts chunk by chunk, loads, turns that end.

Each method that a schedule may choose says whether there was anything to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor, OfferRef
from tests.handoff.toy import BLOCK_SIZE, Engine, Job, Load, Prompt, Running, check, prompt

if TYPE_CHECKING:
    from kvhandoff.handoff.messages import Commit
    from tests.handoff.ground import Ground

MAX_TOKENS = 24
PROMPTS = [  # (salt, tokens): shared beginnings, block-aligned and not; equal tokens under two salts
    (salt, tuple(tokens))
    for salt in (0, 1)
    for tokens in (range(16), [*range(8), 50, 51, 52, 53, 54, 55], [*range(6), 60], [70, 71, 72, 73])
]


@dataclass(slots=True)
class Handoff:
    """What the router knows of a request."""

    prompt: Prompt
    offer: OfferRef
    path: str
    attempts: int = 0
    descriptor: OfferDescriptor | None = None
    """Set when the offer is complete."""
    loads: list[Load] = field(default_factory=list)


class Traffic:
    """The engines' own doings."""

    tells = 0.7
    """How often an engine that lacks blocks says so."""

    def __init__(self, world: Ground) -> None:
        self.world = world
        self.rng = world.rng
        self.handoffs: dict[HandoffKey, Handoff] = {}
        self.histories: list[tuple[HistoryRef, Prompt]] = []

    # -------------------------------------------------------------------------------------- prompts

    def compute(self) -> bool:
        """An engine goes on with a prompt."""
        jobs = [(engine, job) for engine in self.world.engines for job in engine.jobs.values()]
        return bool(jobs) and self.compute_some(*self.rng.choice(jobs))

    def compute_some(self, engine: Engine, job: Job) -> bool:
        """Allocate, or compute the next chunk; False if it has to wait."""
        if job.load is not None:
            return job.load.blocks is None and self.allocate(engine, job.load)
        labels = job.prompt.labels
        if job.blocks is None:
            found = self._find_blocks(engine, job.prompt, len(labels))
            if found is None:
                return False
            cached, fresh = found
            job.blocks, job.ready = (*cached, *fresh), len(cached)
            return True
        lacking = len(labels) - len(job.blocks)
        if lacking > len(engine.free):
            self._short(engine, lacking - len(engine.free))
            return False
        job.blocks += engine.take(lacking, self.rng)
        check(engine.holds(job.blocks, labels[: job.ready]), "rule 1", f"{job.key} is computed on foreign KV")
        before, job.ready = job.ready, min(len(labels), job.ready + self.rng.randrange(1, 3))
        for position in range(before, job.ready):
            engine.write(job.blocks[position], labels[position])
        full = job.blocks[: min(job.ready, len(job.prompt.chain.blocks))]
        engine.publish(job.prompt, full)
        if job.ready == len(labels):
            self._computed(engine, job)
        elif job.path == "push" and len(full) > job.grown and self.rng.random() < 0.8:
            grown, job.grown = full[job.grown :], len(full)
            engine.keep(grown)
            self.world.feed(engine, ev.OfferGrown(job.key, grown))
        return True

    def _computed(self, engine: Engine, job: Job) -> None:
        assert job.blocks is not None
        del engine.jobs[job.key]
        if job.path == "local":
            engine.running.append(Running(job.key, job.prompt, job.blocks))
            return
        rest = job.blocks[job.grown :]
        engine.keep(rest)
        engine.drop(job.blocks)
        handoff = self.handoffs[job.key]
        handoff.descriptor = OfferDescriptor(
            key=job.key,
            source=engine.identity,
            control_address=engine.address,
            spans=to_spans(job.blocks),
            n_tokens=job.prompt.chain.n_tokens,
            digest=job.prompt.chain.digest(),
        )
        self.world.feed(engine, ev.Offered(job.key, job.prompt.chain, rest, len(job.prompt.tokens)))

    def abandon_some(self) -> bool:
        """A prompt's client goes away, or it is preempted."""
        jobs = [(engine, job) for engine in self.world.engines for job in engine.jobs.values()]
        if jobs:
            self.abandon(*self.rng.choice(jobs))
        return bool(jobs)

    def abandon(self, engine: Engine, job: Job) -> None:
        del engine.jobs[job.key]
        if job.load is not None:
            self.drop_load(engine, job.load, done=self.rng.random() < 0.5)
        if job.blocks is not None:
            engine.drop(job.blocks)
        if job.path == "push":
            reason = self.rng.choice((Reason.OFFER_ABANDONED, Reason.CLIENT_ABORTED))
            self.world.feed(engine, ev.OfferAbandoned(job.key, reason))

    # ---------------------------------------------------------------------------------------- loads

    def want(self, engine: Engine, load: Load) -> None:
        engine.loads[load.key] = load
        if load.path == "push":
            self.world.feed(engine, ev.PushWanted(load.key, load.offer, load.prompt.chain))
        else:
            self.world.feed(engine, ev.ReadWanted(load.key, load.offer, load.prompt.chain, load.min_tokens))

    def allocate_some(self) -> bool:
        """A load that queues for blocks gets them, if there are enough."""
        queued = [(engine, load) for engine, load in self._loads() if load.blocks is None]
        return bool(queued) and self.allocate(*self.rng.choice(queued))

    def allocate(self, engine: Engine, load: Load) -> bool:
        if load.blocks is not None:
            return False
        found = self._find_blocks(engine, load.prompt, self._room(load))
        if found is None:
            return False
        cached, fresh = found
        if not fresh:
            self.drop_load(engine, load, done=True)
            engine.drop(cached)
            return True
        load.blocks, load.cached = (*cached, *fresh), len(cached)
        self._hand_over(engine, load, fresh)
        self.world.feed(engine, ev.LoadAllocated(load.key, load.blocks, load.cached))
        return True

    def _room(self, load: Load) -> int:
        """For how many blocks the engine asks: all of the prompt's, those that can be filled at most, or any
        number. A push fills all."""
        count = len(load.prompt.labels)
        if load.path == "push" or self.rng.random() < 0.5:
            return count
        if isinstance(load.offer, HistoryRef) and self.rng.random() < 0.7:
            return min(load.offer.n_tokens, len(load.prompt.tokens) - 1) // BLOCK_SIZE
        return self.rng.randrange(count)

    def _hand_over(self, engine: Engine, load: Load, fresh: tuple[int, ...]) -> None:
        """The ledger owns these blocks now, and the engine does not."""
        engine.keep(fresh)
        for block in fresh:
            engine.held[block] = 0
            engine.targets[block] = load

    def _find_blocks(
        self, engine: Engine, wanted: Prompt, count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """`count` blocks for a prompt, but one more than are cached if it has that many; held by the engine:
        (those that have its beginning, the others)."""
        cached = engine.cached_prefix(wanted)
        count = min(max(count, len(cached) + 1), len(wanted.labels))
        lacking = count - len(cached) - len(engine.free)
        if lacking > 0:
            engine.hold(cached)
            self._short(engine, lacking)
            engine.drop(cached)
            return None
        engine.hold(cached)
        fresh = engine.take(count - len(cached), self.rng)
        if not cached and len(fresh) > 1 and self.rng.random() < 0.2:  # computed here earlier
            cached, fresh = fresh[:1], fresh[1:]
            engine.write(cached[0], wanted.labels[0])
            engine.publish(wanted, cached)
        return cached, fresh

    def _short(self, engine: Engine, lacking: int) -> None:
        """The engine says what it lacks, as often as not when nobody counts on it."""
        if self.rng.random() < self.tells:
            self.world.feed(engine, ev.MemoryShort(lacking))

    def short(self) -> bool:
        """An engine lacks blocks for something else than prompts of this world."""
        engine = self.rng.choice(self.world.engines)
        self.world.feed(engine, ev.MemoryShort(self.rng.randrange(1, engine.pool)))
        return True

    def drop_some(self) -> bool:
        """A client goes away."""
        loads = self._loads()
        if loads:
            self.drop_load(*self.rng.choice(loads), done=self.rng.random() < 0.5)
        return bool(loads)

    def _loads(self) -> list[tuple[Engine, Load]]:
        return [(engine, load) for engine in self.world.engines for load in engine.loads.values()]

    def drop_load(self, engine: Engine, load: Load, *, done: bool) -> None:
        queued = load.blocks is None
        self._ended(engine, load, "dropped")
        self.world.feed(engine, ev.LoadDropped(load.key, done=done))
        if queued and self.rng.random() < 0.1 and len(engine.free) >= len(load.prompt.labels):
            # The engine thread had allocated before it heard.
            blocks = engine.take(len(load.prompt.labels), self.rng)
            self._hand_over(engine, load, blocks)
            self.world.feed(engine, ev.LoadAllocated(load.key, blocks, 0))
            check(not any(engine.kept[b] for b in blocks), "rule 4", f"{load.key} got blocks after its end")

    def loaded(self, engine: Engine, load: Load, tokens: int, push: Commit | None) -> None:
        """The node says that a load's beginning is in its blocks."""
        chain, labels = load.prompt.chain, load.prompt.labels
        check(load.blocks is not None, "rule 1", f"{load.key} loaded without blocks")
        assert load.blocks is not None
        check(load.cached * BLOCK_SIZE < tokens <= chain.n_tokens, "rule 1", f"{load.key}: {tokens} tokens")
        room = len(load.blocks) * BLOCK_SIZE
        check(tokens <= room, "rule 1", f"{load.key}: {tokens} tokens in {len(load.blocks)} blocks")
        whole = tokens == chain.n_tokens
        check(whole or tokens % BLOCK_SIZE == 0, "rule 1", f"{load.key}: {tokens} tokens end inside a block")
        covered = labels[: -(-tokens // BLOCK_SIZE)]
        check(engine.holds(load.blocks, covered), "rule 1", f"{load.key} got what is not its own")
        check((push is not None) == (load.path == "push"), "rule 7", f"{load.key}: {push} for {load.path}")
        if push is not None:
            check(whole and push.first_token == chain.n_tokens, "rule 1", f"{load.key}: {tokens}, {push}")
            self.world.wire.check_committed(engine, push)
            if push.ranks == 2:
                self.world.outcomes["loaded push, two ranks"] += 1
        for block in load.targets:
            del engine.targets[block]
            engine.held[block] += 1
            engine.kept[block] -= 1
        engine.publish(load.prompt, load.blocks[: tokens // BLOCK_SIZE])
        blocks, load.blocks, job = load.blocks, None, load.job
        self._ended(engine, load, f"loaded {load.path}")
        self._count_loaded(load, tokens, room)
        if job is not None:
            job.blocks, job.ready = blocks, len(covered)
        elif whole:
            engine.running.append(Running(load.key, load.prompt, blocks))
        else:
            engine.jobs[load.key] = Job(load.key, load.prompt, "local", None, blocks, len(covered))

    def _count_loaded(self, load: Load, tokens: int, room: int) -> None:
        facts = {
            "a part": tokens < load.prompt.chain.n_tokens,
            "as far as it has blocks": room == tokens < load.prompt.chain.n_tokens,
            "part of it cached": load.cached > 0,
            "after a re-binding": load.key.attempt > 0,
            f"then {load.job.path}" if load.job is not None else "then runs": True,
        }
        self.world.outcomes.update(f"loaded {load.path}, {fact}" for fact, holds in facts.items() if holds)

    def missed(self, engine: Engine, key: HandoffKey, reason: Reason) -> None:
        """The node says that nothing can be used; the request computes its prompt in other blocks."""
        check(isinstance(reason, Reason), "rule 7", f"{reason!r} is no reason")
        check(key in engine.loads, "rule 7", f"{key} ended twice")
        load = engine.loads[key]
        self.world.outcomes[f"{reason} {load.path}"] += 1
        self._ended(engine, load, reason)
        if load.job is None and self.rng.random() < 0.3:
            engine.jobs[key] = Job(key, load.prompt, "local")

    def _ended(self, engine: Engine, load: Load, outcome: str) -> None:
        del engine.loads[load.key]
        load.waits = False
        self.world.outcomes[outcome] += 1
        if load.job is not None:
            load.job.load = None
        if load.blocks is not None:
            cached, load.blocks = load.blocks[: load.cached], None
            engine.drop(cached)

    # ------------------------------------------------------------------------------------- the turn's end

    def past_turn(self, name: str) -> None:
        """Some engine has had a turn of a conversation."""
        engine, turn = self.rng.choice(self.world.engines), prompt(*self.rng.choice(PROMPTS))
        blocks = engine.take(len(turn.labels), self.rng)
        for block, label in zip(blocks, turn.labels, strict=True):
            engine.write(block, label)
        self._retain(engine, HandoffKey(HandoffId(name), 0), turn, blocks)
        engine.drop(blocks)

    def finish_some(self) -> bool:
        """A request's answer is complete."""
        busy = [engine for engine in self.world.engines if engine.running]
        if busy:
            self.finish(self.rng.choice(busy), retain=self.rng.random() < 0.7)
        return bool(busy)

    def finish(self, engine: Engine, *, retain: bool) -> None:
        running = engine.running.pop(self.rng.randrange(len(engine.running)))
        blocks = running.blocks
        if retain and len(running.prompt.tokens) < MAX_TOKENS:
            answer = range(100, 100 + self.rng.randrange(1, 5))
            turn = prompt(running.prompt.salt, (*running.prompt.tokens, *answer)[:MAX_TOKENS])
            lacking = len(turn.labels) - len(blocks)
            if lacking <= len(engine.free):
                blocks = (*blocks, *engine.take(lacking, self.rng))
                for position in range(len(running.prompt.chain.blocks), len(turn.labels)):
                    engine.write(blocks[position], turn.labels[position])
                self._retain(engine, running.key, turn, blocks)
        engine.drop(blocks)

    def _retain(self, engine: Engine, key: HandoffKey, turn: Prompt, blocks: tuple[int, ...]) -> None:
        full = len(turn.chain.blocks)
        if full == 0:
            return
        kept = prompt(turn.salt, turn.tokens[: full * BLOCK_SIZE])
        engine.publish(turn, blocks[:full])
        engine.keep(blocks[:full])
        ref = HistoryRef(
            key=key,
            source=engine.identity,
            control_address=engine.address,
            n_tokens=kept.chain.n_tokens,
        )
        self.histories.append((ref, kept))
        retention: ev.Retention = self.rng.choice(("renewable", "fixed"))
        self.world.feed(engine, ev.Retained(key, kept.chain, blocks[:full], retention))
