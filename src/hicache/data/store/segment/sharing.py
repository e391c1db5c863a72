"""Which directories this process has open: one :class:`Directory` each, shared and counted.

LMDB must not be opened twice in one process, and what a forked child inherits still belongs to its parent.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from hicache.data.store.segment.directory import Directory
from hicache.data.store.segment.files import Files
from hicache.data.store.segment.local import check_local
from hicache.data.store.segment.place import check_entries, make_private
from hicache.errors import UnavailableError
from hicache.policy import EvictionPolicy

log = logging.getLogger("hicache.store")

_directories: dict[tuple[int, int], Directory] = {}
_directories_lock = threading.Lock()


def _after_fork() -> None:
    """A lock held by another thread at the fork would stay locked in the child for ever."""
    global _directories_lock  # noqa: PLW0603  (one registry a process is the point)
    _directories_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def open_directory(path: Path, cap_bytes: int, policy: EvictionPolicy, files: Files) -> Directory:
    """The process's directory at ``path``; counted, so every call is paired with :func:`close_directory`.

    A second opener in one process shares the first one's files and policy. A link is followed once, here: where it
    points to later is of no account.
    """
    path = path.resolve()
    check_local(path)
    identity = make_private(path)
    if alien := check_entries(path):
        log.warning("%d segments of %s are not files and cannot be used: %s", len(alien), path, alien[0])
    with _directories_lock:
        directory = _directories.get(identity)
        if directory is not None and directory.pid != os.getpid():
            raise UnavailableError(
                "a forked process cannot use its parent's store", path=path, pid=directory.pid
            )
        if directory is not None and (trouble := directory.trouble) is not None:
            raise UnavailableError("another store of this process has it open still", reason=trouble)
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
