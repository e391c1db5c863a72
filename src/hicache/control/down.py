"""Room and the legs downward: eviction, memory tier -> lower memory tier, and lowest memory tier -> store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache.control.books import Books
from hicache.control.index import KEPT, ROOT, STORED
from hicache.control.ledger import Draft
from hicache.control.request import Request
from hicache.control.slots import FILLING
from hicache.control.tiers import Tier
from hicache.policy import WritePolicy
from hicache.records import JobKind, Where


class Below:
    """Makes room in memory tiers and writes pages down, on publication, on eviction and on flush."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._tiers = books.tiers
        self._index = books.index

    def _back(self, tier: Tier) -> bool:
        """True when pages leave ``tier`` downward only as they are evicted."""
        config = self._books.config
        if tier is not self._tiers.bottom:
            return config.into_host is WritePolicy.BACK
        return self._books.store and config.into_store is WritePolicy.BACK

    # ---- room

    def room(self, tier: Tier, protect: int, want: int = 1) -> bool:
        """Make sure a slot of ``tier`` is free, without evicting the page of row ``protect``; False when none can be had now.

        Under ``back`` a victim that exists nowhere below is written down instead, at most ``want`` of them at a
        time: they can go once that has ended. If nothing below takes them, they are dropped.
        """
        if tier.slots.free:
            return True
        back = self._back(tier)
        dirty: list[int] = []
        while (slot := tier.pop(protect)) >= 0:
            row = tier.slots.page[slot]
            if back and self._dirty(tier, row):
                if len(dirty) >= want:
                    tier.queue(slot)
                    break
                self._gather(tier, row, dirty, want, protect)
            elif self._tiers.spare(tier, row):
                self._tiers.evict(tier, slot)
                break
        if dirty:
            self._write_back(tier, dirty)
        return tier.slots.free > 0

    def evict(self, tier: Tier, pages: int) -> int:
        """Free ``pages`` slots beyond those that are free; returns how many could be freed now."""
        before = tier.slots.free
        freed = 0
        back = self._back(tier)
        dirty: list[int] = []
        while freed + len(dirty) < pages and (slot := tier.pop(ROOT)) >= 0:
            row = tier.slots.page[slot]
            if back and self._dirty(tier, row):
                self._gather(tier, row, dirty, pages - freed, ROOT)
            elif self._tiers.spare(tier, row):
                self._tiers.evict(tier, slot)
                freed += 1
        if dirty:
            self._write_back(tier, dirty)
        return tier.slots.free - before

    def _dirty(self, tier: Tier, row: int) -> bool:
        """True when the page would be lost: it is not below, and writing it down has not failed before."""
        if self._index.flags[row] & KEPT:
            return False
        below = self._tiers.below(tier)
        if below is not None:
            return not below.ready(row)
        return not self._index.flags[row] & STORED and self._books.spaces[self._index.spaces[row]].durable

    def _gather(self, tier: Tier, row: int, dirty: list[int], most: int, protect: int) -> None:
        """Add a dirty leaf to the pages to be written down, and the ancestors that would be leaves after it."""
        slots = tier.slots
        while len(dirty) < most:
            dirty.append(row)
            row = self._index.parents[row]
            if (
                row < 0
                or row == protect
                or tier.kids[row] > 1
                or not tier.ready(row)
                or slots.pins[tier.at[row]]
            ):
                return
            if not self._dirty(tier, row):
                return

    def _write_back(self, tier: Tier, rows: Sequence[int]) -> None:
        """Start writing victims down; those that nothing below can take are dropped, or offered again if below is busy."""
        below = self._tiers.below(tier)
        if below is not None:
            taken = self.send_down(tier, self._behind_ancestors(rows), None)
            busy = FILLING in below.slots.state or bool(self._books.storing)  # below has room once they end
            if taken and self._books.store and self._books.config.into_store is WritePolicy.THROUGH:
                self.write(taken, None)
        else:
            taken = self.write(rows, None)
            busy = False
        left = set(rows).difference(taken)
        for row in [row for row in rows if row in left]:  # leaves first
            if not busy and tier.at[row] >= 0 and self._tiers.evictable(tier, row):
                self._tiers.evict(tier, tier.at[row])
            elif tier.at[row] >= 0:
                self._tiers.offer(row)

    def _behind_ancestors(self, rows: Sequence[int]) -> list[int]:
        """Victims, leaves first, as pages to be copied down, parents first.

        Where the tier below writes to the store as it evicts, the ancestors that are in neither go before: a page
        that came down without them could never be stored.
        """
        if not self._books.store or self._books.config.into_store is not WritePolicy.BACK:
            return list(reversed(rows))
        index, bottom, storing = self._index, self._tiers.bottom, self._books.storing
        order: dict[int, None] = {}
        for row in reversed(rows):
            chain = [row]
            for above in index.ancestors(row):
                flags = index.flags[above]
                if (
                    above in order
                    or bottom.at[above] >= 0
                    or flags & (STORED | KEPT)
                    or index.keys[above] in storing
                ):
                    break
                chain.append(above)
            order.update(dict.fromkeys(reversed(chain)))
        return list(order)

    # ---- memory tier -> lower memory tier

    def send_down(self, tier: Tier, rows: Iterable[int], request: Request | None) -> list[int]:
        """Copy pages of ``tier`` to the tier below, parents first; returns the rows for which that has started.

        Pages already below and orphans are left out, and all from the first on for which no room can be made.
        """
        below = self._tiers.below(tier)
        if below is None:
            return []
        draft = self._books.ledger.draft(JobKind.DOWN)
        keys, sources, targets = draft.span(tier.where, below.where)
        started = []
        for row in rows:
            slot = tier.at[row]
            if slot < 0 or below.at[row] >= 0 or self._tiers.orphaned(row):
                continue
            if not self.room(
                below, ROOT
            ):  # its parent has a child above, so it leaves below only if it is above too
                self._books.stats.not_stored += 1
                break
            place = self._tiers.enter(below, row, draft.id, tier.rank[slot])
            draft.read(tier, slot)
            keys.append(self._index.keys[row])
            sources.append(slot)
            targets.append(place)
            started.append(row)
        self._emit(draft, request)
        return started

    # ---- lowest memory tier -> store

    def write(self, rows: Iterable[int], request: Request | None) -> list[int]:
        """Write pages of the lowest memory tier to the store, each behind its missing ancestors; returns the rows begun.

        A page whose chain to the root is neither in the store nor in the tier is left out, for it could never be
        found, and so is one behind an orphan.
        """
        index, bottom, storing = self._index, self._tiers.bottom, self._books.storing
        drafts: dict[int, Draft] = {}
        started = []
        for row in rows:
            chain = self._missing(row)
            if not chain:
                continue
            space = index.spaces[row]
            draft = drafts.get(space)
            if draft is None:
                draft = drafts[space] = self._books.ledger.draft(JobKind.WRITE)
                draft.span(bottom.where, Where.STORE)
            for page in chain:
                key, parent = index.keys[page], index.parents[page]
                parent_key = self._books.spaces[space].root if parent == ROOT else index.keys[parent]
                earlier = storing.get(parent_key, draft.id)
                if earlier != draft.id:
                    draft.after.add(earlier)
                slot = bottom.at[page]
                draft.read(bottom, slot)
                draft.columns[0].append(key)
                draft.columns[1].append(slot)
                draft.parents.append(parent_key)
                storing[key] = draft.id
                started.append(page)
        for draft in drafts.values():
            self._emit(draft, request)
        return started

    def _missing(self, row: int) -> list[int]:
        """The page and its ancestors that the store lacks, root first; empty when none, or the chain is broken."""
        index, bottom = self._index, self._tiers.bottom
        if not self._books.spaces[index.spaces[row]].durable:
            return []
        chain: list[int] = []
        while row != ROOT:
            if row < 0:
                return []
            if index.flags[row] & STORED or index.keys[row] in self._books.storing:
                if not index.resident(row):  # what hangs on it is an orphan
                    return []
                break
            if bottom.at[row] < 0:
                return []
            chain.append(row)
            row = index.parents[row]
        chain.reverse()
        return chain

    def flush(self) -> int:
        """Start writing down what the lowest tier lacks (the store, if there is one); returns how many pages that is.

        Called again after the Jobs have ended it reaches further; a number that does not fall any more is what
        nothing below can take.
        """
        index, tiers = self._index, self._tiers
        rows = [row for row in index.root_first() if index.resident(row)]
        if self._books.store:
            spaces = self._books.spaces
            missing = [
                row for row in rows if not index.flags[row] & STORED and spaces[index.spaces[row]].durable
            ]
        else:
            missing = [row for row in rows if tiers.bottom.at[row] < 0]
        for tier in tiers.all[:-1]:
            self.send_down(tier, [row for row in missing if tier.ready(row)], None)
        if self._books.store:
            self.write(missing, None)
        return len(missing)

    def _emit(self, draft: Draft, request: Request | None) -> None:
        if draft.empty:
            return
        namespace = None
        if draft.kind is JobKind.WRITE:
            first = draft.spans()[0].keys[0]
            namespace = self._books.spaces[self._index.spaces[self._index.find(first)]]
        deadline = self._books.deadline(draft.kind)
        self._books.ledger.emit(draft, request, namespace=namespace, deadline=deadline)
