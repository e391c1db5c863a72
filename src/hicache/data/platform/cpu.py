"""The CPU platform: page-aligned, prefaulted anonymous memory; device memory is the same memory."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.capability import Capabilities
from hicache.data.platform.base import Progress
from hicache.errors import CapacityError, ConfigError, InvariantError
from hicache.records import Where
from hicache.spec import positive

HUGE_PAGE = 2 << 20
PREFAULT_CHUNK = 64 << 20

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # (limit, use) of the control group this process sees as its root
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def memory_available() -> int | None:
    """Bytes this machine, or the control group we live in, can still give; None where it cannot be told."""
    found: list[int] = []
    try:
        lines = _MEMINFO.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):  # not a Linux /proc: only the system's own refusal is left
        pass
    for limit, use in _CGROUPS:
        try:
            found.append(max(0, int(limit.read_text()) - int(use.read_text())))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
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


class CpuPlatform:
    """Host memory for every tier."""

    name = "cpu"

    def capabilities(self) -> Capabilities:
        """What this platform can do here and now."""
        return Capabilities(
            platform=self.name,
            missing={
                "pinned-memory": "cpu: device memory is host memory, there is no link to pin it for",
                "streams": "cpu: copies run on threads",
                "triton": "cpu: needs a GPU",
            },
        )

    def alloc(self, nbytes: int, where: Where, *, progress: Progress | None = None) -> CpuBuffer:
        """Exactly ``nbytes`` of zeroed memory for the tier ``where``; CapacityError when they cannot be had."""
        if where not in (Where.DEVICE, Where.HOST):
            raise ConfigError("only a memory tier has memory", where=where.name)
        return CpuBuffer(nbytes, progress=progress)
