"""Segments and slots inside one write transaction: which are free, and who holds those that are neither.

Keeps true: a slot is exactly one of free (its bit is set), owned (a row of ``own``) or in one record's row (I1);
whoever takes a slot from one of the three puts it into another in the same transaction. The number of free
slots of each slot size stands in ``meta``, so that a full directory is not searched.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from hicache.data.store.segment.tables import (
    Place,
    SegmentRow,
    Tables,
    pack_own,
    pack_u32,
    pack_u64,
    unpack_own,
    unpack_u32,
    unpack_u64,
)
from hicache.errors import InvariantError

_FREE = b"free/"


class Slots:
    """Segment bitmaps, owned slots and named numbers of one write transaction."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables) -> None:
        self._txn = txn
        self._seg = tables.seg
        self._own = tables.own
        self._meta = tables.meta

    # -- named numbers ----------------------------------------------------------------------------------------

    def number(self, name: bytes) -> int:
        """A number of ``meta``; 0 when it was never set."""
        value = self._txn.get(name, db=self._meta)
        return 0 if value is None else unpack_u64(value)

    def set_number(self, name: bytes, value: int) -> None:
        """Set a number of ``meta``."""
        self._txn.put(name, pack_u64(value), db=self._meta)

    # -- segments -----------------------------------------------------------------------------------------------

    @property
    def segments(self) -> int:
        """How many segments are reserved."""
        return self._txn.stat(self._seg)["entries"]

    def segment(self, segment: int) -> SegmentRow | None:
        """The row of one segment."""
        value = self._txn.get(pack_u32(segment), db=self._seg)
        return None if value is None else SegmentRow.unpack(value)

    def rows(self) -> Iterator[tuple[int, SegmentRow]]:
        """All segments in order."""
        with self._txn.cursor(db=self._seg) as cursor:
            for key, value in cursor:
                yield unpack_u32(key), SegmentRow.unpack(value)

    def add_segment(self, segment: int, row: SegmentRow) -> None:
        """Reserve a segment, all of its slots free."""
        self._put(segment, row)
        self._count_free(row.slot_blocks, row.free)

    def drop_segment(self, segment: int) -> None:
        """Give a segment up; the caller has emptied it."""
        row = self.segment(segment)
        if row is None or row.free != row.slots:
            raise InvariantError("a segment in use is dropped", segment=segment)
        self._count_free(row.slot_blocks, -row.free)
        self._txn.delete(pack_u32(segment), db=self._seg)

    def recut(self, segment_blocks: int, slot_blocks: int) -> bool:
        """Turn a segment of another slot size, if one is wholly free, into slots of this size."""
        if not any(free for size, free in self._free_by_size() if size != slot_blocks):
            return False
        for segment, row in self.rows():
            if row.slot_blocks != slot_blocks and row.free == row.slots:
                self.drop_segment(segment)
                self.add_segment(segment, SegmentRow.all_free(segment_blocks, slot_blocks))
                return True
        return False

    # -- free slots -------------------------------------------------------------------------------------------

    def free(self, slot_blocks: int) -> int:
        """Free slots of this size."""
        return self.number(_FREE + pack_u32(slot_blocks))

    def take_free(self, slot_blocks: int, want: int, *, avoid: int = 0) -> list[Place]:
        """Up to ``want`` free slots, lowest place first, none from segment ``avoid``; the caller files them elsewhere."""
        places: list[Place] = []
        if want <= 0 or not self.free(slot_blocks):
            return places
        changed: list[tuple[int, SegmentRow]] = []
        for segment, row in self.rows():
            if row.slot_blocks != slot_blocks or not row.free or segment == avoid:
                continue
            while row.free and len(places) < want:
                lowest = row.bitmap & -row.bitmap
                row.bitmap ^= lowest
                row.free -= 1
                places.append(Place(segment, (lowest.bit_length() - 1) * slot_blocks, slot_blocks))
            changed.append((segment, row))
            if len(places) == want:
                break
        for segment, row in changed:
            self._put(segment, row)
        self._count_free(slot_blocks, -len(places))
        return places

    def put_free(self, place: Place) -> None:
        """Make a slot free that the caller has just taken from a row or an owner."""
        row = self.segment(place.segment)
        bit = 1 << (place.offset // place.blocks)
        if row is None or row.slot_blocks != place.blocks or row.bitmap & bit:
            raise InvariantError("a slot is freed that is free or nowhere", place=place)
        row.bitmap |= bit
        row.free += 1
        self._put(place.segment, row)
        self._count_free(place.blocks, 1)

    # -- owned slots --------------------------------------------------------------------------------------------

    def own(self, session: int, place: Place) -> None:
        """Note that a running process holds this slot."""
        self._txn.put(pack_own(session, place.segment, place.offset), pack_u32(place.blocks), db=self._own)

    def disown(self, session: int, place: Place) -> None:
        """Forget that; the caller files the slot elsewhere."""
        if not self._txn.delete(pack_own(session, place.segment, place.offset), db=self._own):
            raise InvariantError("a slot is given back that was not held", session=session, place=place)

    def owns(self, session: int, place: Place) -> bool:
        """True when this session holds the slot."""
        return self._txn.get(pack_own(session, place.segment, place.offset), db=self._own) is not None

    def owned(self, session: int) -> list[Place]:
        """Slots that this session holds."""
        places = []
        with self._txn.cursor(db=self._own) as cursor:
            found = cursor.set_range(pack_own(session, 0, 0))
            while found:
                owner, segment, offset = unpack_own(cursor.key())
                if owner != session:
                    break
                places.append(Place(segment, offset, unpack_u32(cursor.value())))
                found = cursor.next()
        return places

    def held_segments(self) -> set[int]:
        """Segments in which some session holds slots."""
        with self._txn.cursor(db=self._own) as cursor:
            return {unpack_own(key)[1] for key in cursor.iternext(values=False)}

    def owners(self) -> list[int]:
        """Sessions that hold slots."""
        sessions: list[int] = []
        with self._txn.cursor(db=self._own) as cursor:
            found = cursor.first()
            while found:
                sessions.append(unpack_own(cursor.key())[0])
                found = cursor.set_range(pack_own(sessions[-1] + 1, 0, 0))
        return sessions

    def _free_by_size(self) -> list[tuple[int, int]]:
        sizes = []
        with self._txn.cursor(db=self._meta) as cursor:
            found = cursor.set_range(_FREE)
            while found and cursor.key().startswith(_FREE):
                sizes.append((unpack_u32(cursor.key()[len(_FREE) :]), unpack_u64(cursor.value())))
                found = cursor.next()
        return sizes

    def _put(self, segment: int, row: SegmentRow) -> None:
        self._txn.put(pack_u32(segment), row.pack(), db=self._seg)

    def _count_free(self, slot_blocks: int, change: int) -> None:
        name = _FREE + pack_u32(slot_blocks)
        self.set_number(name, self.number(name) + change)
