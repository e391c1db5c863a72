"""Giving up a segment when the cap has become smaller: evict the coldest, move the rest, drop the file.

One segment a transaction: whoever dies in the middle leaves the segment as it was, or a file without a row that
the next open removes.
"""

from __future__ import annotations

from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment.books import Books
from hicache.data.store.segment.files import OpenSegments
from hicache.data.store.segment.proof import fault_of
from hicache.data.store.segment.tables import BLOCK_NBYTES, Place, Row, Tables


def trim(books: Books, tables: Tables, segments: OpenSegments) -> int | None:
    """Empty one segment and drop its row if the cap asks for it; its number, or None when there is nothing to do.

    Segments with slots in the hands of running processes are left out; if there are only such, the cap is
    reached at a later open.
    """
    slots = books.slots
    if slots.segments * slots.number(b"segment_blocks") * BLOCK_NBYTES <= slots.number(b"cap"):
        return None
    victim = _choose(books)
    if victim is None:
        return None
    segment, blocks = victim
    inside = _records_of(books, tables, segment)
    rank = 0
    while len(inside) > _free_elsewhere(books, segment, blocks):
        leaf = books.tree.coldest(blocks, rank, frozenset())
        if leaf is None:
            return None
        key, row = leaf
        rank = row.rank
        books.tree.remove(key, row)
        slots.put_free(row.place)
        inside.pop(key, None)
        books.tally.evicted += 1
    targets = slots.take_free(blocks, len(inside), avoid=segment)
    for (key, row), target in zip(inside.items(), targets, strict=True):
        _move(books, segments, key, row, target)
    for number in sorted({target.segment for target in targets}):
        with segments.use(number) as fd:
            segments.files.sync(fd)
    slots.drop_segment(segment)
    return segment


def _choose(books: Books) -> tuple[int, int] | None:
    """The segment with the fewest records among those that no running process writes to: (number, slot blocks)."""
    busy = books.slots.held_segments()
    idle = [
        (row.slots - row.free, number, row.slot_blocks)
        for number, row in books.slots.rows()
        if number not in busy
    ]
    if not idle:
        return None
    _, number, blocks = min(idle)
    return number, blocks


def _records_of(books: Books, tables: Tables, segment: int) -> dict[bytes, Row]:
    with books.txn.cursor(db=tables.rec) as cursor:
        rows = [(key, Row.unpack(value)) for key, value in cursor]
    return {key: row for key, row in rows if not row.hole and row.segment == segment}


def _free_elsewhere(books: Books, segment: int, blocks: int) -> int:
    row = books.slots.segment(segment)
    return books.slots.free(blocks) - (row.free if row is not None else 0)


def _move(books: Books, segments: OpenSegments, key: bytes, row: Row, target: Place) -> None:
    """Copy one record, verified; a damaged one is dropped instead."""
    view, source = memoryview(bytearray(HEADER_NBYTES + row.nbytes)), row.place
    if fault_of(segments, key, row, view) is not None:
        books.slots.put_free(target)
        books.drop(key)
        return
    with segments.use(target.segment) as fd:
        segments.files.write(fd, [view], target.offset * BLOCK_NBYTES)
    moved = books.tree.row(key)
    if moved is not None:
        moved.segment, moved.offset = target.segment, target.offset
        books.tree.put(key, moved)
    books.slots.put_free(source)
