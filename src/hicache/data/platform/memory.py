"""How much memory is there: the machine's, and what the control groups we live in still let us take.

Version 2 and version 1 of control groups, at every level from ours up to the root; a limit counts with the file
cache that can be given back added. The root of the file system is given, so that any machine can be played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" with a number near 2^63."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Where one version of control groups writes things."""

    mount: str
    limit: str
    used: str
    cache_row: str


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class MemoryProbe:
    """Reads a Linux system's own files under ``root``."""

    root: Path = Path("/")

    def available(self) -> int | None:
        """Bytes the machine can still give; None where it cannot be told."""
        try:
            lines = (self.root / "proc/meminfo").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, ValueError, IndexError, StopIteration):  # not Linux, or not as we know it
            return None

    def headroom(self) -> int | None:
        """Bytes our control groups still let us take; None when none of them sets a limit."""
        left = [room for files, path in self._groups() if (room := self._left(files, path)) is not None]
        return min(left, default=None)

    def _groups(self) -> Iterator[tuple[_Files, Path]]:
        """Every directory that may hold a limit for us: our group and those above it, in either version."""
        try:
            rows = [line.split(":", 2) for line in (self.root / "proc/self/cgroup").read_text().splitlines()]
        except OSError:
            rows = []
        ours = {_V2.mount: "/", _V1.mount: "/"}
        for row in rows:
            if len(row) == 3 and row[1] == "":
                ours[_V2.mount] = row[2]
            elif len(row) == 3 and "memory" in row[1].split(","):
                ours[_V1.mount] = row[2]
        for files in (_V2, _V1):
            mount = self.root / files.mount
            path = mount / ours[files.mount].strip("/")
            while path != mount and mount in path.parents:
                yield files, path
                path = path.parent
            yield files, mount

    def _left(self, files: _Files, path: Path) -> int | None:
        try:
            limit = int((path / files.limit).read_text())  # "max" is no number: no limit
        except (OSError, ValueError):
            return None
        if limit >= _UNLIMITED:
            return None
        try:
            used = int((path / files.used).read_text())
        except (OSError, ValueError):
            used = 0
        return max(0, limit - max(0, used - self._cache(files, path)))

    def _cache(self, files: _Files, path: Path) -> int:
        try:
            rows = (path / "memory.stat").read_text().splitlines()
            return next(int(row.split()[1]) for row in rows if row.split(" ")[0] == files.cache_row)
        except (OSError, ValueError, IndexError, StopIteration):
            return 0
