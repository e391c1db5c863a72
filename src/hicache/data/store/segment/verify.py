"""Reading every record and comparing it with its row: what is wrong is dropped, as a read would drop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.proof import fault_of
from hicache.data.store.segment.tables import Row


@dataclass(slots=True)
class Verified:
    """What a verification found. ``damaged`` are (record key, reason); they are dropped unless it was only a look."""

    records: int = 0
    nbytes: int = 0
    holes: int = 0
    damaged: list[tuple[bytes, str]] = field(default_factory=list)


def verify(
    directory: Directory,
    rows: Iterable[tuple[bytes, Row]],
    *,
    mend: bool = True,
    progress: Callable[[int], None] = lambda _rows: None,
) -> Verified:
    """Read and check every record of ``rows``; with ``mend`` the damaged ones leave the index.

    What is written, evicted or moved meanwhile is not damage: a row counts as wrong only while it still says the
    same of the same place. UnavailableError when the system has no means to read, which says nothing of the record.
    """
    found, buffer = Verified(), memoryview(bytearray(1 << 20))
    for key, row in rows:
        progress(1)
        if row.hole:
            found.holes += 1
            continue
        if HEADER_NBYTES + row.nbytes > buffer.nbytes:
            buffer = memoryview(bytearray(HEADER_NBYTES + row.nbytes))
        wrong = fault_of(directory.segments, key, row, buffer)
        if wrong is not None and row.same_bytes(directory.rows([key])[0]):
            found.damaged.append((key, wrong))
            if mend:
                with directory.writing() as books:
                    books.drop(key, row)
            continue
        found.records += 1
        found.nbytes += row.nbytes
    return found
