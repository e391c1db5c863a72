"""The in-process worker: takes Jobs, runs them on bounded lanes, answers each with exactly one Done.

Three lanes, so that loads never wait for stores: ``copy`` (memory to memory), ``read`` and ``write`` (the store).
A Job reaches its lane when every Job it follows has ended here; what those failed, it does not touch. When a
deadline passes, a Job that has not started is cancelled; one whose call hangs is given up (a Done that says
``stuck``), its followers take all its keys for failed, and its own Done follows if the call ever returns. A leg
that touches the engine's memory is never given up.
"""

from __future__ import annotations

import enum
import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from hicache.data.lanes import Lane, Rank
from hicache.data.moves import Answer, DataPlane, Moves, keys_of
from hicache.data.scratch import Scratch
from hicache.data.store.base import Store, Touch
from hicache.errors import InvariantError
from hicache.keys import PageKey, RecordKey
from hicache.records import TOUCHES_ENDPOINT, Batch, Done, Job, JobKind, Reason
from hicache.spec import positive

_LOG = logging.getLogger(__name__)

TOUCHED_MAX = 4096
"""Pages waiting to be touched; more are dropped and counted: recency is a hint."""

_LANE_OF = {
    JobKind.LOAD: "copy",
    JobKind.SAVE: "copy",
    JobKind.DOWN: "copy",
    JobKind.LOOKUP: "ask",
    JobKind.FETCH: "read",
    JobKind.WRITE: "write",
}
_ORDER = {kind: order for order, kind in enumerate(_LANE_OF)}
"""Loads before saves before downs. Look-ups have a lane of their own: they take microseconds, and reads may hang."""

_FIRST: Rank = (-(1 << 62), 0)


class _State(enum.Enum):
    WAITING = "waiting"  # for Jobs it follows
    QUEUED = "queued"  # on its lane
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class _Entry:
    """A Job that has not ended here. ``failed``: keys that Jobs it follows did not bring."""

    job: Job
    state: _State = _State.WAITING
    waits: set[int] = field(default_factory=set)
    failed: set[PageKey] = field(default_factory=set)
    followers: list[_Entry] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    forgotten: bool = False


@dataclass(slots=True)
class Counters:
    """What a worker has done since it was made. Pages and bytes count only what arrived."""

    jobs: Counter[JobKind] = field(default_factory=Counter)
    pages: Counter[JobKind] = field(default_factory=Counter)
    nbytes: Counter[JobKind] = field(default_factory=Counter)
    seconds: dict[JobKind, float] = field(default_factory=lambda: dict.fromkeys(JobKind, 0.0))
    bad: Counter[Reason] = field(default_factory=Counter)
    refused_jobs: int = 0
    cancelled_jobs: int = 0
    stuck_jobs: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)
    touched: int = 0
    touches_dropped: int = 0


def _touchable(store: object) -> Touch | None:
    return store if isinstance(store, Touch) else None


