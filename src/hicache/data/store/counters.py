"""What a store counts since it was opened: plain integers that only grow, shown by ``usage()``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from hicache.data.store.base import Corrupt, Hit, ReadOutcome, WriteOutcome


@dataclass(slots=True)
class Counters:
    """Records, unless the name says bytes. Guarded by the lock of the store that owns it."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    stored_bytes: int = 0
    exists: int = 0
    parent_absent: int = 0
    no_room: int = 0
    failed: int = 0
    evicted: int = 0
    evicted_for_space: int = 0
    evicted_for_cap: int = 0
    deleted: int = 0
    reclaimed_slots: int = 0
    set_aside: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def count_read(self, outcomes: list[ReadOutcome]) -> None:
        """Add the outcomes of one read; every miss and every damage keeps its reason."""
        for outcome in outcomes:
            if isinstance(outcome, Hit):
                self.hits += 1
                self.hit_bytes += outcome.nbytes
            elif isinstance(outcome, Corrupt):
                self.corrupt += 1
                self.reasons[f"corrupt_{outcome.reason}"] += 1
            else:
                self.misses += 1
                self.reasons[f"miss_{outcome.reason}"] += 1

    def count_write(self, outcomes: list[WriteOutcome], nbytes: list[int]) -> None:
        """Add the outcomes of one write; ``nbytes`` are the payloads' lengths."""
        for outcome, length in zip(outcomes, nbytes, strict=True):
            setattr(self, outcome.value, getattr(self, outcome.value) + 1)
            if outcome is WriteOutcome.STORED:
                self.stored_bytes += length

    def as_gauges(self) -> dict[str, int]:
        """All of them by name, the reasons flattened into the same table."""
        table = asdict(self)
        reasons: dict[str, int] = table.pop("reasons")
        return {**table, **reasons}
