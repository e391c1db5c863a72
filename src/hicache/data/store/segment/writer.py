"""Writing records: slots in hand, then bytes, then one sync a segment, then the commit that shows them.

What does not come so far leaves with its outcome on the way: its parent or its room is missing, or the disk said no.
A slot whose write failed for another reason than room stays with its session, for nobody knows what it holds.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import lmdb

from hicache.data.store.base import Record, WriteOutcome
from hicache.data.store.counters import Counters
from hicache.data.store.record import (
    LAYOUT_NAMES,
    NO_PARENT,
    payload_nbytes,
)
from hicache.data.store.segment.books import Books, Need, Pending
from hicache.data.store.segment.crew import Crew
from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.progress import Progress
from hicache.data.store.segment.puts import Puts, Refused
from hicache.data.store.segment.tables import Place, slot_blocks_of
from hicache.keys import Namespace
from hicache.layout import LAYOUTS

log = logging.getLogger("hicache.store")

_FULL = (errno.ENOSPC, errno.EDQUOT)
GROUP_NBYTES = 32 << 20
"""What is worth a sync and a commit of its own, as long as more is being written."""


ASIDE_MAX = 16
"""Slots that a disk may spoil in the life of a store; then nothing is written any more."""


class Writer:
    """Writes for one store of a directory; ``counters`` are the store's, guarded by ``lock``."""

    def __init__(
        self, directory: Directory, fingerprint: bytes, counters: Counters, lock: threading.Lock
    ) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._counters = counters
        self._lock = lock
        self._crew = Crew("store-write")
        self._committer = Crew("store-commit", 1)
        self._aside = 0
        self.trouble: str | None = None

    def close(self) -> None:
        """End the threads."""
        self._crew.close()
        self._committer.close()

    def write(self, namespace: Namespace, records: Sequence[Record]) -> list[WriteOutcome]:
        """One outcome a record, in order."""
        batch = [self._pend(namespace, record) for record in records]
        live = [record for record in batch if record.outcome is None]
        try:
            if self._aside < ASIDE_MAX:
                self._write(namespace, live)
        except (lmdb.Error, OSError) as error:
            self._failed(error)
            self._owe(live)
        except BaseException:  # what no disk raises: the batch is lost, but not its slots
            self._owe(live)
            raise
        outcomes = _settle(batch)
        if WriteOutcome.STORED in outcomes and self._aside < ASIDE_MAX:
            self.trouble = None
        with self._lock:
            self._counters.count_write(outcomes, [record.nbytes for record in batch])
        return outcomes

    def _owe(self, records: list[Pending]) -> None:
        self._directory.owe(record.place for record in records if record.place is not None)

    def _failed(self, error: Exception) -> None:
        why = "the file system is read-only" if os.strerror(errno.EROFS) in str(error) else error
        self._say(f"pages are read but not stored, the last write failed: {why}")

    def _say(self, trouble: str) -> None:
        """What :attr:`trouble` says from now on; logged when it is news."""
        known, self.trouble = self.trouble, f"{self._directory.path}: {trouble}"
        if known != self.trouble:
            log.warning("%s", self.trouble)

    def _pend(self, namespace: Namespace, record: Record) -> Pending:
        nbytes = payload_nbytes(record.payload)
        known = LAYOUTS.get(record.layout)
        return Pending(
            key=bytes(record.key),
            parent=bytes(record.parent) if record.parent else NO_PARENT,
            namespace=namespace.root,
            layout=known.code if known else min(LAYOUT_NAMES),
            nbytes=nbytes,
            hint=record.hint,
            payload=record.payload,
            blocks=slot_blocks_of(nbytes),
            outcome=None if known and nbytes and namespace.durable else WriteOutcome.FAILED,
        )

    def _write(self, namespace: Namespace, batch: list[Pending]) -> None:
        """Take slots, write, sync, publish; what does not come so far leaves with its outcome on the way."""
        keys = {record.key for record in batch}
        keep = keys | {record.parent for record in batch}
        with self._directory.protecting(keep), Puts(self._directory, self._fingerprint, self._crew) as puts:
            self._admit(batch)
            todo = [record for record in batch if record.outcome is None]
            if sum(record.nbytes for record in todo) >= 2 * GROUP_NBYTES:
                self._stream(namespace, puts, todo)
            else:
                self._finish(namespace, puts, todo, puts.write(todo))

    def _stream(self, namespace: Namespace, puts: Puts, todo: list[Pending]) -> None:
        """Write on while what is written already is synced and committed, as much at a time as has come together.

        What is committed is the front of the batch, so parents come before their children at any moment.
        """
        progress = Progress(todo, GROUP_NBYTES)

        def commit() -> None:
            while (part := progress.take())[0]:
                self._finish(namespace, puts, *part)

        ended = self._committer.begin(commit)
        try:
            puts.write(todo, progress.tell)
        except BaseException:
            progress.stop()
            with suppress(BaseException):  # a slot is published or owed, but never both
                ended()
            raise
        ended()

    def _finish(self, namespace: Namespace, puts: Puts, group: list[Pending], refused: Refused) -> None:
        """Sync and publish records that are written; those that found no room get one more chance."""
        full = self._refused(refused)
        full += self._refused(puts.sync([r for r in group if r.outcome is None and r not in full]))
        if full:
            self._make_space(full)
            again = [record for record in full if record.outcome is None]
            still = self._refused(puts.write(again))
            still += self._refused(puts.sync([r for r in again if r.outcome is None and r not in still]))
            for record in still:
                record.outcome = WriteOutcome.NO_ROOM
                self._give_up(record)
                self._say("the disk is full, pages are read but not stored")
        self._publish(namespace, [record for record in group if record.outcome is None])

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

    def _refused(self, refused: Refused) -> list[Pending]:
        """Those for which the disk had no room; the others have failed."""
        full: list[Pending] = []
        for record, error in refused:
            if error.errno in _FULL:
                full.append(record)
            else:
                self._failed(error)
                self._spoilt(record, error)
        return full

    def _spoilt(self, record: Pending, error: OSError) -> None:
        """Set the slot aside until this session ends: what it holds is unknown. A read-only disk has not touched it."""
        record.outcome = WriteOutcome.FAILED
        if error.errno == errno.EROFS:
            self._give_up(record)
            return
        record.place = None
        with self._lock:
            self._aside += 1
            self._counters.set_aside += 1
        if self._aside >= ASIDE_MAX:
            self._say(f"the disk spoilt {self._aside} slots, nothing is written any more")

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
