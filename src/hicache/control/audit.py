"""The audit: recounting the books, and the state as one hashable value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from hicache.control.books import Books
from hicache.control.slots import FILLING, FREE, QUARANTINED, READY
from hicache.control.tiers import Tier
from hicache.errors import InvariantError
from hicache.records import Dropped, Stored


def check(books: Books) -> None:
    """Raise InvariantError unless every invariant of the control plane holds."""
    _check_rows(books)
    for tier in books.tiers.all:
        tier.slots.check()
        _check_tier(books, tier)
    _check_jobs(books)


def _fail(books: Books, message: str, **context: object) -> InvariantError:
    return InvariantError(message, **context, dump=snapshot(books))


def _check_rows(books: Books) -> None:
    index, tiers = books.index, books.tiers
    for key, row in index.pages():
        if index.keys[row] != key:
            raise _fail(books, "a row does not carry its key", row=row)
        if not index.resident(row) and not index.children(row):
            raise _fail(books, "a row without a page or a child", row=row)
    for tier in tiers.all:
        kids = Counter(
            index.parents[row] for _, row in index.pages() if tier.at[row] >= 0 and index.parents[row] >= 0
        )
        for _, row in index.pages():
            if tier.kids[row] != kids[row]:
                raise _fail(
                    books,
                    "child counts are not a recount",
                    tier=tier.where.name,
                    counted=kids[row],
                    kept=tier.kids[row],
                )


def _check_tier(books: Books, tier: Tier) -> None:
    index, slots = books.index, tier.slots
    places = [tier.at[row] for _, row in index.pages() if tier.at[row] >= 0]
    held = [slot for slot in range(slots.total) if slots.state[slot] in (FILLING, READY)]
    if sorted(places) != held:
        raise _fail(books, "index and slots disagree", tier=tier.where.name, index=sorted(places), slots=held)
    for _, row in index.pages():
        slot = tier.at[row]
        if slot < 0:
            continue
        if slots.page[slot] != row:
            raise _fail(books, "a slot holds another page", tier=tier.where.name, slot=slot)
        if books.tiers.evictable(tier, row) and not tier.is_queued(row):
            raise _fail(books, "an evictable page is not on offer", tier=tier.where.name, slot=slot)


def _check_jobs(books: Books) -> None:
    for live in books.ledger.live.values():
        for tier, key, slot in books.ledger.fills(live.job):
            state = tier.slots.state[slot]
            if live.settled and key not in live.bad:
                continue
            if state not in (FILLING, QUARANTINED) or tier.slots.filler[slot] != live.job.id:
                raise _fail(
                    books, "a live Job's target is not its own", job=live.job.id, slot=slot, state=state
                )
    for request in books.requests.values():
        if request.closed and (request.hold is not None or not request.jobs):
            raise _fail(
                books, "a closed request is kept without a Job, or holds a page", handle=request.handle
            )
    for key, job in books.storing.items():
        if job not in books.ledger.live:
            raise _fail(books, "a page is being stored by no Job", key=key.hex()[:8], job=job)
    _check_pins(books)


def _check_pins(books: Books) -> None:
    leases = [live.lease for live in books.ledger.live.values()]
    leases += [request.hold for request in books.requests.values() if request.hold is not None]
    pins = Counter((tier.where, slot) for lease in leases for tier, slot in lease.pins())
    for tier in books.tiers.all:
        slots = tier.slots
        for slot in range(slots.total):
            if slots.pins[slot] != pins[tier.where, slot]:
                raise _fail(
                    books,
                    "pins are not explained by Jobs and holds",
                    tier=tier.where.name,
                    slot=slot,
                    kept=slots.pins[slot],
                    explained=pins[tier.where, slot],
                )
            if slots.state[slot] == FILLING and slots.filler[slot] not in books.ledger.live:
                raise _fail(books, "a FILLING slot whose Job is gone", tier=tier.where.name, slot=slot)


def snapshot(books: Books) -> Hashable:
    """See :meth:`Controller.snapshot`: ids and ticks appear as ranks; statistics, memos and dead entries do not."""
    jobs = {job: n for n, job in enumerate(sorted(books.ledger.live))}
    handles = handle_ranks(books)
    index = books.index
    ranks = {rank: n for n, rank in enumerate(sorted({r for t in books.tiers.all for r in _ranks(t)}))}
    tiers = []
    for tier in books.tiers.all:
        slots = tier.slots
        tiers.append(
            tuple(
                (
                    slots.state[slot],
                    slots.pins[slot],
                    index.keys[slots.page[slot]] if slots.page[slot] >= 0 else b"",
                    jobs.get(slots.filler[slot], -1) if slots.state[slot] in (FILLING, QUARANTINED) else -1,
                    ranks[tier.rank[slot]] if slots.state[slot] in (FILLING, READY) else -1,
                )
                for slot in range(slots.total)
                if slots.state[slot] != FREE or slots.pins[slot]
            )
        )
    live = tuple(
        (
            jobs[number],
            one.job.kind.value,
            handles.get(one.job.handle or 0, -1),
            one.job.spans,
            tuple(jobs.get(before, -1) for before in one.job.after),
            tuple(sorted(one.waiting)),
            frozenset(one.bad.items()),
            one.found,
            tuple(sorted(one.late)),
            number in books.ledger.outbox,
        )
        for number, one in sorted(books.ledger.live.items())
    )
    requests = tuple(
        (
            handles[request.handle],
            request.id,
            len(request.keys),
            request.cursor,
            request.counted,
            request.stored,
            jobs.get(request.lookup, -1),
            jobs.get(request.fetch, -1),
            request.hold is not None,
            request.closed,
            frozenset(request.due),
            frozenset(jobs[job] for job in request.ignored),
        )
        for _, request in sorted(books.requests.items())
    )
    flags = frozenset((index.keys[row], index.flags[row]) for _, row in index.pages() if index.flags[row])
    storing = frozenset((key, jobs.get(job, -1)) for key, job in books.storing.items())
    hits = frozenset((key, min(count, 2)) for key, count in books.ghosts.hits.items())
    return (tuple(tiers), live, requests, flags, storing, hits, _events(books, handles), books.store)


def _events(books: Books, handles: dict[int, int]) -> Hashable:
    return tuple(
        event if isinstance(event, (Stored, Dropped)) else replace(event, handle=handles[event.handle])
        for event in books.events
    )


def handle_ranks(books: Books) -> dict[int, int]:
    """Handles that are known or named by an event not yet heard, each with its rank."""
    named = {event.handle for event in books.events if not isinstance(event, (Stored, Dropped))}
    return {handle: n for n, handle in enumerate(sorted(named.union(books.requests)))}


def _ranks(tier: Tier) -> set[int]:
    slots = tier.slots
    return {tier.rank[slot] for slot in range(slots.total) if slots.state[slot] in (FILLING, READY)}
