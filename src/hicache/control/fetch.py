"""Fetching from the store into the lowest memory tier: for a load, or ahead of it when the look-up has answered.

Prefetches are first come, first served. One that finds no room, or would exceed what may be in flight, waits while
others run and starts when they end; nothing is skipped for good. It gives up when its time is over, or when nothing
that runs could make room.
"""

from __future__ import annotations

from collections import OrderedDict

from hicache.control.books import Books
from hicache.control.down import Below
from hicache.control.index import ROOT
from hicache.control.lease import Lease
from hicache.control.ledger import Draft
from hicache.control.request import Request
from hicache.records import JobKind, Where


class Fetcher:
    """Reserves slots for store pages and emits FETCH Jobs; keeps the queue of prefetches that wait."""

    def __init__(self, books: Books, below: Below) -> None:
        self._books = books
        self._below = below
        self._running: dict[int, int] = {}  # prefetch Jobs in flight -> pages
        self._waiting: OrderedDict[int, tuple[Request, float | None]] = OrderedDict()  # until when

    # ---- one fetch

    def draft(self) -> Draft:
        """Start putting a fetch together."""
        draft = self._books.ledger.draft(JobKind.FETCH)
        draft.span(Where.STORE, self._books.tiers.bottom.where)
        return draft

    def reserve(self, request: Request, fetch: Draft, page: int, start: int = 0) -> int:
        """Reserve a slot of the lowest memory tier for a page to be fetched; -1 when no room can be made.

        The page before ``start`` is the engine's own by now, so it may go to make room, and so may a parent that
        another tier has: a chain longer than the tier passes through it, load by load.
        """
        books, index, bottom = self._books, self._books.index, self._books.tiers.bottom
        keys, space = request.keys, books.space(request.namespace)
        protect = index.find(keys[page - 1]) if page > start else ROOT
        if protect != ROOT and any(tier.ready(protect) for tier in books.tiers.all[:-1]):
            protect = ROOT
        if not self._below.room(bottom, protect):
            return -1
        parent = index.row(keys[page - 1], space) if page else ROOT
        orphan = parent != ROOT and not index.resident(parent)
        if orphan:
            books.tiers.breaks += 1
        key = keys[page]
        row = index.row(key, space, parent)
        slot = books.tiers.enter(bottom, row, fetch.id, 0 if orphan else books.rank())
        fetch.columns[0].append(key)
        fetch.columns[2].append(slot)
        return slot

    def emit(self, request: Request, fetch: Draft) -> None:
        """Put the fetch in the outbox, if it has pages."""
        if not fetch.empty:
            deadline = self._books.deadline(JobKind.FETCH, len(fetch.columns[0]))
            self._books.ledger.emit(fetch, request, namespace=request.namespace, deadline=deadline)

    # ---- prefetch

    def prefetch(self, request: Request) -> None:
        """Fetch what the look-up found and memory lacks, now or when its turn comes; hold the deepest page.

        The pin on the deepest page keeps its ancestors too, through the leaf rule, until ``load`` or ``close``.
        """
        if self._waiting or not self._start(request):
            wait = self._books.config.fetch_wait_s
            until = None if wait is None else self._books.clock() + wait
            self._waiting[request.handle] = (request, until)
            request.waits = True
            self._books.stats.deferred += 1

    def _start(self, request: Request) -> bool:
        """Start a prefetch, or find that there is nothing to do; False when it has to wait for one that runs."""
        config, index = self._books.config, self._books.index
        upto = min(request.stored, len(request.keys))
        rows = [index.find(key) for key in request.keys[:upto]]
        pages = [page for page, row in enumerate(rows) if row < 0 or not index.resident(row)]
        if len(pages) < max(1, config.fetch_pages_min):
            return True
        if self._books.slower(len(pages)):
            self.probe(request, pages[0])
            return True
        if config.fetch_pages_max:
            room = config.fetch_pages_max - sum(self._running.values())
            if self._running and len(pages) > room:
                return False
            pages = pages[:room]
        fetch, last = self.draft(), -1
        for page in pages:
            slot = self.reserve(request, fetch, page)
            if slot < 0:
                break
            last = slot
        if last < 0:
            return not self._running
        self._hold(request, last)
        request.fetch = fetch.id
        self._running[fetch.id] = len(fetch.columns[0])
        self.emit(request, fetch)
        return True

    def probe(self, request: Request, page: int) -> None:
        """Fetch a few pages of the store from ``page`` on that nobody waits for, if it is time to learn again."""
        worth = self._books.worth
        wanted = 0 if worth is None else worth.probe(self._books.clock())
        fetch, index = self.draft(), self._books.index
        for number in range(page, min(page + wanted, request.stored, len(request.keys))):
            row = index.find(request.keys[number])
            if row >= 0 and index.resident(row):
                break
            if self.reserve(request, fetch, number) < 0:
                break
        self.emit(request, fetch)

    def ended(self, job: int) -> None:
        """A prefetch has ended, was given up or withdrawn."""
        self._running.pop(job, None)

    def advance(self) -> None:
        """Start the prefetches whose turn it is; let those go on without that have waited too long."""
        while self._waiting:
            handle, (request, until) = next(iter(self._waiting.items()))
            if until is not None and self._books.clock() >= until:
                self._books.stats.expired += 1
            elif not self._start(request):
                return
            self._waiting.pop(handle, None)
            request.waits = False

    def forget(self, request: Request) -> None:
        """The request does not wait any more: it is over, or the store is gone."""
        self._waiting.pop(request.handle, None)
        request.waits = False

    def waiting(self) -> tuple[int, ...]:
        """Handles of the requests whose prefetch waits, in order."""
        return tuple(self._waiting)

    def hold(self, request: Request) -> None:
        """A prefetch has ended short: hold the deepest page that it did bring, and no other."""
        bottom, index = self._books.tiers.bottom, self._books.index
        request.release_hold()
        for key in reversed(request.keys[: request.stored]):
            row = index.find(key)
            if row >= 0 and bottom.ready(row):
                self._hold(request, bottom.at[row])
                return

    def _hold(self, request: Request, slot: int) -> None:
        request.release_hold()
        request.hold = Lease(self._books.tiers)
        request.hold.pin(self._books.tiers.bottom, slot)
