"""Transfers past the page cache: the device takes whole blocks at aligned addresses and nothing else.

What is aligned in the caller's memory goes straight to or from it; the rest (a header, the last part of a page, memory
that is aligned nowhere) goes by way of a buffer of this thread. Offsets in the file are aligned already.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

BLOCK = 4096
PIECES_MAX = 1000
"""Views a system call takes at once (the kernel's limit is 1024)."""

_local = threading.local()


def rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The views that are left after the first ``done`` bytes."""
    left = []
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
        else:
            left.append(view[done:])
            done = 0
    return left


def _arena(nbytes: int) -> memoryview:
    """An aligned buffer of this thread, kept for the next transfer."""
    arena: memoryview | None = getattr(_local, "arena", None)
    if arena is None or arena.nbytes < nbytes:
        arena = _local.arena = memoryview(mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK))
    return arena


def _address(view: memoryview) -> int:
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Transfer:
    """The caller's views, one behind the other, as aligned pieces; padded to whole blocks at the end.

    ``pieces`` are for the system call; ``detours`` are (caller's view, its place in this thread's buffer).
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.nbytes = sum(view.nbytes for view in views)
        cuts = self._cut([view for view in views if view.nbytes])
        self.pieces: list[memoryview] = []
        self.detours: list[tuple[memoryview, memoryview]] = []
        arena = _arena(BLOCK + sum(view.nbytes for view, straight in cuts if not straight))
        begin = end = 0  # of the run in the arena that is not a piece yet
        for view, straight in cuts:
            if not straight:
                self.detours.append((view, arena[end : end + view.nbytes]))
                end += view.nbytes
                continue
            if end > begin:
                self.pieces.append(arena[begin:end])
                begin = end
            self.pieces.append(view)
        padded = end + -self.nbytes % BLOCK
        arena[end:padded] = bytes(padded - end)
        if padded > begin:
            self.pieces.append(arena[begin:padded])

    @staticmethod
    def _cut(views: Sequence[memoryview]) -> list[tuple[memoryview, bool]]:
        """The views, cut where blocks begin: True for what is aligned in memory and in the file, whole blocks of it."""
        cuts: list[tuple[memoryview, bool]] = []
        at = 0
        for view in views:
            whole = view.nbytes // BLOCK * BLOCK
            if at % BLOCK == 0 and whole and _address(view) % BLOCK == 0:
                cuts.append((view[:whole], True))
                if whole < view.nbytes:
                    cuts.append((view[whole:], False))
            else:
                cuts.append((view, False))
            at += view.nbytes
        return cuts

    def write(self, fd: int, offset: int) -> None:
        """Write it all."""
        for view, place in self.detours:
            place[:] = view
        left = self.pieces
        while left:
            done = os.pwritev(fd, left[:PIECES_MAX], offset) // BLOCK * BLOCK
            if not done:
                raise OSError(errno.EIO, "the device took less than a block")
            offset += done
            left = rest(left, done)

    def read(self, fd: int, offset: int) -> int:
        """Fill the views; fewer bytes than they hold means the file ends there."""
        left, total = self.pieces, 0
        while left:
            done = os.preadv(fd, left[:PIECES_MAX], offset + total)
            total += done
            if not done or done % BLOCK:
                break
            left = rest(left, done)
        for view, place in self.detours:
            view[:] = place
        return min(total, self.nbytes)
