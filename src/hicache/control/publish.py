"""Publishing: pages the engine has computed become pages of the highest memory tier with room, and go down from there.

    request's pages   0 ........ cursor ........ upto ........ len(keys)
                      |  held by  |  offered by   |  not full yet
                      |  a tier   |  this call    |

The cursor first goes back while the page before it has been evicted (the endpoint still has its bytes). A page the
highest tier holds or is being given is a duplicate and stays private. A new page is reserved without ever evicting
its own parent; where no tier has room the cursor stays and the next call tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hicache.control.books import Books
from hicache.control.down import Below
from hicache.control.index import ROOT, STORED
from hicache.control.request import Request
from hicache.control.tiers import Tier
from hicache.keys import PageKey
from hicache.policy import WritePolicy
from hicache.records import JobKind, Where


class Publisher:
    """Turns computed pages into saves, and into the Jobs that write them down."""

    def __init__(self, books: Books, below: Below) -> None:
        self._books = books
        self._below = below

    def publish(self, request: Request, upto: int, source: Sequence[int]) -> int:
        """See :meth:`Request.publish`."""
        books = self._books
        if books.counts_wishes:
            self.count(request, upto)
        self._roll_back(request)
        first = request.cursor
        if first >= upto:
            return first
        books.tick += 1
        below = self._save(request, first, upto, source)
        if below:
            self._write_down(request, below)
        return request.cursor

    def count(self, request: Request, upto: int) -> None:
        """Count every page before ``upto`` as wanted by this request, once."""
        for key in request.keys[request.counted : upto]:
            self._books.ghosts.count(key)
        request.counted = max(request.counted, upto)

    def _roll_back(self, request: Request) -> None:
        index, cursor, keys = self._books.index, request.cursor, request.keys
        while cursor:
            row = index.find(keys[cursor - 1])
            if row >= 0 and index.resident(row):
                break
            cursor -= 1
        request.cursor = cursor

    def _save(self, request: Request, first: int, upto: int, source: Sequence[int]) -> list[int]:
        """Reserve and save the new pages; returns the rows that a tier below may lack."""
        books, tiers, index = self._books, self._books.tiers, self._books.index
        top, keys = tiers.top, request.keys
        shards, mask, hints, names = index.shards, index.mask, request.rows, index.keys
        lacking = self._lacking()
        space, rank = books.space(request.namespace), books.rank()
        draft = books.ledger.draft(JobKind.SAVE)
        parent = index.find(keys[first - 1]) if first else ROOT
        below: list[int] = []
        for page in range(first, upto):
            key = keys[page]
            row = hints[page]
            if row < 0 or names[row] != key:
                row = shards[key[0] & mask].get(key, ROOT)
            if row >= 0 and top.at[row] >= 0:
                books.stats.duplicates += 1
            elif (tier := self._place(key, row, parent, upto - page)) is not None:
                row = index.row(key, space, parent)
                slot = tiers.enter(tier, row, draft.id, rank)
                draft.add(Where.ENDPOINT, tier.where, key, source[page], slot)
            elif row >= 0 and index.resident(row):
                books.stats.duplicates += 1
            else:
                books.stats.not_saved += 1
                break
            if lacking and lacking(row):
                below.append(row)
            hints[page] = parent = row
            request.cursor = page + 1
        if not draft.empty:
            books.stats.saved += books.ledger.emit(draft, request).pages
        return below

    def _place(self, key: PageKey, row: int, parent: int, want: int) -> Tier | None:
        """The tier that takes a page: the highest that holds its parent and has room; None when none takes it.

        So a tier holds chains from their root, and what does not fit into one goes to the next. A page that a lower
        tier has already is not copied there again.
        """
        books = self._books
        for tier in books.tiers.all:
            if row >= 0 and tier.at[row] >= 0:
                return None
            if parent != ROOT and tier.at[parent] < 0:
                continue
            gate = books.config.into_host if tier.where is Where.HOST else WritePolicy.THROUGH
            if gate is WritePolicy.SELECTIVE and not books.ghosts.wanted(key, gate):
                continue
            if tier.slots.free or self._below.room(tier, parent, want):
                return tier
        return None

    def _lacking(self) -> Callable[[int], bool] | None:
        """A test for "some tier below does not have this page yet", or None when nothing lies below."""
        books, tiers = self._books, self._books.tiers
        flags, at = books.index.flags, tiers.bottom.at
        if books.store:
            return lambda row: at[row] < 0 or not flags[row] & STORED
        return (lambda row: at[row] < 0) if len(tiers.all) > 1 else None

    def _write_down(self, request: Request, rows: list[int]) -> None:
        """Send pages down the legs whose policy wants them now."""
        books, tiers = self._books, self._books.tiers
        for tier in tiers.all[:-1]:
            self._below.send_down(tier, self._wanted(rows, books.config.into_host), request)
        if books.store and request.namespace.durable:
            self._below.write(self._wanted(rows, books.config.into_store), request)

    def _wanted(self, rows: list[int], policy: WritePolicy) -> list[int]:
        if policy.hits == 1:
            return rows
        keys, ghosts = self._books.index.keys, self._books.ghosts
        return [row for row in rows if ghosts.wanted(keys[row], policy)]
