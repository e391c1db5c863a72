"""Small worlds: a :class:`World` with scripted requests, evictors, failures and a store that may forget.

:class:`Small` knows which steps can be taken next and takes one; after each it asks every oracle. The search over
all orders of steps is in :mod:`hicache.testing.explore`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from hicache.control import ControlConfig, Controller, Request
from hicache.control.index import STORED
from hicache.control.slots import READY
from hicache.errors import InvariantError
from hicache.keys import PageKey
from hicache.records import Event, JobKind, Where
from hicache.testing.letters import GARBAGE, chain, name_of
from hicache.testing.world import (
    ANSWERED,
    MODES,
    NAMESPACE,
    RAN,
    Grant,
    World,
    WrongError,
)

ORACLES = frozenset({"bytes", "check", "liveness", "contract"})

Step = tuple[str | int, ...]
"""One thing that happens: a verb and its numbers. Deterministic, so a list of them can be run again."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A request id that lives once for each of ``prompts``.

    prompts: one letter a page. chunk: publishes every so many pages (0: all at once). computed: leading pages the
    engine has already. arriving: loads pages that are still on their way. abort, preempt: whether that may happen,
    at every stage.
    """

    prompts: tuple[str, ...]
    chunk: int = 0
    computed: int = 0
    arriving: bool = True
    abort: bool = False
    preempt: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What exists in a small world and what may happen there.

    stored: prompts in the store at first. evictors: tiers from which an operator evicts. fails: kinds of Jobs that
    may fail. stuck: kinds of Jobs that may get stuck, ``stuck_jobs`` of them in all. loses: the store may evict.
    repeats: a Done may come twice. eager: Jobs are taken and events delivered after every step; else these are
    steps of their own.
    """

    config: ControlConfig
    actors: tuple[Actor, ...]
    stored: tuple[str, ...] = ()
    store_slots: int = 0
    evictors: tuple[Where, ...] = ()
    fails: frozenset[JobKind] = frozenset(JobKind)
    stuck: frozenset[JobKind] = frozenset()
    stuck_jobs: int = 0
    loses: bool = False
    repeats: bool = False
    eager: bool = True


class Frozen:
    """A clock that stands still."""

    def __call__(self) -> float:
        """No time passes."""
        return 0.0


@dataclass(slots=True)
class Life:
    """Where an actor is: idle, open, loading or having (its good pages, then what it computed)."""

    phase: str = "idle"
    round: int = 0
    upto: int = 0
    good: int = 0
    preempted: bool = False
    request: Request | None = None
    grant: Grant | None = None


