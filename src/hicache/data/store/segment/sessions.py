"""Sessions: a process's claim on the slots it holds, alive exactly as long as a file lock.

The lock of a file goes with the process, however it ends, and only after its last write call has returned; so a
lock that can be had means that nobody writes to that session's slots any more. Sessions start, and are found
over, inside the index's write transaction, which keeps the two from meeting.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

_NAME = re.compile(r"session-[0-9a-f]{16}\Z")


class Sessions:
    """The lock files of one directory, and the one that is ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ours: tuple[int, Path] | None = None

    def start(self, session: int) -> None:
        """Take the lock of a new session; its number has never been used."""
        path = self._path(session)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._ours = (fd, path)

    def end(self) -> None:
        """Remove our file and let go of its lock."""
        if self._ours is not None:
            fd, path = self._ours
            self._ours = None
            path.unlink(missing_ok=True)
            os.close(fd)

    def is_over(self, session: int) -> bool:
        """True when no process holds this session's lock; its file is removed."""
        return self._over(self._path(session))

    def sweep(self) -> None:
        """Remove the files of all sessions that are over."""
        for path in list(self._folder.iterdir()):
            if _NAME.match(path.name):
                self._over(path)

    def _path(self, session: int) -> Path:
        return self._folder / f"session-{session:016x}"

    def _over(self, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True
