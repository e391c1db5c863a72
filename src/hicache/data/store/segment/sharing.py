"""Which directories this process has open: one :class:`Directory` each, shared and counted.

LMDB must not be opened twice in one process, and what a forked child inherits still belongs to its parent.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.files import Files
from hicache.errors import ConfigError, UnavailableError
from hicache.policy import EvictionPolicy


def check_private(path: Path) -> tuple[int, int]:
    """Make the directory if it is not there; ConfigError unless it is ours alone. Returns (device, inode)."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        there = path.stat()
    except OSError as error:
        raise ConfigError("a segment store's directory cannot be made", path=path, reason=error) from error
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


_directories: dict[tuple[int, int], Directory] = {}
_directories_lock = threading.Lock()


def _after_fork() -> None:
    """A lock held by another thread at the fork would stay locked in the child for ever."""
    global _directories_lock  # noqa: PLW0603  (one registry a process is the point)
    _directories_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def open_directory(path: Path, cap_bytes: int, policy: EvictionPolicy, files: Files) -> Directory:
    """The process's directory at ``path``; counted, so every call is paired with :func:`close_directory`.

    A second opener in one process shares the first one's files and policy.
    """
    identity = check_private(path)
    with _directories_lock:
        directory = _directories.get(identity)
        if directory is not None and directory.pid != os.getpid():
            raise UnavailableError(
                "a forked process cannot use its parent's store", path=path, pid=directory.pid
            )
        if directory is None:
            directory = _directories[identity] = Directory(path, cap_bytes, policy, files)
        else:
            directory.set_cap(cap_bytes)
        directory.users += 1
        return directory


def close_directory(directory: Directory) -> None:
    """Let go of it; the last one closes. In a forked child nothing happens."""
    if directory.pid != os.getpid():
        return
    with _directories_lock:
        directory.users -= 1
        if directory.users:
            return
        for identity in [i for i, d in _directories.items() if d is directory]:
            del _directories[identity]
        directory.close()
