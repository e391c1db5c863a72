"""A random engine in the manner of vLLM: asks again and again, loads late, preempts, aborts, fails, comes back."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hicache.control import ControlConfig, Controller, Request
from hicache.control.slots import READY
from hicache.keys import Namespace, PageKey, page_keys
from hicache.records import Done, Event, JobKind, Match
from hicache.testing.small import Frozen
from hicache.testing.world import RAN, Grant, World, WrongError

NAMESPACES = (
    Namespace.of({"weights": "one"}),
    Namespace.of({"weights": "one", "salt": "tenant"}),
    Namespace.of({"weights": "two"}, durable=False),
)
STORE_JOBS = frozenset({JobKind.LOOKUP, JobKind.FETCH, JobKind.WRITE})
MAY_STICK = STORE_JOBS | {JobKind.DOWN}


@dataclass
class Habits:
    """How often things go wrong, and how large the engine is."""

    steps: int
    live: int = 6
    blocks: int = 60
    prompt: int = 12
    failing_store: float = 0.05
    failing_copy: float = 0.01
    sticking: float = 0.0
    own_prefix: float = 0.0
    losing: bool = False
    detaching: bool = False
    arriving: bool = True


@dataclass(eq=False)
class Sequence:
    """One request in the engine."""

    id: int
    namespace: Namespace
    tokens: list[int]
    prompt: int
    request: Request
    phase: str = "waiting"
    match: Match | None = None  # may be stale when it is used
    patience: int = 0
    computed: int = 0
    good: int = 0
    grant: Grant | None = None

    @property
    def keys(self) -> list[PageKey]:
        return page_keys(self.namespace.root, self.tokens, 2)


@dataclass
class Driver:
    config: ControlConfig
    seed: int
    habits: Habits
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.controller = Controller(self.config, Frozen())
        habits = self.habits
        self.world = World(
            self.controller,
            store_slots=3 * (self.config.device_slots + self.config.host_slots),
            evicting=habits.losing or habits.detaching,
        )
        self.running: dict[int, Sequence] = {}  # by handle
        self.documents = [
            [self.random.randrange(1000) for _ in range(2 * habits.prompt)]
            for _ in range(3 + habits.live // 4)
        ]
        self.answered: list[Done] = []
        self.attached = self.config.store

    # ---- a run

    def run(self) -> Counter[str]:
        verbs = [
            (self.arrive, 4),
            (self.ask, 8),
            (self.engine_step, 8),
            (self.work, 10),
            (self.deliver, 8),
            (self.abort, 0.6),
            (self.preempt, 0.6),
            (self.operate, 1.5),
        ]
        plan = self.random.choices(*zip(*verbs, strict=True), k=self.habits.steps)
        for number, verb in enumerate(plan):
            try:
                verb()
                self.world.check_bytes()
                if number % 16 == 0:
                    self.controller.check()
            except BaseException:
                print(f"seed={self.seed} step={number} verb={verb.__name__} {self.config}")
                raise
        self.finish()
        return self.counts

    def finish(self) -> None:
        for sequence in list(self.running.values()):
            self.leave(sequence, abort=self.random.random() < 0.3)
        self.take()
        self.answered.clear()
        self.world.finish("well")
        self.hear(self.controller.apply())
        self.controller.check()
        self.world.check_quiet()
        assert not self.world.grants, "endpoint places are never given back"
        self.world.drain(self.random.choice(("well", "all")))

    def hear(self, events: list[Event]) -> None:
        for event in self.world.see(events):
            sequence = self.running.get(event.handle)
            if sequence is None or sequence.phase != "loading" or sequence.grant is None:
                raise WrongError("contract", "a load that nobody waits for", event=event)
            self.world.check_loaded(event, sequence.grant, sequence.request.keys)
            sequence.good, sequence.phase = event.start + event.good, "computing"
            self.counts["pages hit"] += event.good
            self.counts["loads with a bad page"] += event.good < event.pages

    def take(self) -> None:
        before = set(self.world.tasks)
        self.world.take()
        for number in self.world.tasks.keys() - before:
            kind = self.world.tasks[number].job.kind
            self.counts[kind.value] += 1
            if kind in STORE_JOBS and not self.attached:
                raise WrongError("contract", "a store that is not there is asked", kind=kind)

    def pick(self, *phases: str) -> Sequence | None:
        found = [one for one in self.running.values() if one.phase in phases]
        return self.random.choice(found) if found else None

    # ---- requests

    def arrive(self) -> None:
        open_ids = {one.id for one in self.running.values()}
        if len(open_ids) >= self.habits.live:
            return
        id_ = self.random.choice([n for n in range(self.habits.live + 2) if n not in open_ids])
        document = self.random.choice(self.documents)
        shared = 2 * self.random.randint(0, len(document) // 2)
        own = [self.random.randrange(3) for _ in range(self.random.randint(0, 5))]
        tokens = document[:shared] + own
        (namespace,) = self.random.choices(NAMESPACES, (6, 2, 1))
        keys = page_keys(namespace.root, tokens, 2)
        request = self.controller.open(id_, namespace, keys)
        assert self.controller.open(id_, namespace, keys) is request
        assert request.handle not in self.running
        sequence = Sequence(id_, namespace, tokens, len(tokens), request)
        self.running[request.handle] = sequence
        self.counts["requests"] += 1

    def ask(self) -> None:
        """The scheduler's turn for one waiting request: ask, perhaps wait, or load what an earlier answer said."""
        sequence = self.pick("waiting")
        if sequence is None:
            return
        if sequence.match is None:
            if self.random.random() < self.habits.own_prefix:
                sequence.computed = self.random.randint(0, len(sequence.request.keys))
            match = sequence.request.match(sequence.computed)
            self.compare(sequence, match)
            if match.pending and sequence.patience < 3:
                sequence.patience += 1
                return
            sequence.match = match
            if self.random.random() < 0.5:
                return  # the targets come in a later step
        pages = len(sequence.request.keys) + 4
        if pages > self.free_blocks():
            victim = self.pick("computing", "loading")
            if victim is not None:
                self.make_wait(victim)
            return
        self.start(sequence, sequence.match, pages)

    def free_blocks(self) -> int:
        return self.habits.blocks - sum(len(grant.ids) for grant in self.world.grants.values())

    def start(self, sequence: Sequence, match: Match, pages: int) -> None:
        request = sequence.request
        grant = sequence.grant = self.world.grant(request.handle, pages)
        for page in range(sequence.computed):
            grant.fill(page, request.keys[page])
        places = match.pages if self.random.random() < 0.9 else self.random.randint(0, match.pages)
        target = grant.ids[match.start : match.start + places]
        load = request.load(match, target, arriving=self.habits.arriving)
        assert load.start == match.start
        assert load.pages <= places
        self.counts["loads"] += load.pages > 0
        self.counts["loads that gave less"] += load.pages < places
        sequence.match, sequence.good = None, sequence.computed
        sequence.phase = "loading" if load.pages else "computing"

    def compare(self, sequence: Sequence, match: Match) -> None:
        """The remembered answer is what a fresh look says."""
        tiers, index = self.controller.books.tiers, self.controller.books.index
        memory = ready = 0
        for key in sequence.request.keys[sequence.computed :]:
            row = index.find(key)
            slots = [(tier, tier.at[row]) for tier in tiers.all if row >= 0 and tier.at[row] >= 0]
            if not slots:
                break
            ready += ready == memory and any(tier.slots.state[slot] == READY for tier, slot in slots)
            memory += 1
        if (match.memory, match.ready) != (memory, ready):
            raise WrongError(
                "contract", "match does not tell what is there", match=match, memory=memory, ready=ready
            )

    def engine_step(self) -> None:
        """Some running requests compute a chunk; those behind their prompt generate; some finish."""
        for sequence in [one for one in self.running.values() if one.phase == "computing"]:
            if self.random.random() < 0.3:
                continue
            request, grant = sequence.request, sequence.grant
            assert grant is not None
            upto = min(sequence.good + self.random.randint(0, 4), len(request.keys))
            for page in range(sequence.good, upto):
                grant.fill(page, request.keys[page])
            sequence.good = max(sequence.good, upto)
            request.publish(sequence.good, grant.ids)
            if sequence.good < len(request.keys):
                continue
            if len(request.keys) < len(grant.ids) and self.random.random() < 0.6:
                known = len(request.keys)
                sequence.tokens += [self.random.randrange(3) for _ in range(self.random.randint(1, 4))]
                request.extend(sequence.keys[known : len(grant.ids)])
            elif self.random.random() < 0.5:
                self.leave(sequence, abort=False)
                self.counts["finished"] += 1

    def leave(self, sequence: Sequence, *, abort: bool) -> None:
        if sequence.grant is not None:
            sequence.grant.released = True
        del self.running[sequence.request.handle]
        sequence.request.close(abort=abort)
        sequence.request.close(abort=abort)

    def abort(self) -> None:
        sequence = self.pick("waiting", "loading", "computing")
        if sequence is not None:
            self.leave(sequence, abort=True)
            self.counts["aborted"] += 1

    def preempt(self) -> None:
        sequence = self.pick("loading", "computing")
        if sequence is not None:
            self.make_wait(sequence)

    def make_wait(self, sequence: Sequence) -> None:
        assert sequence.grant is not None
        sequence.grant.released, sequence.grant = True, None
        sequence.request.release_endpoint()
        sequence.phase, sequence.match, sequence.computed, sequence.good = "waiting", None, 0, 0
        self.counts["preempted"] += 1

    # ---- the data plane

    def work(self) -> None:
        self.take()
        ready = [
            (number, shard)
            for number, task in self.world.tasks.items()
            for shard in range(self.world.shards)
            if self.world.may_run(task, shard)
        ]
        self.random.shuffle(ready)
        for number, shard in ready[: self.random.randint(1, 6)]:
            task = self.world.tasks[number]
            store = task.job.kind in STORE_JOBS
            stuck = any(lost is not None for lost in task.lost)
            if task.job.kind in MAY_STICK and not stuck and self.random.random() < self.habits.sticking:
                self.counts["stuck"] += 1
                came = self.random.randrange(max(1, task.job.pages))
                self.hear(self.controller.apply([self.world.give_up(number, shard, came)]))
                continue
            if stuck and self.random.random() < 0.8:
                continue  # later
            fails = self.random.random() < (self.habits.failing_store if store else self.habits.failing_copy)
            self.world.run(number, shard, self.random.choice(("first", "all")) if fails else "well")

    def deliver(self) -> None:
        ran = [
            (number, shard)
            for number, task in self.world.tasks.items()
            for shard in range(self.world.shards)
            if task.state[shard] == RAN
        ]
        self.random.shuffle(ran)
        answers = [self.world.answer(*one) for one in ran[: self.random.randint(0, 6)]]
        self.answered += answers
        repeated = (
            self.random.choices(self.answered, k=2) if self.answered and self.random.random() < 0.3 else []
        )
        del self.answered[:-50]
        self.hear(self.controller.apply([*answers, *repeated]))

    def operate(self) -> None:
        """What an operator or the store does."""
        choice = self.random.randrange(5)
        if choice == 0:
            tier = self.random.choice(self.controller.books.tiers.all)
            self.controller.evict(tier.where, self.random.randint(1, 3))
        elif choice == 1:
            self.controller.flush()
        elif choice == 4 and self.random.random() < 0.2:
            self.counts["pages invalidated"] += self.controller.invalidate(self.random.choice(NAMESPACES))
        elif choice == 2 and self.habits.losing:
            records = sorted(self.world.store[0])
            for key in self.random.sample(records, len(records) // 4):
                self.world.lose(key)
        elif choice == 3 and self.habits.detaching and self.config.store:
            self.attached = not self.attached
            if self.attached:
                for records in self.world.store:
                    records.clear()  # another store
                self.controller.attach_store()
            else:
                self.world.take()  # what was emitted while the store was there may still run
                self.controller.detach_store()