class Small:
    """A world, its actors and the steps they can take."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.controller = Controller(rules.config, Frozen())
        stored = {key for prompt in rules.stored for key in chain(prompt)}
        self.world = World(
            self.controller, stored=stored, store_slots=rules.store_slots, evicting=rules.loses
        )
        self.lives = [Life() for _ in rules.actors]
        self.stuck = rules.stuck_jobs
        self.orphans: frozenset[PageKey] = frozenset()
        self.seen = 0  # id of the last Job looked at

    # ---- steps

    def steps(self) -> Iterator[Step]:
        """Everything that can happen next."""
        for number, (actor, life) in enumerate(zip(self.rules.actors, self.lives, strict=True)):
            yield from ((verb, number) for verb in self._verbs(actor, life))
        for where in self.rules.evictors:
            if READY in self.controller.books.tiers[where].slots.state:
                yield "evict", int(where)
        if self.rules.loses:
            yield from (("lose", n) for n, key in enumerate(sorted(self.world.store[0])) if self._leaf(key))
        if not self.rules.eager:
            if self.controller.books.ledger.outbox:
                yield ("take",)
            if self.controller.books.events:
                yield ("poll",)
        yield from self._work()

    @staticmethod
    def _verbs(actor: Actor, life: Life) -> Iterator[str]:
        if life.phase == "idle":
            if life.round < len(actor.prompts):
                yield "open"
            return
        if life.phase == "open":
            yield "load"
        elif life.phase == "having":
            yield "publish" if life.upto < len(actor.prompts[life.round]) else "close"
        if actor.abort:
            yield "abort"
        if actor.preempt and life.phase != "open" and not life.preempted:
            yield "preempt"

    def _leaf(self, key: PageKey) -> bool:
        return not any(name_of(other)[:-1] == name_of(key) for other in self.world.store[0])

    def _work(self) -> Iterator[Step]:
        rules, world = self.rules, self.world
        for job, task in world.tasks.items():
            kind, pages = task.job.kind, task.job.pages or len(task.job.keys)
            modes = MODES if kind in rules.fails else MODES[:1]
            for shard in range(world.shards):
                if task.state[shard] == RAN:
                    yield "done", job, shard
                elif world.may_run(task, shard):
                    for mode in modes[:2] if pages == 1 else modes:
                        yield "run", job, shard, mode
                if (
                    task.state[shard] != ANSWERED
                    and kind in rules.stuck
                    and self.stuck
                    and task.lost[shard] is None
                ):
                    yield "stuck", job, shard, 0
                    if pages > 1 and world.may_run(task, shard):
                        yield "stuck", job, shard, 1
                if (
                    rules.repeats
                    and task.state[shard] == ANSWERED
                    and job in self.controller.books.ledger.live
                ):
                    yield "done", job, shard

    def perform(self, step: Step, oracles: frozenset[str] = ORACLES) -> None:
        """Let it happen, then look whether all is well."""
        try:
            breaks = self.controller.books.tiers.breaks
            events = self._perform(step)
            if self.rules.eager:
                self.world.take()
                events = [*events, *self.controller.apply()]
            self._hear(events)
            orphaning = breaks != self.controller.books.tiers.breaks or (
                step[0] == "load" and self.rules.actors[int(step[1])].computed > 0
            )
            self.check(oracles, orphaning=orphaning)
        except InvariantError as error:
            raise WrongError("check", str(error)[:400]) from error

    def _perform(self, step: Step) -> list[Event]:
        world, controller = self.world, self.controller
        match step:
            case ("run", int(job), int(shard), str(mode)):
                world.run(job, shard, mode)
            case ("done", int(job), int(shard)):
                return controller.apply([world.answer(job, shard)])
            case ("stuck", int(job), int(shard), int(came)):
                self.stuck -= 1
                return controller.apply([world.give_up(job, shard, came)])
            case ("take",):
                world.take()
            case ("poll",):
                return controller.apply()
            case ("evict", int(where)):
                controller.evict(Where(where), 1)
            case ("lose", int(number)):
                world.lose(sorted(world.store[0])[number])
            case (str(verb), int(number)):
                self._act(verb, number)
        return []

    def _act(self, verb: str, number: int) -> None:
        actor, life = self.rules.actors[number], self.lives[number]
        if verb == "open":
            life.request = self.controller.open(number, NAMESPACE, chain(actor.prompts[life.round]))
            life.phase, life.upto, life.good, life.preempted = "open", 0, 0, False
            return
        request = life.request
        assert request is not None
        if verb == "load":
            self._load(actor, life, request)
        elif verb == "publish":
            assert life.grant is not None
            pages = len(request.keys)
            life.upto = min(life.upto + (actor.chunk or pages), pages)
            for page in range(life.good, life.upto):
                life.grant.fill(page, request.keys[page])
            life.good = max(life.good, life.upto)
            request.publish(life.upto, life.grant.ids)
        else:
            if life.grant is not None:
                life.grant.released, life.grant = True, None
            if verb == "preempt":
                request.release_endpoint()
                life.phase, life.upto, life.good, life.preempted = "open", 0, 0, True
            else:
                request.close(abort=verb == "abort")
                life.phase, life.request = "idle", None
                life.round += 1

    def _load(self, actor: Actor, life: Life, request: Request) -> None:
        life.grant = self.world.grant(request.handle, len(request.keys))
        for page in range(actor.computed):
            life.grant.fill(page, request.keys[page])
        life.good = actor.computed
        match = request.match(actor.computed)
        load = request.load(match, life.grant.ids[actor.computed :], arriving=actor.arriving)
        if load.pages > match.pages:
            raise WrongError("contract", "a load gives more than was promised", load=load, match=match)
        life.phase = "loading" if load.pages else "having"

    def _hear(self, events: list[Event]) -> None:
        for event in self.world.see(events):
            number = next(
                (
                    n
                    for n, life in enumerate(self.lives)
                    if life.request and life.request.handle == event.handle
                ),
                None,
            )
            life = self.lives[number] if number is not None else None
            if life is None or life.grant is None or life.request is None or life.phase != "loading":
                raise WrongError("contract", "a load that nobody waits for", event=event)
            self.world.check_loaded(event, life.grant, life.request.keys)
            life.phase, life.good = "having", event.start + event.good

    # ---- oracles

    def check(self, oracles: frozenset[str] = ORACLES, *, orphaning: bool) -> None:
        """Bytes, the books, orphans, memos and liveness."""
        self.world.check_bytes()
        if "bytes" in oracles:
            self._check_stored()
        if "check" in oracles:
            self.world.check_books()
            self._check_chains(orphaning=orphaning)
        if "contract" in oracles:
            self._check_memos()
        if "liveness" in oracles:
            self._check_liveness()

    def _check_liveness(self) -> None:
        books = self.controller.books
        if not self.controller.idle:
            if not books.ledger.outbox and next(self._work(), None) is None:
                raise WrongError("liveness", "the Jobs wait for each other")
            return
        self.world.check_quiet()
        if not books.events:
            if any(life.phase == "loading" for life in self.lives):
                raise WrongError("liveness", "a load never ends")
            if any(grant.released for grant in self.world.grants.values()):
                raise WrongError("liveness", "endpoint places are never given back")

    def _check_chains(self, *, orphaning: bool) -> None:
        books = self.controller.books
        index, tiers = books.index, books.tiers
        orphans = set()
        for key, row in index.pages():
            if not index.resident(row):
                continue
            parent = index.parents[row]
            above = index.keys[parent] if parent >= 0 else b""
            if name_of(above or GARBAGE) != (name_of(key)[:-1] or "garbage"):
                raise WrongError("check", "a page hangs on another's parent", key=name_of(key))
            if tiers.orphaned(row):
                orphans.add(key)
        if not orphaning and not orphans <= self.orphans:
            raise WrongError(
                "check", "an eviction or a reservation made an orphan", keys=orphans - self.orphans
            )
        self.orphans = frozenset(orphans)
        fresh = [live.job for job, live in books.ledger.live.items() if job > self.seen]
        for job in fresh:
            if job.kind in (JobKind.DOWN, JobKind.WRITE) and any(
                orphans.intersection(s.keys) for s in job.spans
            ):
                raise WrongError("check", "an orphan is written down", job=job.id)
        self.seen = max((job.id for job in fresh), default=self.seen)

    def _check_memos(self) -> None:
        """What ``match`` remembers of a run is true, by its own test of whether it still holds."""
        index, tiers = self.controller.books.index, self.controller.books.tiers
        for life in self.lives:
            request = life.request
            if request is None or request.memo.breaks != tiers.breaks:
                continue
            memo, rows = request.memo, [index.find(key) for key in request.keys]
            end = memo.end
            while end > memo.start and not (rows[end - 1] >= 0 and index.resident(rows[end - 1])):
                end -= 1
            if not all(row >= 0 and index.resident(row) for row in rows[memo.start : end]):
                raise WrongError("contract", "a remembered run has a hole", handle=request.handle)

    def _check_stored(self) -> None:
        books = self.controller.books
        if self.rules.loses:
            return
        for key, row in books.index.pages():
            if books.index.flags[row] & STORED and any(key not in records for records in self.world.store):
                raise WrongError("bytes", "a page is marked stored that is not", key=name_of(key))

    @property
    def over(self) -> bool:
        """True when no request and no Job is left, so that eviction must be able to empty everything."""
        return self.controller.idle and all(life.request is None for life in self.lives)

    def snapshot(self) -> Hashable:
        """The whole state: equal for two histories with the same future."""
        lives = tuple(
            (
                life.phase,
                life.round,
                life.upto,
                life.good,
                life.preempted,
                life.grant.base if life.grant else -1,
            )
            for life in self.lives
        )
        return self.controller.snapshot(), self.world.snapshot(), lives, self.stuck
