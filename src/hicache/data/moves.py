"""What each kind of Job does to bytes. Runs on a lane; knows nothing of threads, deadlines or other Jobs.

Every page starts as FAILED in its :class:`Answer` and is cleared once it is known good, so that whatever raises,
at whatever point, the answer is already right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hicache.data.copy.base import CopyEngine, Surface, Ticket
from hicache.data.pool import Pool
from hicache.data.scratch import Scratch, record_placements
from hicache.data.store.base import Corrupt, Hit, Iovec, Miss, ReadOutcome, Record, Store, WriteOutcome
from hicache.errors import InvariantError, UnavailableError
from hicache.keys import Namespace, PageKey, RecordKey
from hicache.layout import LAYOUTS
from hicache.records import Job, JobKind, Reason, Span, Where
from hicache.spec import CacheSpec, Full, usable

PAGES_A_CALL = 64
"""Pages in one call that reads: bounds what one raise costs, and how long a look-up waits behind a fetch."""

FETCH_FIRST = 8
"""Pages of a fetch's first call; the next ones double. If a call hangs, what came before it is not lost."""

WRITES_A_CALL = 256
"""Pages in one call that writes. Nothing waits for it, and what makes it durable is paid once."""

LOOKUP_FIRST, LOOKUP_MOST = 16, 1024
"""Pages in the first and in the largest batch of a look-up; each is twice the one before."""

_PAGE_FIRST = LAYOUTS["page_first"]
_WRITTEN = {
    WriteOutcome.PARENT_ABSENT: Reason.PARENT_ABSENT,
    WriteOutcome.NO_ROOM: Reason.REFUSED,
    WriteOutcome.FAILED: Reason.FAILED,
}

T = TypeVar("T")


class Endpoint(Protocol):
    """The engine's own memory. Endpoint ids in a Span are page numbers of the surface it gives."""

    def surface(self, handle: int | None, group: int) -> Surface:
        """The pages of a group as the engine holds them for this handle."""
        ...


@dataclass(frozen=True, slots=True)
class DataPlane:
    """What a worker works with: one shard's pools, endpoint, copy engine and store (if any)."""

    spec: CacheSpec
    pools: Mapping[Where, Pool]
    endpoint: Endpoint
    engine: CopyEngine
    store: Store | None = None
    shard: int = 0


@dataclass(slots=True)
class Answer:
    """What a Job has come to so far; complete and right at any moment.

    given_up: set from outside when nobody waits any more; no further call of the store is started then.
    """

    bad: dict[PageKey, Reason] = field(default_factory=dict)
    found: int = 0
    given_up: bool = False

    def expect(self, job: Job, failed: Collection[PageKey]) -> None:
        """Before a Job runs: no page has come, and those in ``failed`` never will."""
        for key in keys_of(job):
            self.bad[key] = Reason.UPSTREAM if key in failed else Reason.FAILED


def keys_of(job: Job) -> list[PageKey]:
    """Every page key a Job answers for, in order."""
    return [*job.keys, *(key for span in job.spans for key in span.keys)]


def _outcomes(answer: object, wanted: int, kinds: type[T] | tuple[type[T], ...]) -> list[T]:
    """The outcomes up to the first that is none; empty when the list is none, or too long to tell whose is whose."""
    if not isinstance(answer, list | tuple) or len(answer) > wanted:
        return []
    good: list[T] = []
    for outcome in answer:
        if not isinstance(outcome, kinds):
            break
        good.append(outcome)
    return good


def _broken(call: str, asked: int, good: int) -> UnavailableError:
    return UnavailableError(
        "a store gave fewer outcomes than it was asked for", call=call, asked=asked, good=good
    )


