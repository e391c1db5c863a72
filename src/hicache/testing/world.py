"""A small world around the real Controller: a data plane whose bytes are page keys, and engines that live in it.

The content of a slot, an endpoint place or a record is the key of the page whose bytes were last put there, or
GARBAGE. Copies move content when they *run*; their Done is delivered later, by another step. So a slot that was
reused too early, a copy that started too early or a failure taken for completion leaves wrong content behind, and
:class:`World` finds it wherever content is looked at. It obeys the contract of workers and nothing more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from hicache.control import Controller
from hicache.control.audit import handle_ranks
from hicache.control.slots import FREE, READY
from hicache.errors import InvariantError
from hicache.keys import Namespace, PageKey
from hicache.records import (
    TOUCHES_ENDPOINT,
    Done,
    EndpointFree,
    Event,
    Job,
    JobKind,
    Loaded,
    Reason,
    Span,
    Stored,
    Where,
)
from hicache.testing.letters import GARBAGE, name_of

WAITS, RAN, ANSWERED = range(3)
"""What one shard has done of a Job."""

NAMESPACE = Namespace.of({"weights": "w"})
MODES = ("well", "first", "all")
"""How a Job runs: every page arrives, the first one does not, none does."""

_STRIDE = 1 << 12


class WrongError(AssertionError):
    """An oracle of the world has found something; ``oracle`` says which: bytes, check, liveness or contract."""

    def __init__(self, oracle: str, message: str, **context: object) -> None:
        self.oracle = oracle
        values = " ".join(f"{name}={value}" for name, value in context.items())
        super().__init__(f"{oracle}: {message} [{values}]")


@dataclass(slots=True)
class Grant:
    """Endpoint places that an engine uses for one handle until it gives them back: ``base .. base + pages``."""

    handle: int
    base: int
    content: list[list[PageKey]]  # by shard, by page
    released: bool = False
    free: set[JobKind] = field(default_factory=set)

    @property
    def ids(self) -> range:
        """The places, in page order."""
        return range(self.base, self.base + len(self.content[0]))

    def fill(self, page: int, content: PageKey) -> None:
        """The engine computes a page: on every shard."""
        for row in self.content:
            row[page] = content


@dataclass(slots=True)
class Task:
    """A Job in the hands of the data plane, until it may be forgotten."""

    job: Job
    state: list[int]
    bad: list[dict[PageKey, Reason]]
    found: list[int]
    lost: list[dict[PageKey, Reason] | None]  # given up: what had not come by then
    came: list[int]  # pages that had


class World:
    """Memory, store and workers of all shards. Every look at content is an oracle."""

    def __init__(
        self,
        controller: Controller,
        *,
        stored: Iterable[PageKey] = (),
        store_slots: int = 0,
        evicting: bool = False,
    ) -> None:
        books = controller.books
        self.controller = controller
        self.shards = books.config.shards
        self.memory = {
            tier.where: [[GARBAGE] * tier.slots.total for _ in range(self.shards)] for tier in books.tiers.all
        }
        self.store: list[set[PageKey]] = [set(stored) for _ in range(self.shards)]
        self.store_slots = store_slots
        self.evicting = evicting  # the store may lose records, so an absent parent is no fault
        self.grants: dict[int, Grant] = {}
        self.tasks: dict[int, Task] = {}

    # ---- the engine's memory

    def grant(self, handle: int, pages: int) -> Grant:
        """Give an engine the first free endpoint places: the sooner they are reused, the sooner a fault shows."""
        base = next(n for n in range(0, _STRIDE * (len(self.grants) + 1), _STRIDE) if n not in self.grants)
        grant = Grant(handle, base, [[GARBAGE] * pages for _ in range(self.shards)])
        self.grants[base] = grant
        return grant

    def see(self, events: Sequence[Event]) -> list[Loaded]:
        """What an adapter does with events: reuse endpoint places, look at loaded pages. Returns the Loaded ones."""
        loaded = []
        for event in events:
            if isinstance(event, EndpointFree):
                self._freed(event)
            elif isinstance(event, Loaded):
                loaded.append(event)
            elif isinstance(event, Stored) and event.tier is Where.STORE and not self.evicting:
                for key, records in ((key, records) for key in event.keys for records in self.store):
                    if key not in records:
                        raise WrongError("bytes", "a page is called stored that is not", key=name_of(key))
        return loaded

    def _freed(self, event: EndpointFree) -> None:
        for grant in list(self.grants.values()):
            if grant.handle == event.handle and grant.released:
                grant.free.add(event.kind)
                if event.kind is JobKind.SAVE:
                    for row in grant.content:
                        row[:] = [GARBAGE] * len(row)
                if grant.free == TOUCHES_ENDPOINT:
                    del self.grants[grant.base]

    # ---- Jobs

    def take(self) -> None:
        """Take what the control plane wants done, and forget what it says may be forgotten."""
        batch = self.controller.take_jobs()
        for number in batch.applied:
            task = self.tasks.pop(number, None)
            if task is None or any(state != ANSWERED for state in task.state):
                raise WrongError("contract", "told to forget a Job that has not ended here", job=number)
        for job in batch.jobs:
            self.tasks[job.id] = Task(
                job,
                [WAITS] * self.shards,
                [{} for _ in range(self.shards)],
                [0] * self.shards,
                [None] * self.shards,
                [0] * self.shards,
            )
        for task in self.tasks.values():
            if WAITS in task.state and not self.tasks.keys() >= set(task.job.after):
                raise WrongError("contract", "a Job follows Jobs that are not remembered", job=task.job.id)

    def may_run(self, task: Task, shard: int) -> bool:
        """True when every Job it follows has ended in this shard, or was given up there."""
        return task.state[shard] == WAITS and all(
            self.tasks[before].state[shard] != WAITS or self.tasks[before].lost[shard] is not None
            for before in task.job.after
        )

    def run(self, job: int, shard: int, mode: str) -> None:
        """Move the bytes of a Job in one shard; the Done comes later."""
        task = self.tasks[job]
        task.state[shard] = RAN
        kind = task.job.kind
        if kind is JobKind.LOOKUP:
            keys, records = task.job.keys, self.store[shard]
            run = next((n for n, key in enumerate(keys) if key not in records), len(keys))
            task.found[shard] = run if mode == "well" else max(run - 1, 0) if mode == "first" else 0
            return
        self._move(task, shard, mode, task.job.pages)

    def _move(self, task: Task, shard: int, mode: str, upto: int) -> None:
        """Move the pages up to ``upto`` that have not come yet."""
        kind, bad, came = task.job.kind, task.bad[shard], task.came[shard]
        task.came[shard] = upto
        upstream = self._failed_before(task, shard)
        fails = mode != "well"
        pages = [(span, n) for span in task.job.spans for n in range(len(span.keys))]
        for page, (span, n) in list(enumerate(pages))[came:upto]:
            key = span.keys[n]
            parent = task.job.parents[page] if kind is JobKind.WRITE else GARBAGE
            if key in upstream or parent in upstream:
                bad[key] = Reason.UPSTREAM
            elif (reason := self._copy(task, shard, span, n, fails=fails)) is not None:
                bad[key] = reason
                fails = fails and mode == "all"

    def _failed_before(self, task: Task, shard: int) -> set[PageKey]:
        failed: set[PageKey] = set()
        for before in task.job.after:
            earlier = self.tasks[before]
            failed.update(earlier.bad[shard], earlier.lost[shard] or ())
        return failed

    def _copy(self, task: Task, shard: int, span: Span, n: int, *, fails: bool) -> Reason | None:
        """Copy one page; one that fails leaves torn bytes where it was going."""
        key, records = span.keys[n], self.store[shard]
        content = key if key in records else GARBAGE
        if span.source is not Where.STORE:
            row, at = self._place(task.job, shard, span.source, span.sources[n])
            content = row[at]
        if span.target is Where.STORE:
            return Reason.FAILED if fails else self._record(task, shard, key, content)
        row, at = self._place(task.job, shard, span.target, span.targets[n])
        row[at] = GARBAGE if fails else content
        missing = span.source is Where.STORE and key not in records
        return Reason.MISS if missing else Reason.FAILED if fails else None

    def _place(self, job: Job, shard: int, where: Where, at: int) -> tuple[list[PageKey], int]:
        if where is not Where.ENDPOINT:
            return self.memory[where][shard], at
        grant = self.grants.get(at - at % _STRIDE)
        if grant is None or grant.handle != job.handle or job.kind in grant.free:
            raise WrongError(
                "bytes", "a copy touches endpoint places that were free", job=job.id, kind=job.kind
            )
        return grant.content[shard], at - grant.base

    def _record(self, task: Task, shard: int, key: PageKey, content: PageKey) -> Reason | None:
        job, records = task.job, self.store[shard]
        parent = dict(zip(job.spans[0].keys, job.parents, strict=True))[key]
        if content != key:
            raise WrongError("bytes", "wrong bytes for the store", key=name_of(key), bytes=name_of(content))
        if job.namespace is None or (parent not in records and parent != job.namespace.root):
            if not self.evicting and not task.bad[shard]:
                raise WrongError("bytes", "a record comes before its parent", key=name_of(key))
            return Reason.PARENT_ABSENT
        if key not in records and self.store_slots and len(records) >= self.store_slots:
            return Reason.REFUSED
        records.add(key)
        return None

    def lose(self, key: PageKey) -> None:
        """The store evicts a record."""
        for records in self.store:
            records.discard(key)

    def answer(self, job: int, shard: int) -> Done:
        """What the shard says at the end of the Job."""
        task = self.tasks[job]
        task.state[shard] = ANSWERED
        return Done(job, shard, dict(task.bad[shard]), task.found[shard])

    def give_up(self, job: int, shard: int, came: int = 0) -> Done:
        """The shard says that the Job does not end, and that ``came`` pages have come; a real Done may follow.

        The bytes of the others may still land.
        """
        task = self.tasks[job]
        if task.state[shard] == WAITS:
            self._move(task, shard, "well", came)
        keys = [key for span in task.job.spans for key in span.keys]
        lost = {**task.bad[shard], **dict.fromkeys(keys[task.came[shard] :], Reason.DEADLINE)}
        task.lost[shard] = lost
        return Done(job, shard, lost, task.found[shard], stuck=True)

    # ---- oracles

    def check_bytes(self) -> None:
        """A READY page holds its own bytes on every shard. Free slots are filled with garbage, as a debugger would."""
        index = self.controller.books.index
        for tier in self.controller.books.tiers.all:
            pages, rows = tier.slots.page, self.memory[tier.where]
            for slot, state in enumerate(tier.slots.state):
                if state == READY:
                    key = index.keys[pages[slot]]
                    for row in rows:
                        if row[slot] != key:
                            raise WrongError(
                                "bytes",
                                "a READY page holds other bytes",
                                key=name_of(key),
                                bytes=name_of(row[slot]),
                            )
                elif state == FREE:
                    for row in rows:
                        row[slot] = GARBAGE

    def check_loaded(self, event: Loaded, grant: Grant, keys: Sequence[PageKey]) -> None:
        """The engine has every page that the event calls good."""
        for page in range(event.start, event.start + event.good):
            for row in grant.content:
                if row[page] != keys[page]:
                    raise WrongError(
                        "bytes", "a loaded page is another", key=name_of(keys[page]), bytes=name_of(row[page])
                    )

    def check_books(self) -> None:
        """The control plane's own audit."""
        try:
            self.controller.check()
        except InvariantError as error:
            raise WrongError("check", str(error)[:400]) from None

    def check_quiet(self) -> None:
        """When no Job is live, nothing is left of any: nobody waits, closes, fills, pins or stores."""
        books = self.controller.books
        if books.storing:
            raise WrongError("liveness", "pages are being stored by nobody", pages=len(books.storing))
        for request in books.requests.values():
            if request.closed or request.due or request.lookup or request.fetch or request.jobs:
                raise WrongError("liveness", "a request waits for nothing", handle=request.handle)
        held = {pin for request in books.requests.values() if request.hold for pin in request.hold.pins()}
        for tier in books.tiers.all:
            for slot, state in enumerate(tier.slots.state):
                if (state not in (FREE, READY) or tier.slots.pins[slot]) and (tier, slot) not in held:
                    raise WrongError("liveness", "a slot is not free again", tier=tier.where.name, slot=slot)

    def drain(self, mode: str) -> None:
        """With no request left, eviction empties every tier, whether what it writes down arrives or not."""
        self.take()
        for _ in range(8 * sum(tier.slots.total for tier in self.controller.books.tiers.all) + 8):
            for tier in self.controller.books.tiers.all:
                self.controller.evict(tier.where, tier.slots.total)
            self.take()
            self.finish(mode)
            if all(tier.slots.free == tier.slots.total for tier in self.controller.books.tiers.all):
                self.check_books()
                return
        raise WrongError("liveness", "eviction cannot empty a tier", pools=self.controller.pools())

    def finish(self, mode: str) -> None:
        """Run all Jobs to their end, in an order that is allowed."""
        while not self.controller.idle:
            ready = [
                (number, shard)
                for number, task in self.tasks.items()
                for shard in range(self.shards)
                if self.may_run(task, shard) or task.state[shard] == RAN
            ]
            if not ready:
                raise WrongError("liveness", "the Jobs wait for each other")
            for number, shard in ready:
                if self.tasks[number].state[shard] == WAITS:
                    self.run(number, shard, mode)
                self.see(self.controller.apply([self.answer(number, shard)]))
                self.check_bytes()
            self.take()

    def snapshot(self) -> Hashable:
        """The state of the data plane; Jobs and handles by rank, the same ranks as in the controller's snapshot."""
        books = self.controller.books
        live = books.ledger.live
        followed = {before for one in live.values() for before in one.job.after}
        ranks = {job: n for n, job in enumerate(sorted(live.keys() | (self.tasks.keys() & followed)))}
        handles = handle_ranks(books)
        tasks: list[Hashable] = []
        for job in ranks:
            after = (
                tuple(ranks[before] for before in live[job].job.after if before in ranks)
                if job in live
                else None
            )
            task = self.tasks.get(job)
            if task is None:
                tasks.append((after, None))
            else:
                bad, lost = (
                    tuple(None if row is None else frozenset(row.items()) for row in rows)
                    for rows in (task.bad, task.lost)
                )
                tasks.append((after, tuple(task.state), bad, tuple(task.found), lost, tuple(task.came)))
        memory = tuple(
            tuple(row[slot] for row in self.memory[tier.where])
            for tier in books.tiers.all
            for slot, state in enumerate(tier.slots.state)
            if state not in (FREE, READY)
        )
        grants = tuple(
            (
                base,
                handles.get(grant.handle, -1),
                tuple(map(tuple, grant.content)),
                grant.released,
                frozenset(grant.free),
            )
            for base, grant in sorted(self.grants.items())
        )
        return tuple(tasks), memory, grants, tuple(map(frozenset, self.store))
