"""The segment store: fixed slots in large files, found through one LMDB index. Exact, durable, bounded.

Guarantees. A record is visible only through its row, and the row is committed only after the record's bytes are
durable. A read compares the record with its row and the payload with its sum, so a slot that was recycled, torn
or damaged meanwhile is a miss, never wrong bytes. Eviction is leaf-first by ranks kept in the index, so it
survives restarts and spans processes. The cap counts reserved segment files and is never exceeded (the index,
some 200-400 bytes a record, comes on top). Several threads and processes may use one directory on a local disk.

Two sizes of page share a directory as long as there is room for another segment: when the segments of other
sizes hold the whole cap, a size that has no segment yet is refused (NO_ROOM) until one of theirs is empty.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from hicache.data.store.base import Hit, Iovec, Miss, ReadOutcome, Record, WriteOutcome
from hicache.data.store.counters import Counters
from hicache.data.store.record import (
    HEADER_NBYTES,
    LAYOUT_NAMES,
    NO_PARENT,
    Header,
    pack_header,
    payload_nbytes,
    payload_sum,
)
from hicache.data.store.segment.books import Books, Need, Pending
from hicache.data.store.segment.check import check
from hicache.data.store.segment.directory import CONTRADICTIONS, Directory
from hicache.data.store.segment.files import Files
from hicache.data.store.segment.reader import Reader
from hicache.data.store.segment.sharing import close_directory, open_directory
from hicache.data.store.segment.tables import (
    BLOCK_NBYTES,
    Place,
    segment_blocks_of,
    slot_blocks_of,
)
from hicache.errors import ConfigError
from hicache.keys import Namespace, RecordKey
from hicache.layout import LAYOUTS
from hicache.policy import EvictionPolicy, Lru
from hicache.spec import positive

log = logging.getLogger("hicache.store")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FINGERPRINT_NBYTES = 32
_HEADER_PAD = bytes(HEADER_NBYTES)


class SegmentStore:
    """Records of one plane table in a directory. ``fingerprint`` is :meth:`CacheSpec.fingerprint`."""

    name = "segment"
    verifies = True

    def __init__(
        self,
        path: str | Path,
        cap_bytes: int,
        fingerprint: bytes = bytes(_FINGERPRINT_NBYTES),
        *,
        policy: EvictionPolicy | None = None,
        files: Files | None = None,
    ) -> None:
        positive("cap_bytes", cap_bytes, minimum=2 * BLOCK_NBYTES)
        if len(fingerprint) != _FINGERPRINT_NBYTES:
            raise ConfigError("a fingerprint has 32 bytes", got=len(fingerprint))
        self._fingerprint = fingerprint
        self._directory = open_directory(Path(path).absolute(), cap_bytes, policy or Lru(), files or Files())
        self._reader = Reader(self._directory, fingerprint)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        self._counters = Counters(reclaimed_slots=self._directory.reclaimed, evicted=self._directory.trimmed)

    @staticmethod
    def capacity(cap_bytes: int, page_nbytes: int) -> int:
        """Pages of this size that a directory with this cap holds, if it holds nothing else."""
        slot = slot_blocks_of(page_nbytes)
        segment = segment_blocks_of(cap_bytes, slot)
        return cap_bytes // (segment * BLOCK_NBYTES) * (segment // slot)

    @property
    def directory(self) -> Directory:
        """What this process holds of the directory; for tests and tools."""
        return self._directory

    # -- the contract -------------------------------------------------------------------------------------------

    def read(
        self, namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]
    ) -> list[ReadOutcome]:
        """Read each record straight into its buffers and verify it; marks the last hit as used."""
        with self._call() as closed:
            if closed:
                return [Miss(closed)] * len(keys)
            outcomes: list[ReadOutcome]
            if namespace.durable:
                raw = [bytes(key) for key in keys]
                outcomes = self._reader.read(namespace.root, raw, into)
                hits = [key for key, outcome in zip(raw, outcomes, strict=True) if isinstance(outcome, Hit)]
                self._directory.touch_later(hits[-1:])
            else:
                outcomes = [Miss("not_durable")] * len(keys)
            with self._lock:
                self._counters.count_read(outcomes)
            return outcomes

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """Write records; durable and visible when it returns. All of a batch become visible in one commit."""
        with self._call() as closed:
            if closed:
                return [WriteOutcome.FAILED] * len(records)
            batch = [self._pend(namespace, record) for record in records]
            live = [record for record in batch if record.outcome is None]
            try:
                self._write(namespace, live)
            except (lmdb.Error, OSError) as error:
                log.warning("write to %s failed: %s", self._directory.path, error)
                self._directory.owe(r.place for r in live if r.place is not None)
            outcomes = _settle(batch)
            with self._lock:
                self._counters.count_write(outcomes, [record.nbytes for record in batch])
            return outcomes

    def contains(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        """Which keys have a record now, in this namespace; a read may still miss."""
        with self._call() as closed:
            if closed or not namespace.durable:
                return [False] * len(keys)
            try:
                rows = self._directory.rows(bytes(key) for key in keys)
            except (lmdb.Error, OSError):
                return [False] * len(keys)
            return [row is not None and not row.hole and row.namespace == namespace.root[:8] for row in rows]

    def touch(self, keys: Sequence[RecordKey]) -> None:
        """Mark as used, soon; unknown keys are ignored."""
        with self._call() as closed:
            if not closed:
                self._directory.touch_later(bytes(key) for key in keys)

    def delete(self, keys: Sequence[RecordKey]) -> int:
        """Forget records; one with children leaves a hole that the next write of its key fills."""
        with self._call() as closed:
            if closed:
                return 0
            try:
                with self._directory.writing() as books:
                    gone = sum(books.drop(bytes(key)) for key in keys)
            except (lmdb.Error, OSError) as error:
                log.warning("delete in %s failed: %s", self._directory.path, error)
                return 0
            with self._lock:
                self._counters.deleted += gone
            return gone

    def flush(self) -> None:
        """Write marks of use that still wait for a transaction."""
        with self._call() as closed:
            if not closed:
                self._directory.flush()

    def usage(self) -> dict[str, int]:
        """Gauges of the directory, and what this store has counted. Empty after close and in a forked child."""
        with self._call() as closed:
            if closed:
                return {}
            gauges = self._directory.gauges()
            with self._lock:
                return {**gauges, **self._counters.as_gauges()}

    def trouble(self) -> str | None:
        """Why nothing is served: the index was removed, replaced or cut while it was open, or contradicts itself."""
        if not self._directory.ours or self._closed or (trouble := self._directory.trouble) is None:
            return None
        return f"{trouble}: attach the store anew"

    def check(self) -> None:
        """Recount every invariant of the index; InvariantError says what does not hold."""
        with self._call() as closed:
            if not closed:
                check(self._directory)

    def close(self) -> None:
        """Wait for calls that run, then let go of the directory. Does nothing the second time, nor in a fork."""
        if not self._directory.ours:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._calls)
        close_directory(self._directory)

    @contextmanager
    def _call(self) -> Iterator[str | None]:
        """Brackets every call: yields why it cannot be served (``forked``, ``closed``, ``gone``).

        Otherwise ``close`` waits for its end. Whatever meets an index that contradicts itself ends its use.

        A forked child takes no lock: its parent may have held it at the fork.
        """
        if not self._directory.ours:
            yield "forked"
            return
        with self._idle:
            closed = self._closed
            self._calls += not closed
        try:
            if closed:
                yield "closed"
            else:
                yield "gone" if self._directory.trouble else None
        except CONTRADICTIONS as error:
            self._directory.damage = f"the index of {self._directory.path} contradicts itself ({error})"
            raise
        finally:
            with self._idle:
                self._calls -= not closed
                self._idle.notify_all()

    # -- writing ------------------------------------------------------------------------------------------------

    def _pend(self, namespace: Namespace, record: Record) -> Pending:
        nbytes = payload_nbytes(record.payload)
        known = LAYOUTS.get(record.layout)
        key = bytes(record.key)
        parent = bytes(record.parent) if record.parent else NO_PARENT
        total = payload_sum(record.payload)
        code = known.code if known else min(LAYOUT_NAMES)
        header = Header(namespace.root, key, parent, self._fingerprint, code, nbytes, total)
        return Pending(
            key=key,
            parent=parent,
            namespace=namespace.root,
            layout=code,
            nbytes=nbytes,
            sum=total,
            hint=record.hint,
            header=pack_header(header),
            payload=record.payload,
            blocks=slot_blocks_of(nbytes),
            outcome=None if known and nbytes and namespace.durable else WriteOutcome.FAILED,
        )

    def _write(self, namespace: Namespace, batch: list[Pending]) -> None:
        """Take slots, write, sync, publish; what does not come so far leaves with its outcome on the way."""
        keys = {record.key for record in batch}
        keep = keys | {record.parent for record in batch}
        with self._directory.protecting(keep):
            self._admit(batch)
            todo = [record for record in batch if record.outcome is None]
            full = self._put_all(todo)
            if full:
                self._make_space(full)
                for record in self._put_all(full):
                    record.outcome = WriteOutcome.NO_ROOM
                    self._give_up(record)
            self._publish(namespace, [record for record in todo if record.outcome is None])

    def _admit(self, batch: list[Pending]) -> None:
        """Refuse what is there already or has no parent, and take a slot for each of the others."""
        rows = self._directory.rows(record.key for record in batch)
        if all(row is not None and not row.hole for row in rows):
            for record, row in zip(batch, rows, strict=True):
                same = row is not None and row.namespace == record.namespace[:8]
                record.outcome = WriteOutcome.EXISTS if same else WriteOutcome.FAILED
            return
        coming: dict[bytes, Pending] = {}
        places: dict[bytes, Place] = {}  # handed out only once the commit has made them ours
        with self._directory.writing() as books:
            for record in batch:
                if record.key in coming:
                    record.outcome = WriteOutcome.EXISTS
                    continue
                verdict = books.judge(record)
                if verdict is WriteOutcome.PARENT_ABSENT and record.parent in coming:
                    verdict = None
                record.outcome = verdict
                if verdict is None:
                    coming[record.key] = record
            for blocks in sorted({record.blocks for record in coming.values()}):
                places |= self._take(books, [r for r in coming.values() if r.blocks == blocks])
            for record in coming.values():
                above = coming.get(record.parent)
                if above is not None and above.outcome is not None and record.key in places:
                    record.outcome = WriteOutcome.PARENT_ABSENT
                    books.give(places.pop(record.key))
        for record in coming.values():
            record.place = places.get(record.key)
        self._count(books, evicted_for_space=0)

    def _take(self, books: Books, records: list[Pending]) -> dict[bytes, Place]:
        need = Need(records[0].blocks, len(records), self._directory.protected(), self._directory.grow)
        places = books.take(need, self._directory.dead_sessions)
        for record in records[len(places) :]:
            record.outcome = WriteOutcome.NO_ROOM
        return {record.key: place for record, place in zip(records, places, strict=False)}

    def _put_all(self, records: list[Pending]) -> list[Pending]:
        """Write and sync records, segment by segment; returns those for which the disk had no room."""
        full: list[Pending] = []
        by_segment: dict[int, list[tuple[Pending, Place]]] = {}
        for record in records:
            if record.place is not None:
                by_segment.setdefault(record.place.segment, []).append((record, record.place))
        nbytes = self._directory.segment_nbytes() if by_segment else 0
        for segment, mine in by_segment.items():
            try:
                with self._directory.segments.use_for_writing(segment, nbytes) as fd:
                    for record, place in mine:
                        if not self._put(fd, record, place):
                            full.append(record)
                    self._directory.files.sync(fd)
            except OSError as error:
                no_room = error.errno in _FULL
                log.warning("segment %d of %s: %s", segment, self._directory.path, error)
                for record, _ in mine:
                    if no_room and record not in full:
                        full.append(record)
                    elif not no_room:  # the slot stays ours until this session ends: what it holds is unknown
                        record.outcome, record.place = WriteOutcome.FAILED, None
        return [record for record in full if record.outcome is None]

    def _put(self, fd: int, record: Pending, place: Place) -> bool:
        """Write one record into its slot; False when the disk has no room."""
        pad = memoryview(_HEADER_PAD)[len(record.header) :]
        views = [memoryview(record.header), pad, *record.payload]
        try:
            self._directory.files.write(fd, views, place.offset * BLOCK_NBYTES)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        return True

    def _make_space(self, records: list[Pending]) -> None:
        """The disk is full though the cap is not: take the slots of the coldest leaves, whose blocks exist."""
        keep = self._directory.protected()
        found: list[Place | None] = []
        with self._directory.writing() as books:
            for record in records:
                found += books.take_evicted(Need(record.blocks, 1, keep)) or [None]
                if record.place is not None:
                    books.give(record.place)
        for record, place in zip(records, found, strict=True):
            record.place = place
            if place is None:
                record.outcome = WriteOutcome.NO_ROOM
        self._count(books, evicted_for_space=books.tally.evicted)

    def _publish(self, namespace: Namespace, records: list[Pending]) -> None:
        if not records:
            return
        with self._directory.writing() as books:
            books.introduce(namespace)
            verdicts = [books.publish(r, r.place) for r in records if r.place is not None]
        for record, verdict in zip(records, verdicts, strict=True):
            record.outcome, record.place = verdict, None
        self._count(books, evicted_for_space=0)

    def _give_up(self, record: Pending) -> None:
        if record.place is not None:
            self._directory.owe([record.place])
            record.place = None

    def _count(self, books: Books, *, evicted_for_space: int) -> None:
        with self._lock:
            self._counters.evicted += books.tally.evicted
            self._counters.reclaimed_slots += books.tally.reclaimed
            self._counters.evicted_for_space += evicted_for_space


def _settle(batch: list[Pending]) -> list[WriteOutcome]:
    """The final outcomes: what is still open has failed, and a key given twice shares the fate of the first."""
    first: dict[bytes, WriteOutcome] = {}
    outcomes = []
    for record in batch:
        outcome = record.outcome or WriteOutcome.FAILED
        before = first.setdefault(record.key, outcome)
        outcomes.append(outcome if before.ok else before)
    return outcomes
