"""Removing records on purpose: which go is decided on a picture of the index, and proven again as each one goes.

Only leaves go, then the parents that became leaves, so every prefix that is left stays whole.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hicache.data.store.record import NO_PARENT
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.tables import BLOCK_NBYTES, Row, slot_blocks_of

BATCH = 256
"""Records a write transaction."""


def _size(row: Row) -> int:
    return 0 if row.hole else slot_blocks_of(row.nbytes) * BLOCK_NBYTES


@dataclass(slots=True)
class Picture:
    """Rows of a directory at one time, and the records in the order in which they may go."""

    rows: dict[bytes, Row]

    @classmethod
    def of(cls, rows: Iterable[tuple[bytes, Row]]) -> Picture:
        """Of everything that a survey finds; some 500 bytes a record."""
        return cls(dict(rows))

    def nbytes(self, keys: Iterable[bytes]) -> int:
        """Bytes of the slots that these records lie in."""
        return sum(_size(self.rows[key]) for key in keys)

    def going(self, wanted: Callable[[Row], bool]) -> list[bytes]:
        """Records that ``wanted`` names and that nothing below keeps, coldest first, each before its parent."""
        return list(self._from_the_leaves(wanted))

    def coldest(self, nbytes: int, *, first: Sequence[bytes] = ()) -> list[bytes]:
        """``first`` (of :meth:`going`), then the coldest leaves, until at most ``nbytes`` of slots are in use."""
        keys, gone = list(first), set(first)
        left = self.nbytes(self.rows) - self.nbytes(keys)
        for key in self._from_the_leaves(lambda _row: True):
            if left <= nbytes:
                break
            if key not in gone:
                left -= _size(self.rows[key])
                keys.append(key)
        return keys

    def _from_the_leaves(self, wanted: Callable[[Row], bool]) -> Iterator[bytes]:
        children = Counter(row.parent for row in self.rows.values() if row.parent != NO_PARENT)
        ranks = {key: row.rank for key, row in self.rows.items()}
        leaves = [(row.rank, key) for key, row in self.rows.items() if not children[key]]
        heapq.heapify(leaves)
        while leaves:
            _, key = heapq.heappop(leaves)
            row = self.rows[key]
            if not row.hole and not wanted(row):
                continue
            if not row.hole:
                yield key
            parent = row.parent
            if parent not in self.rows:
                continue
            children[parent] -= 1
            ranks[parent] = max(ranks[parent], ranks[key])
            if not children[parent]:
                heapq.heappush(leaves, (ranks[parent], parent))


def remove(directory: Directory, keys: list[bytes], picture: Picture) -> tuple[int, int]:
    """Remove records that are still as the picture shows them and have no children: (records, bytes of slots)."""
    count = nbytes = 0
    for start in range(0, len(keys), BATCH):
        with directory.writing() as books:
            for key in keys[start : start + BATCH]:
                seen, row = picture.rows[key], books.tree.row(key)
                if row is None or row.children or not seen.same_bytes(row) or row.uses != seen.uses:
                    continue
                books.drop(key)
                count += 1
                nbytes += _size(seen)
    return count, nbytes


def give_back(directory: Directory) -> int:
    """Remove segment files that hold no record and no running process's slot; returns their bytes."""
    with directory.writing() as books:
        held = books.slots.held_segments()
        empty = [n for n, row in books.slots.rows() if row.free == row.slots and n not in held]
        for number in empty:
            books.slots.drop_segment(number)
        segment_bytes = books.slots.number(b"segment_blocks") * BLOCK_NBYTES
    for number in empty:
        directory.segments.forget(number)
        directory.files.remove(directory.segments.path(number))
    return len(empty) * segment_bytes