def _calls(
    rows: Sequence[tuple[PageKey, int]], size: int, answer: Answer, *, first: int | None = None
) -> Iterator[Sequence[tuple[PageKey, int]]]:
    """The rows of each call of a store, until the Job is given up; what is left then is late.

    ``first``: rows of the first call, if fewer; each takes twice as many as the one before, up to ``size``.
    """
    start, some = 0, min(first or size, size)
    while start < len(rows):
        if answer.given_up:
            for key, _ in rows[start:]:
                answer.bad[key] = Reason.DEADLINE
            return
        yield rows[start : start + some]
        start, some = start + some, min(2 * some, size)


class Moves:
    """Runs Jobs on one :class:`DataPlane`. May be called from several lanes, each with its own scratch."""

    def __init__(self, data: DataPlane) -> None:
        self._data = data
        self._readable = tuple(record_placements(group) for group in data.spec.groups)
        self._lengths = tuple({p.run_nbytes for p in readable.values()} for readable in self._readable)
        self._kinds = {
            JobKind.LOOKUP: self._lookup,
            JobKind.FETCH: self._fetch,
            JobKind.WRITE: self._write,
        }

    def run(self, job: Job, failed: Collection[PageKey], answer: Answer, scratch: Scratch) -> None:
        """Do ``job`` but for the pages in ``failed``. What it raises is the cause of the pages still FAILED.

        ``answer`` expects it (:meth:`Answer.expect`).
        """
        move = self._kinds.get(job.kind)
        if move is None:
            self._copy(job, failed, answer)
        else:
            move(job, failed, answer, scratch)

    # -- memory to memory

    def _surface(self, where: Where, handle: int | None, group: int) -> Surface:
        if where is Where.ENDPOINT:
            return self._data.endpoint.surface(handle, group)
        return self._data.pools[where].surface(group)

    def _copy(self, job: Job, failed: Collection[PageKey], answer: Answer) -> None:
        error: BaseException | None = None
        for span in job.spans:
            rows = [
                row for row in zip(span.keys, span.sources, span.targets, strict=True) if row[0] not in failed
            ]
            if not rows:
                continue
            try:
                self._copy_span(span, job.handle, [row[1] for row in rows], [row[2] for row in rows])
            except BaseException as raised:  # noqa: BLE001  (raised again after the other spans)
                error = error or raised
            else:
                for row in rows:
                    del answer.bad[row[0]]
        if error is not None:
            raise error

    def _copy_span(self, span: Span, handle: int | None, sources: list[int], targets: list[int]) -> None:
        """All groups at once; whatever raises, no copy runs any more when this returns."""
        tickets: list[Ticket] = []
        error: BaseException | None = None
        try:
            for group in range(len(self._data.spec.groups)):
                source = self._surface(span.source, handle, group)
                target = self._surface(span.target, handle, group)
                tickets.append(self._data.engine.submit(source, sources, target, targets))
        except BaseException as raised:  # noqa: BLE001  (raised again below)
            error = raised
        for ticket in tickets:
            try:
                ticket.wait()
            except BaseException as raised:  # noqa: BLE001  (raised again below)
                error = error or raised
        if error is not None:
            raise error

    # -- the store

    def _store_of(self, job: Job) -> tuple[Store, Namespace]:
        if self._data.store is None:
            raise UnavailableError("no store is attached", job=job.id, kind=job.kind.value)
        if job.namespace is None:
            raise InvariantError("a Job that touches the store names its namespace", job=job.id)
        return self._data.store, job.namespace

    def _lookup(self, job: Job, failed: Collection[PageKey], answer: Answer, scratch: Scratch) -> None:
        store, namespace = self._store_of(job)
        spec, shard = self._data.spec, self._data.shard
        groups = range(len(spec.groups))
        full = [group for group in groups if isinstance(spec.groups[group].rule, Full)]
        stop = next((i for i, key in enumerate(job.keys) if key in failed), len(job.keys))
        for key in job.keys[stop:]:
            answer.bad[key] = Reason.UPSTREAM
        present: list[list[bool]] = [[] for _ in groups]
        start, size = 0, LOOKUP_FIRST
        while start < stop and not answer.given_up:
            keys = job.keys[start : min(start + size, stop)]
            asked = [RecordKey(key, group, shard) for group in groups for key in keys]
            there = _outcomes(store.contains(namespace, asked), len(asked), bool)
            known = len(there) == len(asked)
            for group in groups:
                row = there[group * len(keys) : (group + 1) * len(keys)]
                present[group] += row
            answer.found = usable(spec, present)
            if not known:
                raise _broken("contains", len(asked), len(there))
            for key in keys:
                del answer.bad[key]
            start, size = start + len(keys), min(2 * size, LOOKUP_MOST)
            if any(not all(present[group]) for group in full):  # no boundary beyond a page that Full lacks
                break
        for key in job.keys[start:stop]:  # not asked for, and not bad either
            del answer.bad[key]

    def _fetch(self, job: Job, failed: Collection[PageKey], answer: Answer, scratch: Scratch) -> None:
        store, namespace = self._store_of(job)
        for span in job.spans:
            pool = self._data.pools[span.target]
            rows = [row for row in zip(span.keys, span.targets, strict=True) if row[0] not in failed]
            direct = all(self._direct(pool, group) for group in range(len(self._data.spec.groups)))
            size = PAGES_A_CALL if direct else scratch.pages
            for chunk in _calls(rows, size, answer, first=FETCH_FIRST):
                self._fetch_chunk((store, namespace), pool, chunk, answer, scratch)

    def _direct(self, pool: Pool, group: int) -> bool:
        """True when any record of the group fits a run of the pool exactly, so that it is read in place."""
        return self._lengths[group] == {pool.placement(group).run_nbytes}

    def _fetch_chunk(
        self,
        store: tuple[Store, Namespace],
        pool: Pool,
        rows: Sequence[tuple[PageKey, int]],
        answer: Answer,
        scratch: Scratch,
    ) -> None:
        groups = range(len(self._data.spec.groups))
        asked: list[RecordKey] = []
        into: list[Iovec] = []
        for number, (key, slot) in enumerate(rows):
            for group in groups:
                asked.append(RecordKey(key, group, self._data.shard))
                run = pool.run(group, slot) if self._direct(pool, group) else None
                into.append([scratch.page(group, number).data if run is None else run])
        read = store[0].read(store[1], asked, into)
        got: list[ReadOutcome] = _outcomes(read, len(asked), (Hit, Miss, Corrupt))
        converted: list[PageKey] = []
        others: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for number, (key, slot) in enumerate(rows[: len(got) // len(groups)]):
            mine = got[number * len(groups) : (number + 1) * len(groups)]
            reasons = [self._unusable(group, outcome) for group, outcome in enumerate(mine)]
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                answer.bad[key] = reason
                continue
            foreign = [
                (group, outcome.layout)
                for group, outcome in enumerate(mine)
                if isinstance(outcome, Hit)
                and not (self._direct(pool, group) and outcome.layout == pool.layout.name)
            ]
            for kind in foreign:
                others.setdefault(kind, []).append((number, slot))
            if foreign:
                converted.append(key)
            else:
                del answer.bad[key]
        for (group, layout), pages in others.items():
            self._convert(pool, group, layout, pages, scratch)
        for key in converted:
            del answer.bad[key]
        if len(got) < len(asked):
            raise _broken("read", len(asked), len(got))

    def _unusable(self, group: int, outcome: ReadOutcome) -> Reason | None:
        """Why a record that was asked for is no page, or None when it is one, in a layout we can read."""
        if isinstance(outcome, Corrupt):
            return Reason.CORRUPT
        if isinstance(outcome, Miss):
            return Reason.MISS
        record = self._readable[group].get(outcome.layout)
        if record is None:  # a layout of another version, or one that cannot hold this group: not usable here
            return Reason.MISS
        return None if outcome.nbytes == record.run_nbytes else Reason.CORRUPT

    def _convert(
        self, pool: Pool, group: int, layout: str, pages: Sequence[tuple[int, int]], scratch: Scratch
    ) -> None:
        """Bring pages that were read as records of ``layout`` into the pool's own; ``pages`` are (number, slot).

        They lie in the scratch pages of their numbers or, where records are read in place, in their slots.
        """
        for start in range(0, len(pages), scratch.pages):
            part = pages[start : start + scratch.pages]
            numbers, slots = [number for number, _ in part], [slot for _, slot in part]
            if self._direct(pool, group):
                numbers = list(range(len(part)))
                for number, slot in enumerate(slots):
                    run = pool.run(group, slot)
                    assert run is not None, "a record is read in place only where a page is one run"
                    scratch.page(group, number).data[: len(run)] = run
            source = scratch.surface(group, layout)
            self._data.engine.submit(source, numbers, pool.surface(group), slots).wait()

    def _write(self, job: Job, failed: Collection[PageKey], answer: Answer, scratch: Scratch) -> None:
        store, namespace = self._store_of(job)
        parents = dict(zip(keys_of(job), job.parents, strict=True))
        lost = set(failed)
        for span in job.spans:
            pool = self._data.pools[span.source]
            rows = list(zip(span.keys, span.sources, strict=True))
            for chunk in _calls(rows, WRITES_A_CALL if pool.layout.page_major else scratch.pages, answer):
                taken: list[tuple[PageKey, int]] = []
                for key, slot in chunk:
                    if key in lost or parents[key] in lost:
                        answer.bad[key] = Reason.UPSTREAM
                        lost.add(key)
                    else:
                        taken.append((key, slot))
                if taken:
                    records = self._records(namespace.root, pool, taken, parents, scratch)
                    self._written(store.write(namespace, records), taken, parents, lost, answer)

    def _records(
        self,
        root: PageKey,
        pool: Pool,
        rows: Sequence[tuple[PageKey, int]],
        parents: Mapping[PageKey, PageKey],
        scratch: Scratch,
    ) -> list[Record]:
        """Records of all groups of these pages, a page's group 0 before its others."""
        shard, groups = self._data.shard, self._data.spec.groups
        layout = pool.layout if pool.layout.page_major else _PAGE_FIRST
        runs = [self._runs(pool, group, [slot for _, slot in rows], scratch) for group in range(len(groups))]
        records: list[Record] = []
        for number, (key, _) in enumerate(rows):
            first = None if parents[key] == root else RecordKey(parents[key], 0, shard)
            for group in range(len(groups)):
                parent = RecordKey(key, 0, shard) if group else first
                records.append(
                    Record(RecordKey(key, group, shard), parent, layout.name, [runs[group][number]])
                )
        return records

    def _runs(self, pool: Pool, group: int, slots: Sequence[int], scratch: Scratch) -> list[memoryview]:
        """Each page as one run: its own in the pool, or gathered as ``page_first`` in the scratch pages."""
        own = [pool.run(group, slot) for slot in slots]
        runs = [run for run in own if run is not None]
        if len(runs) == len(slots):
            return runs
        gathered = scratch.surface(group, _PAGE_FIRST.name)
        self._data.engine.submit(pool.surface(group), slots, gathered, range(len(slots))).wait()
        length = self._readable[group][_PAGE_FIRST.name].run_nbytes
        return [scratch.page(group, number)[:length].data for number in range(len(slots))]

    def _written(
        self,
        outcomes: object,
        rows: Sequence[tuple[PageKey, int]],
        parents: Mapping[PageKey, PageKey],
        lost: set[PageKey],
        answer: Answer,
    ) -> None:
        groups = len(self._data.spec.groups)
        asked = groups * len(rows)
        got = _outcomes(outcomes, asked, WriteOutcome)
        for number, (key, _) in enumerate(rows):
            mine = got[number * groups : (number + 1) * groups]
            bad = next((_WRITTEN[outcome] for outcome in mine if not outcome.ok), None)
            if len(mine) < groups:
                raise _broken("write", asked, len(got))
            if parents[key] in lost:
                bad = Reason.UPSTREAM
            if bad is None:
                del answer.bad[key]
            else:
                answer.bad[key] = bad
                lost.add(key)
