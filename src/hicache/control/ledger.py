"""The ledger of Jobs: what is being put together, waits to be taken, runs, and what each of them pins and fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hicache.control.lease import Lease
from hicache.control.request import Request
from hicache.control.tiers import Tier, Tiers
from hicache.errors import InvariantError
from hicache.keys import Namespace, PageKey
from hicache.records import TOUCHES_ENDPOINT, Job, JobKind, Reason, Span, Where

PRIORITY = {
    JobKind.LOOKUP: 0,
    JobKind.FETCH: 1,
    JobKind.LOAD: 0,
    JobKind.SAVE: 2,
    JobKind.DOWN: 3,
    JobKind.WRITE: 4,
}
"""Loads before stores, on every lane."""


@dataclass(slots=True)
class Live:
    """A Job from emission to the application of its last Done."""

    job: Job
    lease: Lease
    request: Request | None
    waiting: set[int]  # shards that have not answered
    late: set[int] = field(default_factory=set)  # shards that gave up on a call that has not returned
    bad: dict[PageKey, Reason] = field(default_factory=dict)
    found: int | None = None
    began: float | None = None  # when it was handed out; of fetches, where that is weighed
    settled: bool = False  # what came is committed; late bytes may still land in the slots of what is bad


class Draft:
    """A Job being put together: pages are added one by one, pinned or reserved as they come."""

    __slots__ = ("_spans", "after", "columns", "id", "kind", "lease", "parents")

    def __init__(self, job: int, kind: JobKind, tiers: Tiers) -> None:
        self.id = job
        self.kind = kind
        self.lease = Lease(tiers)
        self.after: set[int] = set()
        self.parents: list[PageKey] = []
        self._spans: list[tuple[Where, Where, list[PageKey], list[int], list[int]]] = []
        self.columns: tuple[list[PageKey], list[int], list[int]] = ([], [], [])

    def read(self, tier: Tier, slot: int) -> None:
        """Pin a source; if it is still being filled, follow the Job that fills it."""
        filler = self.lease.pin(tier, slot)
        if filler:
            self.after.add(filler)

    def span(self, source: Where, target: Where) -> tuple[list[PageKey], list[int], list[int]]:
        """Begin pages that travel between these places: rows of keys, sources and targets to append to.

        Slots or endpoint ids; on the STORE side the row stays empty.
        """
        self.columns = ([], [], [])
        self._spans.append((source, target, *self.columns))
        return self.columns

    def add(self, source: Where, target: Where, key: PageKey, origin: int, place: int) -> None:
        """Add one page behind the others; neither side may be the STORE."""
        if not self._spans or self._spans[-1][0] is not source or self._spans[-1][1] is not target:
            self.span(source, target)
        keys, sources, targets = self.columns
        keys.append(key)
        sources.append(origin)
        targets.append(place)

    @property
    def empty(self) -> bool:
        """True when no page was added."""
        return not any(keys for _, _, keys, _, _ in self._spans)

    def spans(self) -> tuple[Span, ...]:
        """The pages as immutable spans."""
        return tuple(Span(a, b, tuple(k), tuple(s), tuple(t)) for a, b, k, s, t in self._spans if k)


class Ledger:
    """All live Jobs. ``outbox`` holds the untaken ones, in order; ``applied`` the ids the worker may forget."""

    def __init__(self, tiers: Tiers, shards: int) -> None:
        self._tiers = tiers
        self._shards = shards
        self.last = 0  # id of the latest Job
        self.live: dict[int, Live] = {}
        self.outbox: dict[int, Live] = {}
        self.applied: list[int] = []
        self._followers: dict[int, int] = {}  # id -> live Jobs that name it in `after`

    def draft(self, kind: JobKind) -> Draft:
        """Start a Job; its id is taken at once, so that slots can name it as their filler."""
        self.last += 1
        return Draft(self.last, kind, self._tiers)

    def emit(
        self,
        draft: Draft,
        request: Request | None,
        *,
        deadline: float | None = None,
        keys: Sequence[PageKey] = (),
        namespace: Namespace | None = None,
    ) -> Job:
        """Make the Job and put it in the outbox."""
        job = Job(
            id=draft.id,
            kind=draft.kind,
            handle=request.handle if request else None,
            spans=draft.spans(),
            after=tuple(sorted(draft.after)),
            parents=tuple(draft.parents),
            keys=tuple(keys),
            namespace=namespace,
            deadline=deadline,
            priority=PRIORITY[draft.kind],
        )
        live = Live(job, draft.lease, request, set(range(self._shards)))
        self.live[job.id] = self.outbox[job.id] = live
        for before in job.after:
            self._followers[before] = self._followers.get(before, 0) + 1
        if request is not None:
            request.jobs.add(job.id)
        return job

    def take(self) -> tuple[tuple[Job, ...], tuple[int, ...]]:
        """Hand out the outbox and the ids to forget."""
        jobs, applied = tuple(live.job for live in self.outbox.values()), tuple(self.applied)
        self.outbox.clear()
        self.applied.clear()
        return jobs, applied

    def may_withdraw(self, live: Live) -> bool:
        """True when the Job was not taken and no live Job follows it."""
        return live.job.id in self.outbox and not self._followers.get(live.job.id)

    def retire(self, live: Live) -> None:
        """The Job is over: give its pins back, forget it, and let the worker forget it once nobody follows it."""
        job = live.job
        live.lease.close()
        del self.live[job.id]
        if self.outbox.pop(job.id, None) is None and not self._followers.get(job.id):
            self.applied.append(job.id)
        for before in job.after:
            left = self._followers[before] - 1
            if left:
                self._followers[before] = left
                continue
            del self._followers[before]
            if before not in self.live:
                self.applied.append(before)
        if live.request is not None:
            live.request.jobs.discard(job.id)
            live.request.ignored.discard(job.id)

    def fills(self, job: Job) -> Iterator[tuple[Tier, PageKey, int]]:
        """(tier, key, slot) of every slot the Job fills."""
        for span in job.spans:
            if span.target in (Where.DEVICE, Where.HOST):
                tier = self._tiers[span.target]
                for key, slot in zip(span.keys, span.targets, strict=True):
                    yield tier, key, slot

    def endpoint_jobs(self, request: Request, kind: JobKind) -> int:
        """How many live Jobs of that kind touch the request's endpoint."""
        if kind not in TOUCHES_ENDPOINT:
            raise InvariantError("this kind of Job never touches the endpoint", kind=kind)
        return sum(self.live[job].job.kind == kind for job in request.jobs)
