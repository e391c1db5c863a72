"""Memory tiers: which pages each holds, and what may leave it.

Evictable in tier T = READY, unpinned, no child in T, and (READY in another memory tier, or no child in any). So
no eviction makes an orphan. Each tier keeps its evictable pages on a heap ordered by the policy's rank; entries
are put there when a page may have become evictable and checked when they are taken, so a page's every change
costs O(log n) at most once, and an empty heap says "nothing evictable" at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush

from hicache.control.index import ROOT, UNKNOWN, PageIndex
from hicache.control.slots import READY, Slots
from hicache.records import Where

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class Tier:
    """One pool's slots and the pages in them. ``at[row]`` is a page's slot or -1; ``kids[row]`` its children here."""

    __slots__ = ("_heap", "_queued", "at", "evicted", "kids", "rank", "slots", "where")

    def __init__(self, where: Where, slots: int, index: PageIndex) -> None:
        self.where = where
        self.slots = Slots(slots)
        self.at, self.kids = index.columns()
        self.rank = array("Q", bytes(8 * slots))
        self._heap: list[int] = []  # rank << 32 | slot: at most one entry a slot
        self._queued = bytearray(slots)
        self.evicted = 0  # pages, since it was made

    def ready(self, row: int) -> bool:
        """True when the tier holds the page with all its bytes."""
        slot = self.at[row]
        return slot >= 0 and self.slots.state[slot] == READY

    def is_queued(self, row: int) -> bool:
        """True when the page is on offer to eviction."""
        return bool(self._queued[self.at[row]])

    def queue(self, slot: int) -> None:
        """Put the page in ``slot`` on offer, once."""
        if not self._queued[slot]:
            self._queued[slot] = 1
            heappush(self._heap, self.rank[slot] << _SLOT_BITS | slot)

    def pop(self, protect: int) -> int:
        """The slot of the READY, unpinned, childless page of lowest rank, off the heap; -1 when there is none.

        The page of row ``protect`` is passed over. Entries whose page cannot go any more are dropped on the way,
        entries whose page was used since are put back where they belong.
        """
        slots, heap, aside = self.slots, self._heap, -1
        state, pins, pages, kids = slots.state, slots.pins, slots.page, self.kids
        found = -1
        while heap:
            entry = heappop(heap)
            slot = entry & _SLOT_MASK
            self._queued[slot] = 0
            if state[slot] != READY or pins[slot] or kids[pages[slot]]:
                continue
            if self.rank[slot] > entry >> _SLOT_BITS:
                self.queue(slot)
            elif pages[slot] == protect:
                aside = slot
            else:
                found = slot
                break
        if aside >= 0:
            self.queue(aside)
        return found


class Tiers:
    """All memory tiers, highest first, over one index. Every arrival and departure of a page goes through here.

    ``breaks`` counts departures other than eviction: after one, a page's ancestors may be gone before it is.
    """

    __slots__ = ("all", "bottom", "breaks", "index", "top")

    def __init__(self, sizes: Sequence[tuple[Where, int]]) -> None:
        self.index = PageIndex(sum(slots for _, slots in sizes))
        self.all = [Tier(where, slots, self.index) for where, slots in sizes]
        self.top, self.bottom = self.all[0], self.all[-1]
        self.breaks = 0

    def __getitem__(self, where: Where) -> Tier:
        return next(tier for tier in self.all if tier.where == where)

    def below(self, tier: Tier) -> Tier | None:
        """The next lower memory tier, if there is one."""
        at = self.all.index(tier) + 1
        return self.all[at] if at < len(self.all) else None

    def enter(self, tier: Tier, row: int, filler: int, rank: int) -> int:
        """Reserve a slot for the page, to be filled by Job ``filler``; -1 when none is free."""
        slot = tier.slots.reserve(row, filler)
        if slot >= 0:
            tier.at[row] = slot
            tier.rank[slot] = rank
            parent = self.index.parents[row]
            if parent >= 0:
                tier.kids[parent] += 1
        return slot

    def _leave(self, tier: Tier, row: int) -> None:
        slot, parent = tier.at[row], self.index.parents[row]
        tier.at[row] = -1
        if parent >= 0:
            tier.kids[parent] -= 1
            if not tier.kids[parent]:
                above = tier.at[parent]
                if above >= 0 and tier.rank[above] < tier.rank[slot]:
                    tier.rank[above] = tier.rank[slot]
                self.offer(parent)
        self.index.forget(row)

    def commit(self, tier: Tier, slot: int) -> None:
        """The page in a FILLING slot is complete."""
        tier.slots.commit(slot)
        row = tier.slots.page[slot]
        if not tier.kids[row] or len(self.all) > 1:
            self.offer(row)

    def abort(self, tier: Tier, slot: int) -> None:
        """The page in a FILLING slot will not arrive, and its copy has stopped."""
        self.breaks += 1
        self._leave(tier, tier.slots.page[slot])
        tier.slots.abort(slot)

    def quarantine(self, tier: Tier, slot: int) -> None:
        """The page in a FILLING slot will not arrive, and its copy may go on."""
        self.breaks += 1
        self._leave(tier, tier.slots.page[slot])
        tier.slots.quarantine(slot)

    def evict(self, tier: Tier, slot: int) -> None:
        """Take a page out of the tier to make room; the caller has seen that it is evictable."""
        tier.evicted += 1
        self._leave(tier, tier.slots.page[slot])
        tier.slots.release(slot)

    def drop(self, tier: Tier, slot: int) -> None:
        """Take a READY page out because it is bad, whatever hangs on it."""
        self.breaks += 1
        self._leave(tier, tier.slots.page[slot])
        tier.slots.release(slot)

    def evictable(self, tier: Tier, row: int) -> bool:
        """The definition above, for a page that the tier holds."""
        slot = tier.at[row]
        if tier.slots.state[slot] != READY or tier.slots.pins[slot] or tier.kids[row]:
            return False
        return self.spare(tier, row)

    def spare(self, tier: Tier, row: int) -> bool:
        """True when leaving ``tier`` would orphan nobody: READY in another memory tier, or no child in any."""
        for other in self.all:
            if other is not tier and other.ready(row):
                return True
        for other in self.all:  # noqa: SIM110  (an inner function a page is too slow here)
            if other.kids[row]:
                return False
        return True

    def offer(self, row: int) -> None:
        """Put the page on offer in every tier where it may now leave."""
        for tier in self.all:
            slot = tier.at[row]
            if slot >= 0 and not tier.kids[row]:
                slots = tier.slots
                if slots.state[slot] == READY and not slots.pins[slot]:
                    tier.queue(slot)

    def orphaned(self, row: int) -> bool:
        """True when the page's parent is in no memory tier."""
        parent = self.index.parents[row]
        return parent == UNKNOWN or (parent != ROOT and not self.index.resident(parent))
