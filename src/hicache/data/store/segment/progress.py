"""How far one call has come with writing: several threads write, one commits what is written, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hicache.data.store.segment.books import Pending


class Progress:
    """Records of one call, in order; those at the front that are written may be committed, in parts of some bytes."""

    def __init__(self, records: Sequence[Pending], part_nbytes: int) -> None:
        self._records = records
        self._number = {id(record): number for number, record in enumerate(records)}
        self._written = [False] * len(records)
        self._errors: dict[int, OSError] = {}
        self._part_nbytes = part_nbytes
        self._front = self._taken = self._ready = 0
        self._stopped = False
        self._changed = threading.Condition()

    def tell(self, record: Pending, error: OSError | None) -> None:
        """A record is written, or the disk did not take it."""
        with self._changed:
            number = self._number[id(record)]
            self._written[number] = True
            if error is not None:
                self._errors[number] = error
            while self._front < len(self._records) and self._written[self._front]:
                self._ready += self._records[self._front].nbytes
                self._front += 1
            if self._is_due():
                self._changed.notify()

    def stop(self) -> None:
        """Nothing more will be written: what has not been taken is not to be committed."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self) -> tuple[list[Pending], list[tuple[Pending, OSError]]]:
        """Wait for a part's bytes at the front, or for the end; the records, and those of them that were refused.

        No records mean that there will be none any more.
        """
        with self._changed:
            self._changed.wait_for(self._is_due)
            if self._stopped:
                return [], []
            numbers = range(self._taken, self._front)
            self._taken, self._ready = self._front, 0
            refused = [(self._records[n], self._errors[n]) for n in numbers if n in self._errors]
            return [self._records[n] for n in numbers], refused

    def _is_due(self) -> bool:
        return self._stopped or self._ready >= self._part_nbytes or self._front == len(self._records)
