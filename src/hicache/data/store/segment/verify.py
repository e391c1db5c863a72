"""Reading every record and comparing it with its row: what is wrong is dropped, as a read would drop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hicache.data.store.record import HEADER_NBYTES
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.proof import fault_of
from hicache.data.store.segment.tables import Row

LOOKS = 4
"""A record that is used so often while it is looked at is left to its readers, who find the damage as well."""


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
        if wrong is not None and _is_damaged(directory, (key, row), buffer, mend=mend):
            found.damaged.append((key, wrong))
            continue
        found.records += 1
        found.nbytes += row.nbytes
    return found


def _is_damaged(directory: Directory, was: tuple[bytes, Row], buffer: memoryview, *, mend: bool) -> bool:
    """Look again at a record that was found wrong: as its row is now, which nothing may change until it is dropped."""
    key, row = was
    for _ in range(LOOKS):
        now = directory.rows([key])[0]
        if now is None or not row.same_bytes(now) or fault_of(directory.segments, key, now, buffer) is None:
            return False
        if not mend:
            return True
        with directory.writing() as books:
            if books.drop(key, now):
                return True
    return True
