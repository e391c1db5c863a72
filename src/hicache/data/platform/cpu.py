"""The CPU platform: page-aligned, prefaulted anonymous memory; device memory is the same memory."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from hicache.capability import HOST_ACCESS, PINNING, SAME_ADDRESS, STAGED, STREAMS, TRITON, Capabilities
from hicache.data.platform.base import Progress
from hicache.data.platform.memory import MemoryProbe
from hicache.errors import CapacityError, ConfigError, InvariantError
from hicache.records import Where
from hicache.spec import positive

DECLARED = Capabilities(
    platform="cpu",
    abilities=frozenset({HOST_ACCESS, SAME_ADDRESS}),
    missing={
        PINNING: "cpu: device memory is host memory, there is no link to pin it for",
        STREAMS: "cpu: copies run on threads",
        TRITON: "cpu: needs a GPU",
        STAGED: "cpu: there is no device memory to stage in, and no need to",
    },
)

HUGE_PAGE = 2 << 20
PREFAULT_CHUNK = 64 << 20


def memory_available() -> int | None:
    """Bytes this machine, or the control group we live in, can still give; None where it cannot be told."""
    probe = MemoryProbe()
    found = [nbytes for nbytes in (probe.available(), probe.headroom()) if nbytes is not None]
    return min(found, default=None)


class CpuBuffer:
    """An anonymous mapping; starts at a huge page's boundary when it is at least that long."""

    def __init__(self, nbytes: int, *, progress: Progress | None = None) -> None:
        self.nbytes = positive("nbytes", nbytes)
        available = memory_available()
        if available is not None and nbytes > available:
            raise CapacityError("not enough memory", asked_bytes=nbytes, available_bytes=available)
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0  # for alignment; never touched, so it costs nothing
        try:
            memory = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                "the system gave no memory", asked_bytes=nbytes, available_bytes=available, cause=error
            ) from error
        whole = np.frombuffer(memory, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE if slack else 0
        self._memory = memory
        self._view: npt.NDArray[np.uint8] | None = whole[start : start + nbytes]
        if slack and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: small pages serve as well
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._prefault(progress)

    def _prefault(self, progress: Progress | None) -> None:
        """Touch every page now, so that no copy pays for it later."""
        for start in range(0, self.nbytes, PREFAULT_CHUNK):
            end = min(start + PREFAULT_CHUNK, self.nbytes)
            self.view[start : end : mmap.PAGESIZE] = 0
            self.view[end - 1] = 0
            if progress is not None:
                progress(end, self.nbytes)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The memory as one writable row of bytes; InvariantError once closed."""
        if self._view is None:
            raise InvariantError("a closed buffer has no bytes", nbytes=self.nbytes)
        return self._view

    def close(self) -> None:
        """Give the memory back as soon as the last view of it is gone. Calling it again does nothing."""
        self._view = None
        with contextlib.suppress(BufferError):  # a view still looks at it: the mapping goes with that view
            self._memory.close()


def detect() -> Capabilities:
    """What the CPU can do: it is always here."""
    return DECLARED


class CpuPlatform:
    """Host memory for every tier."""

    name = "cpu"

    def capabilities(self) -> Capabilities:
        """What this platform can do here and now."""
        return DECLARED

    def alloc(self, nbytes: int, where: Where, *, progress: Progress | None = None) -> CpuBuffer:
        """Exactly ``nbytes`` of zeroed memory for the tier ``where``; CapacityError when they cannot be had."""
        if where not in (Where.DEVICE, Where.HOST):
            raise ConfigError("only a memory tier has memory", where=where.name)
        return CpuBuffer(nbytes, progress=progress)
