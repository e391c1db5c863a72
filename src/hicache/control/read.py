"""Reading: what could be loaded (match), loading it, and fetching from the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hicache.control.books import Books
from hicache.control.fetch import Fetcher
from hicache.control.index import ROOT
from hicache.control.request import Request
from hicache.control.slots import READY
from hicache.control.tiers import Tier
from hicache.records import JobKind, Load, Match, Reason, Where


class Reader:
    """Answers ``match`` and ``load``, and starts look-ups."""

    def __init__(self, books: Books, fetcher: Fetcher) -> None:
        self._books = books
        self._tiers = books.tiers
        self._fetcher = fetcher

    # ---- match

    def match(self, request: Request, computed: int) -> Match:
        """See :meth:`Request.match`."""
        end, ready = self._run(request, computed)
        memory, store = end - computed, max(0, min(request.stored, len(request.keys)) - max(end, computed))
        slower = store > 0 and self._books.slower(store)
        if slower:
            store = 0
        whole = computed + memory + store >= len(request.keys)
        pending = request.lookup > 0 and not whole
        if not self._books.config.best_effort:
            pending = pending or request.fetch > 0 or request.waits
        ends = Reason.END if whole else Reason.SLOWER if slower else Reason.ABSENT
        return Match(computed, memory, ready - computed, store, pending, ends)

    def _run(self, request: Request, start: int) -> tuple[int, int]:
        """Ends of the resident run and of its READY part, both from page ``start``.

        Leaf-first eviction keeps a resident page's ancestors, so the remembered run is right while its last page
        is resident and no page has left in another way; it shrinks and grows at its end only. READY pages stay so
        while the last of them is READY and has not left since, even if it has come again.
        """
        memo, keys = request.memo, request.keys
        index = self._books.index
        if memo.breaks != self._tiers.breaks or memo.start != start:
            memo.start = memo.end = memo.ready = start
            memo.breaks = self._tiers.breaks
        end = memo.end
        while end > start and not self._resident(index.find(keys[end - 1])):
            end -= 1
        shards, mask, names = index.shards, index.mask, index.keys
        ready, hints, since = min(memo.ready, end), request.rows, index.since
        while ready > start:
            row = hints[ready - 1]
            if names[row] == keys[ready - 1] and since[row] <= memo.clock and self._ready(row):
                break
            ready -= 1
        while ready < end and self._ready(index.find(keys[ready])):
            ready += 1
        top, bottom = self._tiers.top, self._tiers.bottom
        at, state, low_at, low_state = top.at, top.slots.state, bottom.at, bottom.slots.state
        rows, row = hints, ROOT
        for key in islice(keys, end, None):
            row += 1  # a chain that was published in one go has rows in a row
            if names[row] != key:
                row = shards[key[0] & mask].get(key, ROOT)
                if row < 0:
                    break
            slot = at[row]
            complete = slot >= 0 and state[slot] == READY
            if not complete:
                low = low_at[row]
                if slot < 0 and low < 0:
                    break
                complete = low >= 0 and low_state[low] == READY
            rows[end] = row
            ready += complete and ready == end
            end += 1
        memo.end, memo.ready, memo.clock = end, ready, index.clock
        return end, ready

    def _resident(self, row: int) -> bool:
        return row >= 0 and self._books.index.resident(row)

    def _ready(self, row: int) -> bool:
        return any(tier.ready(row) for tier in self._tiers.all)

    # ---- load

    def load(self, request: Request, match: Match, target: Sequence[int], *, arriving: bool) -> Load:
        """See :meth:`Request.load`."""
        request.must_be_open("load")
        books = self._books
        books.tick += 1
        arriving = arriving and not books.config.best_effort
        fetch, load = self._fetcher.draft(), books.ledger.draft(JobKind.LOAD)
        start, bottom, keys, rows = match.start, self._tiers.bottom, request.keys, request.rows
        index, names = books.index, books.index.keys
        limit = min(len(keys), start + len(target))
        by_tier = dict.fromkeys((Where.DEVICE, Where.HOST, Where.STORE), 0)
        ends = Reason.END if limit == len(keys) else Reason.TARGET_FULL
        page = start
        while page < limit:
            row = rows[page]
            if row < 0 or names[row] != keys[page]:
                row = index.find(keys[page])
            found = self._source(row, arriving=arriving) if row >= 0 else None
            if found is not None:
                tier, slot = found
                by_tier[tier.where] += 1
            else:
                if not arriving or page >= request.stored:
                    ends = Reason.ABSENT
                    break
                if not by_tier[Where.STORE] and self._leave(request, page, limit):
                    ends = Reason.SLOWER
                    break
                tier, slot = bottom, self._fetcher.reserve(request, fetch, page, start)
                if slot < 0:
                    ends = Reason.NO_ROOM
                    break
                by_tier[Where.STORE] += 1
            load.read(tier, slot)
            load.add(tier.where, Where.ENDPOINT, keys[page], slot, target[page - start])
            page += 1
        if page > start:
            self._fetcher.emit(request, fetch)
            books.ledger.emit(load, request)
            for where, pages in by_tier.items():
                books.stats.loaded[where] += pages
            books.touch(request, page - 1)
        request.release_hold()
        return Load(start, page - start, by_tier, ends)

    def _leave(self, request: Request, page: int, limit: int) -> bool:
        """True when what the store has from ``page`` on stays there, because computing it is faster."""
        pages = min(request.stored, limit) - page
        if not self._books.slower(pages):
            return False
        self._books.stats.slower += pages
        self._fetcher.probe(request, page)
        return True

    def _source(self, row: int, *, arriving: bool) -> tuple[Tier, int] | None:
        """Where to read a page: the first tier that has it READY, else one where it is arriving."""
        coming = None
        for tier in self._tiers.all:
            slot = tier.at[row]
            if slot >= 0:
                if tier.slots.state[slot] == READY:
                    return tier, slot
                coming = coming or (tier, slot)
        return coming if arriving else None

    # ---- store

    def start_lookup(self, request: Request) -> None:
        """Ask the store how much it has, unless everything is in memory already."""
        books = self._books
        if not books.store or not request.namespace.durable or not request.keys:
            return
        if self._resident(books.index.find(request.keys[-1])):
            return
        draft = books.ledger.draft(JobKind.LOOKUP)
        request.lookup = draft.id
        deadline = books.deadline(JobKind.LOOKUP)
        books.ledger.emit(draft, request, keys=request.keys, namespace=request.namespace, deadline=deadline)
