"""The proof of one record: its bytes against its row."""

from __future__ import annotations

from hicache.data.store.record import HEADER_NBYTES, parse_header, payload_sum
from hicache.data.store.segment.files import OpenSegments
from hicache.data.store.segment.tables import BLOCK_NBYTES, Row


def fault_of(segments: OpenSegments, key: bytes, row: Row, into: memoryview) -> str | None:
    """Read header and payload of a row's place into ``into``; None if they are what the row says, else what is wrong.

    ``into`` takes ``HEADER_NBYTES`` + ``row.nbytes`` bytes.
    """
    view = into[: HEADER_NBYTES + row.nbytes]
    try:
        with segments.use(row.segment) as fd:
            done = segments.files.read(fd, [view], row.offset * BLOCK_NBYTES)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if done < view.nbytes:
        return "short"
    header = parse_header(view)
    if isinstance(header, str):
        return header
    said = (header.key, header.namespace[:8], header.layout, header.nbytes, header.sum)
    if said != (key, row.namespace, row.layout, row.nbytes, row.sum):
        return "row"
    return None if payload_sum([view[HEADER_NBYTES:]]) == row.sum else "payload"
