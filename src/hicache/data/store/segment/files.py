"""Segment files: every system call that changes or reads them, and the open descriptors.

:class:`Files` is the seam for tests: a subclass may fail, cut, or kill the process at any of its calls, the
index's commit included. Calls raise OSError; what it means is decided by the store.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

from hicache.data.store.segment.aligned import PIECES_MAX, Transfer, rest

log = logging.getLogger("hicache.store")


class Files:
    """Plain system calls. One object may serve many directories and threads.

    direct: past the page cache, where the file system can; the memory tiers are the cache of a store.
    """

    direct = True

    def __init__(self, *, direct: bool = True) -> None:
        self.direct = direct

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
        """A descriptor of an existing segment file, past the page cache where that is wanted and can be had."""
        flags = os.O_RDWR | os.O_NOFOLLOW
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            log.info("%s: this file system has no direct I/O, the page cache is used", path)
        return os.open(path, flags)

    def remove(self, path: Path) -> None:
        """Unlink a segment file; it may be gone already."""
        with suppress(FileNotFoundError):
            path.unlink()

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Write all views one behind the other; on a direct descriptor the last block is filled up with zeros."""
        if _is_direct(fd):
            try:
                Transfer(views).write(fd, offset)
                return
            except OSError as error:
                _give_in(fd, error)
        left = list(views)
        while left:
            done = os.pwritev(fd, left[:PIECES_MAX], offset)
            offset += done
            left = rest(left, done)

    def sync(self, fd: int) -> None:
        """Make what was written durable."""
        os.fdatasync(fd)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill the views one behind the other; fewer bytes than they hold means the file ends there."""
        if _is_direct(fd):
            try:
                return Transfer(views).read(fd, offset)
            except OSError as error:
                _give_in(fd, error)
        left, total = list(views), 0
        while left:
            done = os.preadv(fd, left[:PIECES_MAX], offset + total)
            if not done:
                break
            total += done
            left = rest(left, done)
        return total

    def commit(self, txn: lmdb.Transaction[bytes]) -> None:
        """Commit the index: one atomic, durable step."""
        txn.commit()


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _give_in(fd: int, error: OSError) -> None:
    """Go on through the page cache where direct I/O was granted at the open and is refused now; else raise."""
    if error.errno != errno.EINVAL:
        raise error
    log.warning("a segment takes no direct I/O of these blocks, the page cache is used: %s", error)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


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
