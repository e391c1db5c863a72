"""Segment files: every system call that changes or reads them, and the open descriptors.

:class:`Files` is the seam for tests: a subclass may fail, cut, or kill the process at any of its calls, the
index's commit included. Calls raise OSError; what it means is decided by the store.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

PIECES_MAX = 1000
"""Views a system call takes at once (the kernel's limit is 1024)."""


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The views that are left after the first ``done`` bytes."""
    left = []
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
        else:
            left.append(view[done:])
            done = 0
    return left


class Files:
    """Plain system calls. Stateless; one object may serve many directories and threads."""

    def make(self, path: Path, nbytes: int) -> None:
        """Make a segment file of this size, its blocks reserved, durably named in its directory."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            os.ftruncate(fd, nbytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def clear(self, path: Path) -> None:
        """Make way for a segment file: a link and an empty directory go, a file that is closed to us is ours again."""
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o600)
            elif stat.S_ISDIR(mode):
                path.rmdir()
            else:
                path.unlink()

    def open(self, path: Path) -> int:
        """A descriptor of an existing segment file."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)

    def remove(self, path: Path) -> None:
        """Unlink a segment file; it may be gone already."""
        with suppress(FileNotFoundError):
            path.unlink()

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Write all views one behind the other."""
        left = list(views)
        while left:
            done = os.pwritev(fd, left[:PIECES_MAX], offset)
            offset += done
            left = _rest(left, done)

    def sync(self, fd: int) -> None:
        """Make what was written durable."""
        os.fdatasync(fd)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill the views one behind the other; fewer bytes than they hold means the file ends there."""
        left, total = list(views), 0
        while left:
            done = os.preadv(fd, left[:PIECES_MAX], offset + total)
            if not done:
                break
            total += done
            left = _rest(left, done)
        return total

    def commit(self, txn: lmdb.Transaction[bytes]) -> None:
        """Commit the index: one atomic, durable step."""
        txn.commit()


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0


class OpenSegments:
    """At most ``limit`` descriptors of idle segments; one in use stays open however many there are."""

    def __init__(self, folder: Path, files: Files, limit: int = 256) -> None:
        self._folder = folder
        self.files = files
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def path(self, segment: int) -> Path:
        """Where a segment's file is."""
        return self._folder / f"segment-{segment:08d}"

    @contextmanager
    def use(self, segment: int) -> Iterator[int]:
        """A descriptor of the segment for the length of the block."""
        with self._lock:
            entry = self._open.get(segment)
            if entry is None:
                entry = self._open[segment] = _Open(self.files.open(self.path(segment)))
            entry.users += 1
            self._open.move_to_end(segment)
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if not entry.users and self._open.get(segment) is not entry:
                    os.close(entry.fd)
                self._trim(self._limit)

    @contextmanager
    def use_for_writing(self, segment: int, nbytes: int) -> Iterator[int]:
        """As :meth:`use`, but a file that was deleted, cut, closed or replaced from outside is made whole first."""
        path = self.path(segment)
        if not self._intact(path, segment, nbytes):
            with self._lock:
                stale = self._open.pop(segment, None)
                if stale is not None and not stale.users:
                    os.close(stale.fd)
            self.files.clear(path)
            self.files.make(path, nbytes)
        with self.use(segment) as fd:
            yield fd

    def _intact(self, path: Path, segment: int, nbytes: int) -> bool:
        try:
            there = path.lstat()
        except FileNotFoundError:
            return False
        with self._lock:
            entry = self._open.get(segment)
            same = entry is None or os.fstat(entry.fd).st_ino == there.st_ino
        return same and there.st_size == nbytes and stat.S_IMODE(there.st_mode) == 0o600

    def forget(self, segment: int) -> None:
        """Close a segment's descriptor, at once or when its last user is done."""
        with self._lock:
            entry = self._open.pop(segment, None)
            if entry is not None and not entry.users:
                os.close(entry.fd)

    def close(self) -> None:
        """Close all descriptors; those in use follow when they are let go."""
        with self._lock:
            for segment in list(self._open):
                entry = self._open.pop(segment)
                if not entry.users:
                    os.close(entry.fd)

    def _trim(self, limit: int) -> None:
        for segment in list(self._open):
            if len(self._open) <= limit:
                return
            if not self._open[segment].users:
                os.close(self._open.pop(segment).fd)
