"""Settling: what the end of a Job changes. A page is READY only if no shard failed it; failure is never completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hicache.control.books import Books
from hicache.control.fetch import Fetcher
from hicache.control.index import KEPT, STORED
from hicache.control.ledger import Live
from hicache.control.request import Request
from hicache.control.slots import QUARANTINED
from hicache.errors import InvariantError
from hicache.keys import PageKey
from hicache.records import (
    TOUCHES_ENDPOINT,
    Done,
    Dropped,
    EndpointFree,
    Job,
    JobKind,
    Loaded,
    LookedUp,
    Reason,
    Stored,
    Where,
)

_SOURCE_IS_FINE = frozenset({Reason.UPSTREAM, Reason.CANCELLED, Reason.DEADLINE})


class Settler:
    """Applies Dones, withdraws Jobs, and says when the engine's memory is free."""

    def __init__(self, books: Books, fetcher: Fetcher) -> None:
        self._books = books
        self._fetcher = fetcher

    # ---- Dones

    def apply(self, done: Done) -> None:
        """Take one shard's answer; answers that were given already are ignored.

        A shard whose call does not return answers twice: STUCK with what has come so far, and when it has returned.
        The first answers of all shards settle the Job; a write to the store is settled by real ends alone.
        """
        live = self._books.ledger.live.get(done.job)
        if live is None or done.job in self._books.ledger.outbox:
            return
        first, write = done.shard in live.waiting, live.job.kind is JobKind.WRITE
        if not first and (done.stuck or done.shard not in live.late):
            return
        live.waiting.discard(done.shard)
        live.late.discard(done.shard)
        if done.stuck:
            self._give_up(live, done.shard)
        if first if not write else not done.stuck:
            for key, reason in done.bad.items():
                live.bad.setdefault(key, reason)
            live.found = done.found if live.found is None else min(live.found, done.found)
            if not live.waiting and not (write and live.late):
                self._settle(live)
        if not live.waiting and not live.late:
            self._end(live)

    def _give_up(self, live: Live, shard: int) -> None:
        if live.job.kind in TOUCHES_ENDPOINT:
            raise InvariantError("a copy that touches the engine's memory is never given up", job=live.job.id)
        self._books.stats.stuck_jobs += not live.late
        live.late.add(shard)

    def _settle(self, live: Live) -> None:
        """What the answers mean: for pages, requests and whoever wants to know."""
        job, books = live.job, self._books
        live.settled = True
        for reason in live.bad.values():
            books.stats.bad[reason] += 1
        self._settle_targets(live)
        if job.kind is JobKind.LOOKUP:
            self._answer(live, live.found or 0)
        elif job.kind is JobKind.FETCH:
            self._fetched(live)
        elif job.kind is JobKind.LOAD:
            self._loaded(live)
        elif job.kind is JobKind.DOWN:
            for key in live.bad:
                self._flag(key, KEPT)
        elif job.kind is JobKind.WRITE:
            self._written(live)

    def _end(self, live: Live) -> None:
        """No call of the Job runs any more: what waited for late bytes is free, and so are the sources."""
        books = self._books
        for tier, _key, slot in books.ledger.fills(live.job):
            if tier.slots.state[slot] == QUARANTINED and tier.slots.filler[slot] == live.job.id:
                tier.slots.settle(slot)
        books.ledger.retire(live)
        self._request_moved_on(live.request)

    def _settle_targets(self, live: Live) -> None:
        """Commit the slots whose page arrived; take back the others, at once or when no late bytes can come any more."""
        books, tiers, bad = self._books, self._books.tiers, live.bad
        broken = False
        good: dict[Where, list[PageKey]] = {}
        for tier, key, slot in books.ledger.fills(live.job):
            if key in bad:
                (tiers.quarantine if live.late else tiers.abort)(tier, slot)
                broken = True
            else:
                if broken:
                    tier.rank[slot] = 0  # its parent may be gone: it falls first
                tiers.commit(tier, slot)
                if books.config.kv_events:
                    good.setdefault(tier.where, []).append(key)
        for where, keys in good.items():
            books.events.append(Stored(where, tuple(keys), tuple(self._parent(key) for key in keys)))

    def _parent(self, key: PageKey) -> PageKey:
        index = self._books.index
        row = index.find(key)
        parent = index.parents[row]
        return index.keys[parent] if parent >= 0 else self._books.spaces[index.spaces[row]].root

    def _flag(self, key: PageKey, flag: int) -> None:
        row = self._books.index.find(key)
        if row >= 0:
            self._books.index.flags[row] |= flag

    def _of_this_store(self, live: Live) -> bool:
        """False when the store that the Job spoke with has been detached since."""
        return self._books.store and live.job.id > self._books.store_since

    # ---- by kind

    def _answer(self, live: Live, found: int) -> None:
        request = live.request
        if request is None:
            return
        request.lookup = 0
        request.stored = found = found if self._of_this_store(live) else 0
        if request.closed:
            return
        self._books.events.append(LookedUp(request.handle, found))
        if self._books.config.fetch_at == "lookup" and found:
            self._fetcher.prefetch(request)

    def _fetched(self, live: Live) -> None:
        """What came from the store is known to be there; what did not is not promised to this request again."""
        if self._books.worth is not None and live.began is not None:
            came = live.job.pages - len(live.bad)
            if came or live.late:
                now = self._books.clock()
                self._books.worth.fetched(max(came, 1), now - live.began, now)
        for span in live.job.spans if self._of_this_store(live) else ():
            for key in span.keys:
                if key not in live.bad:
                    self._flag(key, STORED)
        self._cut(live, live.bad)

    def _cut(self, live: Live, bad: Mapping[PageKey, Reason]) -> None:
        request = live.request
        if request is None:
            return
        prefetch = request.fetch == live.job.id
        if prefetch:
            request.fetch = 0
            self._fetcher.ended(live.job.id)
        if bad:
            request.lost.update(bad)
            upto = min(request.stored, len(request.keys))
            request.stored = next((i for i in range(upto) if request.keys[i] in bad), upto)
            if prefetch and not request.closed:
                self._fetcher.hold(request)

    def _loaded(self, live: Live) -> None:
        request, job = live.request, live.job
        if request is None:
            return
        keys = [key for span in job.spans for key in span.keys]
        good = next((i for i, key in enumerate(keys) if key in live.bad), len(keys))
        self.drop(key for key, reason in live.bad.items() if reason not in _SOURCE_IS_FINE)
        if job.id not in request.ignored:
            reason = live.bad[keys[good]] if good < len(keys) else Reason.END
            if reason is Reason.UPSTREAM:
                reason = request.lost.get(keys[good], reason)
            start = request.keys.index(keys[0])
            self._books.events.append(Loaded(request.handle, start, len(keys), good, reason))

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Take pages out of every memory tier that has them READY, because they cannot be read."""
        books = self._books
        for tier in books.tiers.all:
            gone = []
            for key in keys if isinstance(keys, list) else (keys := list(keys)):
                row = books.index.find(key)
                if row >= 0 and tier.ready(row):
                    books.tiers.drop(tier, tier.at[row])
                    books.stats.dropped[tier.where] += 1
                    gone.append(key)
            if gone:
                books.events.append(Dropped(tier.where, tuple(gone)))

    def _written(self, live: Live) -> None:
        books, job = self._books, live.job
        parents = dict(zip(job.spans[0].keys, job.parents, strict=True))
        stored: list[PageKey] = []
        for key in job.spans[0].keys:
            if books.storing.get(key) == job.id:
                del books.storing[key]
            reason = live.bad.get(key)
            if reason is None:
                if self._of_this_store(live):
                    self._flag(key, STORED)
                stored.append(key)
                continue
            books.stats.not_stored += 1
            self._flag(key, KEPT)
            if reason is Reason.PARENT_ABSENT:
                parent = books.index.find(parents[key])
                if parent >= 0:
                    books.index.flags[parent] &= ~STORED
        books.stats.stored[Where.STORE] += len(stored)
        if books.config.kv_events and stored:
            books.events.append(Stored(Where.STORE, tuple(stored), tuple(parents[key] for key in stored)))

    # ---- withdrawal, and the engine's memory

    def withdraw(self, live: Live) -> bool:
        """Take back a Job that was not handed out and that nobody follows; False when it must run."""
        books = self._books
        if not books.ledger.may_withdraw(live):
            return False
        books.stats.withdrawn_jobs += 1
        request, job = live.request, live.job
        if request is not None:
            request.lookup = 0 if request.lookup == job.id else request.lookup
            if request.fetch == job.id:
                request.fetch = 0
                self._fetcher.ended(job.id)
                request.release_hold()
        if job.kind is JobKind.WRITE:
            for key in job.spans[0].keys:
                del books.storing[key]
        for tier, _key, slot in books.ledger.fills(job):
            books.tiers.abort(tier, slot)
        books.ledger.retire(live)
        return True

    def withdraw_all(self, request: Request, kinds: frozenset[JobKind]) -> None:
        """Withdraw the request's Jobs of these kinds, followers first, as far as possible; its prefetch only if it is over."""
        live = self._books.ledger.live
        for job in sorted(request.jobs, reverse=True):
            if live[job].job.kind in kinds and (request.closed or job != request.fetch):
                self.withdraw(live[job])

    def owe(self, request: Request) -> None:
        """The adapter wants to know when its memory is free, for both kinds.

        Events of an earlier release that it has not heard yet are taken back: heard after this release, they would
        seem to speak of memory that may still be in use.
        """
        books = self._books
        if books.events:
            books.events = [
                event
                for event in books.events
                if not isinstance(event, EndpointFree) or event.handle != request.handle
            ]
        request.due |= TOUCHES_ENDPOINT
        self._request_moved_on(request)

    def _request_moved_on(self, request: Request | None) -> None:
        if request is None:
            return
        books = self._books
        if request.due:
            for kind in (JobKind.LOAD, JobKind.SAVE):
                if kind in request.due and not books.ledger.endpoint_jobs(request, kind):
                    request.due.discard(kind)
                    books.events.append(EndpointFree(request.handle, kind))
        if request.closed and not request.jobs:
            books.requests.pop(request.handle, None)

    def ignore_loads(self, request: Request) -> None:
        """Nobody waits for the result of the request's running loads any more."""
        live = self._books.ledger.live
        request.ignored |= {job for job in request.jobs if live[job].job.kind is JobKind.LOAD}


def pages_of(job: Job) -> list[PageKey]:
    """All keys that travel in a Job, in order."""
    return [key for span in job.spans for key in span.keys]
