"""Lease: the only way to keep a slot from being reused while something reads it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from hicache.control.tiers import Tier, Tiers
from hicache.errors import InvariantError


class Lease:
    """Pins on slots of one or more tiers, given back together by :meth:`close`, once.

    The holder is a Job in flight, or a request that holds its deepest fetched page.
    """

    __slots__ = ("_open", "_pins", "_tiers")

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._pins: list[tuple[Tier, int]] = []
        self._open = True

    def pin(self, tier: Tier, slot: int) -> int:
        """Pin one slot. Returns the id of the Job that still fills it, which the holder must follow; else 0."""
        filler = tier.slots.pin(slot)
        self._pins.append((tier, slot))
        return filler

    def pins(self) -> list[tuple[Tier, int]]:
        """What is pinned, for the audit."""
        return list(self._pins)

    def close(self) -> None:
        """Give every pin back; a page that nobody reads any more is on offer to eviction again."""
        if not self._open:
            raise InvariantError("a lease is closed once", pins=len(self._pins))
        self._open = False
        offer = self._tiers.offer
        for tier, slot in self._pins:
            if tier.slots.unpin(slot) and not tier.kids[tier.slots.page[slot]]:
                offer(tier.slots.page[slot])
        self._pins.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
