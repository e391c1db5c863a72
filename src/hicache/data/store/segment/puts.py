"""The bytes of records on their way into slots: written by several threads at once, then synced, file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from hicache.data.store.record import CORE_NBYTES, HEADER_NBYTES, Header, pack_header, payload_sum
from hicache.data.store.segment.books import Pending
from hicache.data.store.segment.crew import Crew
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.tables import BLOCK_NBYTES

Refused = list[tuple[Pending, OSError]]
"""Records that a disk did not take, and what it said."""

Tell = Callable[[Pending, OSError | None], None]

_HEADER_PAD = memoryview(bytes(HEADER_NBYTES - CORE_NBYTES))


class Puts:
    """For one call of the store: its segment files stay open until the block ends."""

    def __init__(self, directory: Directory, fingerprint: bytes, crew: Crew) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._crew = crew
        self._open = ExitStack()
        self._fds: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def write(self, records: Sequence[Pending], tell: Tell = lambda _record, _error: None) -> Refused:
        """Sum and write each record into its place; nothing is durable yet. ``tell`` hears of each as it is done."""
        refused = self._open_files(records)
        for record, error in refused:
            tell(record, error)
        missing = {id(record) for record, _ in refused}
        ready = [record for record in records if id(record) not in missing]

        def put(record: Pending) -> OSError | None:
            error = self._put(record)
            tell(record, error)
            return error

        errors = self._crew.each(put, ready, sum(record.nbytes for record in ready))
        return refused + [(r, error) for r, error in zip(ready, errors, strict=True) if error is not None]

    def sync(self, records: Sequence[Pending]) -> Refused:
        """Make what was written of these records durable."""
        refused: Refused = []
        for segment in _segments(records):
            try:
                self._directory.files.sync(self._fds[segment])
            except OSError as error:
                refused += [(record, error) for record in records if _segment(record) == segment]
        return refused

    def _open_files(self, records: Sequence[Pending]) -> Refused:
        refused: Refused = []
        segments = [segment for segment in _segments(records) if segment not in self._fds]
        nbytes = self._directory.segment_nbytes() if segments else 0
        for segment in segments:
            try:
                use = self._directory.segments.use_for_writing(segment, nbytes)
                self._fds[segment] = self._open.enter_context(use)
            except OSError as error:
                refused += [(record, error) for record in records if _segment(record) == segment]
        return refused

    def _put(self, record: Pending) -> OSError | None:
        place = record.place
        assert place is not None, "only a record with a slot is written"
        record.sum = payload_sum(record.payload)
        fields = (record.namespace, record.key, record.parent, self._fingerprint)
        header = pack_header(Header(*fields, record.layout, record.nbytes, record.sum))
        views = [memoryview(header), _HEADER_PAD, *record.payload]
        try:
            self._directory.files.write(self._fds[place.segment], views, place.offset * BLOCK_NBYTES)
        except OSError as error:
            return error
        return None


def _segment(record: Pending) -> int:
    assert record.place is not None, "only a record with a slot is written"
    return record.place.segment


def _segments(records: Iterable[Pending]) -> list[int]:
    return list(dict.fromkeys(map(_segment, records)))
