"""The place of a store: a directory that is ours alone, and whether the index in it is still the one that was opened."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError, UnavailableError

INDEX = "index.mdb"
LOCK = "index.mdb-lock"

READERS_MAX = 512
LOCK_NBYTES = 192 + 64 * (READERS_MAX - 1)
"""What LMDB maps of its lock file for so many readers: a head and 64 bytes a reader."""

SEGMENT = re.compile(r"segment-(\d{8})\Z")


def make_private(path: Path) -> tuple[int, int]:
    """Make the directory if it is not there; ConfigError unless it is ours alone. Returns (device, inode)."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        return check_ours(path)
    except OSError as error:
        raise ConfigError("a segment store's directory cannot be made", path=path, reason=error) from error


def check_ours(path: Path) -> tuple[int, int]:
    """ConfigError unless ``path`` is a directory that is ours alone (0700); OSError where it cannot be looked at.

    Returns (device, inode).
    """
    there = path.stat()
    if not stat.S_ISDIR(there.st_mode):
        raise ConfigError("a segment store needs a directory", path=path)
    mode = stat.S_IMODE(there.st_mode)
    if there.st_uid != os.geteuid() or mode != 0o700:
        raise ConfigError(
            "a segment store's directory must be ours alone",
            path=path,
            mode=oct(mode),
            wanted=oct(0o700),
            owner=there.st_uid,
            us=os.geteuid(),
        )
    return there.st_dev, there.st_ino


def check_entries(path: Path) -> list[str]:
    """UnavailableError when something else than a file stands where the index or its lock belongs.

    Returns what stands in the place of segments: each costs that segment only.
    """
    try:
        with os.scandir(path) as entries:
            named = [e for e in entries if e.name in (INDEX, LOCK) or SEGMENT.match(e.name)]
            alien = sorted(e.name for e in named if not e.is_file(follow_symlinks=False))
    except OSError as error:
        raise UnavailableError("the directory cannot be read", path=path, reason=error) from error
    for name in alien:
        if name in (INDEX, LOCK):
            raise UnavailableError("not a file, where one of the store belongs: remove it", path=path / name)
    return alien


def reserve_lock(path: Path) -> None:
    """Give the index's lock file the blocks that LMDB will write to through memory: without one it would be killed.

    UnavailableError when there is no room.
    """
    lock = path / LOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            there = os.fstat(fd)
            if there.st_size < LOCK_NBYTES or there.st_blocks * 512 < LOCK_NBYTES:
                os.posix_fallocate(fd, 0, LOCK_NBYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise UnavailableError("no room for the index's lock", path=lock, reason=error) from error


class Watch:
    """Whether the index and its lock are still the files that were opened, and still as long.

    Both are mapped: a process that touches a page behind the end of a file that was cut is killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = [
            (file, there.st_dev, there.st_ino, there.st_size)
            for file in (path / INDEX, path / LOCK)
            for there in (file.stat(),)
        ]
        self._trouble: str | None = None

    def trouble(self) -> str | None:
        """What has happened to the files, or None. Once there is something it stays."""
        if self._trouble is None:
            self._trouble = self._look()
        return self._trouble

    def _look(self) -> str | None:
        for number, (file, device, inode, nbytes) in enumerate(self._seen):
            try:
                there = file.stat()
            except OSError:
                return f"{self._path} or its index was removed or put elsewhere"
            if (there.st_dev, there.st_ino) != (device, inode):
                return f"{file} was replaced"
            if there.st_size < nbytes:
                return f"{file} was cut from {nbytes} to {there.st_size} bytes"
            if there.st_size > nbytes:
                self._seen[number] = (file, device, inode, there.st_size)
        return None

    def make_closable(self) -> None:
        """Give a lock that was cut its length again: LMDB writes to it as it closes."""
        file, device, inode, nbytes = self._seen[1]
        with suppress(OSError):
            fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                there = os.fstat(fd)
                if (there.st_dev, there.st_ino) == (device, inode) and there.st_size < nbytes:
                    os.posix_fallocate(fd, 0, nbytes)
            finally:
                os.close(fd)