class Worker:
    """Runs Jobs of one shard. ``submit`` and ``poll`` never block; any thread may call, one at a time.

    clock: the clock of the deadlines. writes_max: store writes that may wait; one more is refused at once.
    """

    def __init__(self, data: DataPlane, clock: Callable[[], float], *, writes_max: int = 256) -> None:
        self._data = data
        self._clock = clock
        self._writes_max = positive("writes_max", writes_max)
        self._moves = Moves(data)
        self._touchable = _touchable(data.store)
        self._lanes = {name: Lane(name) for name in sorted(set(_LANE_OF.values()))}
        self._scratch = {name: Scratch(data.spec) for name in self._lanes}
        self._changed = threading.Condition()  # guards all below; notified when a Done is there
        self._entries: dict[int, _Entry] = {}
        self._failed: dict[int, frozenset[PageKey]] = {}  # of ended or given up Jobs, until they are applied
        self._deadlines: list[tuple[float, int]] = []
        self._dones: list[Done] = []
        self._writes = 0  # store writes that have not started
        self._touched: dict[PageKey, None] = {}
        self._counters = Counters()
        self._logged: set[tuple[str, type]] = set()
        self._closed = False

    # -- the caller's side

    def replace_store(self, store: Store | None) -> None:
        """Jobs that start from now on work with another store, or with none; those that run keep theirs."""
        data = replace(self._data, store=store)
        with self._changed:
            self._data, self._moves, self._touchable = data, Moves(data), _touchable(store)

    def submit(self, batch: Batch) -> None:
        """Take Jobs. Never blocks: what cannot be taken is answered with a Done that says so."""
        with self._changed:
            fresh = [job.id for job in batch.jobs]
            if len(set(fresh)) < len(fresh) or not self._entries.keys().isdisjoint(fresh):
                raise InvariantError("a Job was submitted twice", ids=fresh)
            self._entries.update((job.id, _Entry(job)) for job in batch.jobs)
            for job in batch.jobs:
                self._admit(self._entries[job.id])
            for number in batch.applied:  # last: a Job of this batch may follow one that is forgotten by it
                self._forget(number)
            self._touch_later(batch.touched)

    def poll(self) -> list[Done]:
        """Every Done since the last call, in the order in which they came about."""
        with self._changed:
            self._expire()
            dones, self._dones = self._dones, []
            return dones

    def wait(self, timeout: float | None) -> bool:
        """Block until :meth:`poll` has something to give (True), or nothing is in flight or time is up (False)."""
        self._wait(timeout, lambda: bool(self._dones))
        with self._changed:
            return bool(self._dones)

    def drain(self, deadline: float | None) -> bool:
        """Block until nothing is in flight (True) or the clock passes ``deadline``; the Dones stay for poll."""
        timeout = None if deadline is None else max(0.0, deadline - self._clock())
        return self._wait(timeout, lambda: False)

    @property
    def idle(self) -> bool:
        """True when nothing is in flight and every Done was fetched."""
        with self._changed:
            return not self._entries and not self._dones

    @property
    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._changed:
            return deepcopy(self._counters)

    def close(self, timeout: float) -> list[str]:
        """Cancel what has not started, end the lanes, wait for them; names those that still hang in a call."""
        with self._changed:
            self._closed = True
            for entry in list(self._entries.values()):
                if entry.state in (_State.WAITING, _State.QUEUED):
                    self._cancel(entry)
            self._touched.clear()
        for lane in self._lanes.values():
            lane.stop()
        until = time.monotonic() + timeout
        lanes = self._lanes.values()
        return [lane.name for lane in lanes if not lane.join(max(0.0, until - time.monotonic()))]

    def _wait(self, timeout: float | None, enough: Callable[[], bool]) -> bool:
        """Wait for ``enough()`` or for nothing in flight; False when the time was up first."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._expire()
                if enough() or not self._entries:
                    return True
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._deadlines:
                    next_deadline = max(0.001, self._deadlines[0][0] - self._clock())
                    left = next_deadline if left is None else min(left, next_deadline)
                self._changed.wait(left)

    # -- from submit to a lane (all below hold the lock)

    def _admit(self, entry: _Entry) -> None:
        job = entry.job
        self._counters.jobs[job.kind] += 1
        if job.kind is JobKind.WRITE:
            self._writes += 1
        if self._closed:
            self._cancel(entry)
            return
        if job.kind is JobKind.WRITE and self._writes > self._writes_max:
            self._counters.refused_jobs += 1
            self._drop(entry, Reason.REFUSED)
            return
        for number in job.after:
            before = self._entries.get(number)
            entry.failed |= self._failed.get(number, frozenset())
            if before is not None and not before.answer.given_up:
                entry.waits.add(number)
                before.followers.append(entry)
        if job.deadline is not None and job.kind not in TOUCHES_ENDPOINT:
            heapq.heappush(self._deadlines, (job.deadline, job.id))
        self._queue_if_ready(entry)

    def _queue_if_ready(self, entry: _Entry) -> None:
        if entry.waits or entry.state is not _State.WAITING:
            return
        entry.state = _State.QUEUED
        job, name = entry.job, _LANE_OF[entry.job.kind]
        self._lanes[name].put(
            (job.priority, _ORDER[job.kind]), partial(self._run, entry, self._scratch[name])
        )

    def _touch_later(self, pages: Iterable[PageKey]) -> None:
        if self._touchable is None or self._closed:
            return
        was_empty = not self._touched
        for page in pages:
            if len(self._touched) >= TOUCHED_MAX and page not in self._touched:
                self._counters.touches_dropped += 1
                continue
            self._touched[page] = None
        if was_empty and self._touched:
            self._lanes["write"].put(_FIRST, self._touch)

    # -- on a lane

    def _run(self, entry: _Entry, scratch: Scratch) -> None:
        with self._changed:
            self._expire()
            if entry.state is not _State.QUEUED:
                return  # cancelled, now or before
            entry.state = _State.RUNNING
            entry.answer.expect(entry.job, entry.failed)
            self._writes -= entry.job.kind is JobKind.WRITE
        answer, started = entry.answer, self._clock()
        try:
            self._moves.run(entry.job, entry.failed, answer, scratch)
        except BaseException as error:  # noqa: BLE001  (whatever a store or an engine raises, the lane lives on)
            self._caught(entry.job.kind.value, error)
        seconds = self._clock() - started
        with self._changed:
            kind, pages = entry.job.kind, len(keys_of(entry.job)) - len(answer.bad)
            if kind is not JobKind.LOOKUP:
                self._counters.pages[kind] += pages
                self._counters.nbytes[kind] += pages * self._data.spec.page_nbytes
            self._counters.seconds[kind] += seconds
            self._end(entry)

    def _touch(self) -> None:
        with self._changed:
            pages, self._touched = list(self._touched), {}
        groups = range(len(self._data.spec.groups))
        assert self._touchable is not None, "touches are kept only for a store that takes them"
        try:
            self._touchable.touch(
                [RecordKey(page, group, self._data.shard) for page in pages for group in groups]
            )
        except BaseException as error:  # noqa: BLE001  (recency is a hint)
            self._caught("touch", error)
            return
        with self._changed:
            self._counters.touched += len(pages)

    def _caught(self, what: str, error: BaseException) -> None:
        """Count it; log the first of its kind with its trace."""
        kind = (what, type(error))
        with self._changed:
            self._counters.exceptions[f"{what}: {type(error).__name__}"] += 1
            known = kind in self._logged
            self._logged.add(kind)
        if not known:
            _LOG.warning("%s raised: logged once, then counted", what, exc_info=error)

    # -- ends (all below hold the lock)

    def _end(self, entry: _Entry) -> None:
        """The one real Done of a Job."""
        job, answer = entry.job, entry.answer
        entry.state = _State.ENDED
        del self._entries[job.id]
        if answer.bad and not answer.given_up:  # else all its keys are remembered already
            self._failed[job.id] = frozenset(answer.bad)
        self._release(entry, answer.bad)
        if entry.forgotten:
            self._failed.pop(job.id, None)
        self._counters.bad.update(answer.bad.values())
        self._dones.append(Done(job.id, self._data.shard, dict(answer.bad), answer.found))
        self._changed.notify_all()

    def _release(self, entry: _Entry, failed: Iterable[PageKey]) -> None:
        """Tell followers what failed: at once, so that it does not matter when the Job is forgotten."""
        followers, entry.followers = entry.followers, []
        for follower in followers:
            follower.failed.update(failed)
            follower.waits.discard(entry.job.id)
            self._queue_if_ready(follower)

    def _drop(self, entry: _Entry, reason: Reason) -> None:
        """End a Job that has not started, and never will."""
        self._writes -= entry.job.kind is JobKind.WRITE
        entry.answer.bad = dict.fromkeys(keys_of(entry.job), reason)
        self._end(entry)

    def _cancel(self, entry: _Entry) -> None:
        self._counters.cancelled_jobs += 1
        self._drop(entry, Reason.CANCELLED)

    def _expire(self) -> None:
        """Cancel, or give up, what is past its deadline."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self._entries.get(heapq.heappop(self._deadlines)[1])
            if entry is None:
                continue
            if entry.state is not _State.RUNNING:
                self._counters.cancelled_jobs += 1
                self._drop(entry, Reason.DEADLINE)
                continue
            entry.answer.given_up = True
            left = entry.answer.bad.copy()  # one step for the lane, which strikes out what arrives
            self._failed[entry.job.id] = frozenset(left)
            self._release(entry, left)
            self._counters.stuck_jobs += 1
            bad = {
                key: Reason.DEADLINE if reason is Reason.FAILED else reason for key, reason in left.items()
            }
            self._dones.append(Done(entry.job.id, self._data.shard, bad, entry.answer.found, stuck=True))
            self._changed.notify_all()

    def _forget(self, number: int) -> None:
        """The Job's end was applied: nobody will follow it any more."""
        entry = self._entries.get(number)
        if entry is None:
            self._failed.pop(number, None)
        else:
            entry.forgotten = True  # it was given up and still runs: kept until its call returns
