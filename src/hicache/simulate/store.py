"""A store without bytes: which pages it would hold, bounded, leaves first, by the same policy of eviction."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.control.index import ROOT
from hicache.control.tiers import Tiers
from hicache.keys import PageKey
from hicache.records import Reason, Where

_NO_JOB = 1


class SimulatedStore:
    """``pages`` places, in the books that memory tiers use. A page needs its parent; the least useful leaf goes."""

    def __init__(self, pages: int) -> None:
        self._tiers = Tiers([(Where.HOST, pages)])
        self._tier = self._tiers.top
        self._tick = 0
        self.written = 0  # pages, since it was made
        self.read = 0

    @property
    def evicted(self) -> int:
        """Pages that had to go, since it was made."""
        return self._tier.evicted

    def found(self, keys: Sequence[PageKey]) -> int:
        """How many leading pages it holds."""
        index = self._tiers.index
        for page, key in enumerate(keys):
            if index.find(key) < 0:
                return page
        return len(keys)

    def fetch(self, keys: Sequence[PageKey]) -> dict[PageKey, Reason]:
        """Read pages; returns those that it does not have."""
        bad = {key: Reason.MISS for key in keys if self._tiers.index.find(key) < 0}
        self.read += len(keys) - len(bad)
        return bad

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Pages served to a request count as used now."""
        self._tick += 1
        for key in keys:
            row = self._tiers.index.find(key)
            if row >= 0:
                self._tier.rank[self._tier.at[row]] = self._tick

    def write(
        self, keys: Sequence[PageKey], parents: Sequence[PageKey], root: PageKey
    ) -> dict[PageKey, Reason]:
        """Write pages, parents first; returns those that it did not take."""
        self._tick += 1
        index, tier, tiers = self._tiers.index, self._tier, self._tiers
        bad: dict[PageKey, Reason] = {}
        for key, parent_key in zip(keys, parents, strict=True):
            if index.find(key) >= 0:
                continue
            parent = ROOT if parent_key == root else index.find(parent_key)
            if parent < 0 and parent_key != root:
                bad[key] = Reason.PARENT_ABSENT
                continue
            if not tier.slots.free:
                victim = tier.pop(parent)
                if victim < 0:
                    bad[key] = Reason.REFUSED
                    continue
                tiers.evict(tier, victim)
            slot = tiers.enter(tier, index.row(key, 0, parent), _NO_JOB, self._tick)
            tiers.commit(tier, slot)
            self.written += 1
        return bad
