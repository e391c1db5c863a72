"""The host copy engine: pages between any two strided places in CPU memory, at the speed of the memory.

:func:`host_engine` gives the native one, or numpy's where no library can be had. All native engines of a process
share one pool of helper threads. Calls may come from several threads at once and never wait for each other: each
works on its own copy, and helpers go to the oldest that has work left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import numpy as np

from hicache.capability import EngineDeclaration, Kernel, Place
from hicache.data.copy import native
from hicache.data.copy.base import Addresses, CopyEngine, Rows, Surface
from hicache.data.copy.checked import CheckedEngine, Side, Slots, check
from hicache.data.copy.strided import NumpyEngine
from hicache.errors import CapacityError, UnavailableError

_GATHER = Kernel("gather and scatter on threads", Place.HOST, Place.HOST)

DECLARATION = EngineDeclaration(
    name="host",
    io="kernel",
    platforms=frozenset({"cpu"}),
    factory="hicache.data.copy.host:host_engine",
    load=_GATHER,
    save=_GATHER,
    rank=1,
)
"""What ``kernel`` is on a CPU: native, or numpy's where no library can be had."""

THREADS_MAX = 4
"""Threads of one copy, its caller's included: a few saturate the memory, the others belong to the engine."""

SMALL_NBYTES = 512 << 10
"""Bytes of a call below which waking a helper, or passing by the cache, does not pay."""

UNIT_NBYTES_MAX = 1 << 20
"""Bytes that a thread takes at once: several pages, so that reads stay together where layers lie apart."""

UNITS_MIN = 16
"""Units of a call that is no small one, so that its threads end together."""


def _process_cpus() -> frozenset[int]:
    """The CPUs that any thread of this process may use now.

    Asked for when this module is imported, and of all threads: an OpenMP runtime binds the main thread to one CPU
    (and its own threads to the others), and a thread inherits the mask of its creator. Helpers that did so would
    all sit on the CPU of the thread they are to help.
    """
    cpus: set[int] = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            cpus |= os.sched_getaffinity(int(task.name))
    return frozenset(cpus or os.sched_getaffinity(0))


ORIGINAL_CPUS = _process_cpus()


class _Side(ctypes.Structure):
    _fields_ = (("bases", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("slots", ctypes.c_void_p))


class Library:
    """The native library and its pool of helper threads: made on first use, joined at exit.

    A forked child has none of the threads, and nobody in it holds their locks: it makes a pool of its own.
    """

    def __init__(self, path: Path, *, cpus: frozenset[int] = ORIGINAL_CPUS) -> None:
        self._helpers = min(len(cpus), THREADS_MAX) - 1
        bits = sum(1 << cpu for cpu in cpus)
        self._mask = bits.to_bytes(-(-(max(cpus) + 1) // 64) * 8, "little")
        self._c = ctypes.CDLL(str(path))
        self._c.hicache_pool.restype = ctypes.c_void_p
        self._c.hicache_pool.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int64)
        self._c.hicache_stop.restype = None
        self._c.hicache_stop.argtypes = (ctypes.c_void_p,)
        self._c.hicache_copy.restype = ctypes.c_int
        side, number = ctypes.POINTER(_Side), ctypes.c_int64
        self._c.hicache_copy.argtypes = (ctypes.c_void_p, side, side, ctypes.c_void_p, number, number, number)
        self._lock = threading.Lock()
        self._pool: int | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    def copy(self, source: _Side, target: _Side, shapes: Rows, pages: int) -> None:
        """Copy all views of ``shapes``; every byte is in place when this returns."""
        pool = self._pool if self._pool is not None else self._start()
        nbytes = pages * int(shapes[:, 1:].prod(axis=1).sum())
        unit = 0 if nbytes < SMALL_NBYTES else max(1, min(UNIT_NBYTES_MAX, nbytes // UNITS_MIN))
        failed = self._c.hicache_copy(pool, source, target, shapes.ctypes.data, len(shapes), pages, unit)
        if failed:
            raise CapacityError("no memory for the description of a copy", views=len(shapes))

    def _start(self) -> int:
        with self._lock:
            if self._pool is None:
                self._pool = self._c.hicache_pool(self._helpers, self._mask, len(self._mask))
            if self._pool is None:
                raise CapacityError("no memory for the copy threads", helpers=self._helpers)
            return self._pool

    def stop(self) -> None:
        """End and join the threads; a copy that still runs is finished by its own thread, and so are later ones."""
        with self._lock:
            if self._pool is not None:
                self._c.hicache_stop(self._pool)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool = None


@cache
def _shared() -> Library | str:
    """The process's library, or why there is none; found out once."""
    try:
        return Library(native.library())
    except native.NotNativeError as error:
        return str(error)
    except OSError as error:  # built for another C library, or on a file system that forbids execution
        return f"the native copy engine does not load: {error}"


def _plainly_right(ours: Addresses, theirs: Addresses, targets: Rows) -> bool:
    """True when a copy certainly can be meant; whatever is not plain, the reference's check decides."""
    if not theirs.writable or not np.array_equal(ours.shapes, theirs.shapes):
        return False
    if bool(((ours.lowest < theirs.end) & (theirs.lowest < ours.end)).any()):
        return False
    ordered = np.sort(targets)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _side(places: Addresses, chosen: Rows | None, slots: Rows) -> tuple[_Side, list[Rows]]:
    """One side of a call, and the arrays it points into: they must live as long as the call."""
    bases, strides = places.bases, places.strides
    if chosen is not None:
        bases, strides = bases[chosen], strides[chosen]
    return _Side(bases.ctypes.data, strides.ctypes.data, slots.ctypes.data), [bases, strides, slots]


class HostEngine(CheckedEngine):
    """Copies with the native library, before :meth:`submit` returns; the interpreter's lock is free meanwhile.

    Small calls are done by their own thread, large ones together with the process's helper threads.
    """

    name = "host"

    def __init__(self, library: Library | None = None) -> None:
        found = library or _shared()
        if isinstance(found, str):
            raise UnavailableError(found)
        self._library = found

    @staticmethod
    def available() -> str | None:
        """Why there is no native engine here, or None when there is one. The first call may compile it."""
        found = _shared()
        return found if isinstance(found, str) else None

    def _check(self, source: Surface, sources: Slots, target: Surface, targets: Slots) -> None:
        """Look at every view only where the summary of both sides leaves a doubt."""
        if len(sources) != len(targets) or not _plainly_right(
            source.addresses(), target.addresses(), targets
        ):
            check(source, sources, target, targets)

    def _move(self, source: Side, target: Side, layers: range) -> None:
        ours, theirs = source[0].addresses(), target[0].addresses()
        sources = np.ascontiguousarray(source[1], np.int64)
        targets = np.ascontiguousarray(target[1], np.int64)
        if len(sources) > 1:  # reads that follow each other in memory are worth more than writes that do
            order = np.argsort(sources, kind="stable")
            sources, targets = sources[order], targets[order]
        all_layers = len(layers) == max(len(plane) for plane in source[0].views)
        chosen = None if all_layers else np.flatnonzero(np.isin(ours.layers, list(layers)))
        from_side, kept = _side(ours, chosen, sources)
        to_side, also_kept = _side(theirs, chosen, targets)
        shapes = ours.shapes if chosen is None else ours.shapes[chosen]
        self._library.copy(from_side, to_side, shapes, len(sources))
        del kept, also_kept


def host_engine() -> CopyEngine:
    """The host engine of this machine: native, or numpy's where the native one is not to be had."""
    return HostEngine() if HostEngine.available() is None else NumpyEngine()
