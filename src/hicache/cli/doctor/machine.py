"""What the machine is like: processors, memory, and the disk a store would lie on. Looks; changes nothing lasting."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from hicache.data.copy.host import ORIGINAL_CPUS, HostEngine
from hicache.data.platform.memory import MemoryProbe
from hicache.resolve.sizing import Budget, Snapshot

PROBE_NBYTES = 16 << 20
BLOCK_NBYTES = 1 << 20
NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "gpfs", "beegfs", "fuse.sshfs", "afs", "9p")
"""How the types of file systems begin that are somewhere else; a lock or a mapping may mean less on them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know: how bad it is (ok, slow, wrong), and what to change."""

    level: str
    what: str
    change: str = ""


def cpus() -> tuple[dict[str, object], list[Finding]]:
    """Processors that copies may use, and the engine that uses them."""
    now = os.sched_getaffinity(0)
    native = HostEngine.available()
    found: list[Finding] = []
    if native is not None:
        found.append(
            Finding(
                "slow", f"copies run in numpy: {native}", "install a C compiler (cc), then run this again"
            )
        )
    if len(now) < len(ORIGINAL_CPUS):
        found.append(
            Finding(
                "ok",
                f"this thread is bound to {len(now)} of {len(ORIGINAL_CPUS)} CPUs; copies use all of them",
            )
        )
    facts = {"cpus": len(ORIGINAL_CPUS), "cpus_of_this_thread": len(now), "native_copies": native or "yes"}
    return facts, found


def memory(reserve: int | None = None) -> tuple[dict[str, object], list[Finding]]:
    """The budget of one rank alone, and how memory is had."""
    probe = MemoryProbe()
    available, headroom = probe.available(), probe.headroom()
    known = [nbytes for nbytes in (available, headroom) if nbytes is not None]
    budget = Budget(Snapshot(min(known)), reserve=reserve) if known else None
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts: dict[str, object] = {
        "available_bytes": available,
        "control_group_bytes": headroom,
        "budget_bytes": budget.nbytes if budget else None,
        "left_alone_bytes": budget.kept if budget else None,
        "locked_memory_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "huge_pages": _huge_pages(),
    }
    found = []
    if budget is None:
        found.append(Finding("slow", "how much memory there is cannot be told", "say host.bytes"))
    if facts["huge_pages"] == "never":
        found.append(
            Finding(
                "slow", "huge pages are off", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            )
        )
    return facts, found


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def existing(path: Path) -> Path:
    """The nearest directory that exists already."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk(path: Path) -> tuple[dict[str, object], list[Finding]]:
    """What the disk below ``path`` can do: a file of 16 MiB is written, synced, read and removed."""
    where = existing(path.expanduser().absolute())
    kind = file_system(where)
    facts: dict[str, object] = {
        "path": str(path),
        "probed_in": str(where),
        "file_system": kind,
        "local": not kind.startswith(NETWORK),
        "free_bytes": shutil.disk_usage(where).free,
    }
    try:
        facts |= _probe(where)
    except OSError as error:
        reason = f"{where} cannot be written: {error.strerror or error}"
        return facts | {"writable": False}, [
            Finding("wrong", reason, "give store.path a directory that you own")
        ]
    found = []
    if not facts["local"]:
        found.append(
            Finding(
                "slow",
                f"{where} is on {kind}, not a local disk",
                "give store.path a local disk; LMDB needs one",
            )
        )
    if not facts["direct_io"]:
        found.append(
            Finding("ok", "the file system has no direct I/O: the store reads and writes through its cache")
        )
    return facts, found


def _probe(where: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix=".hicache-doctor-", dir=where) as folder:
        file = Path(folder) / "probe"
        block = os.urandom(BLOCK_NBYTES)
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            began = time.monotonic()
            for _ in range(PROBE_NBYTES // BLOCK_NBYTES):
                os.write(handle, block)
            written = time.monotonic()
            os.fsync(handle)
            synced = time.monotonic()
        finally:
            os.close(handle)
        return {
            "writable": True,
            "write_and_fsync_bytes_per_s": int(PROBE_NBYTES / max(1e-9, synced - began)),
            "fsync_s": round(synced - written, 6),
            "direct_io": _direct(file),
        }


def _direct(file: Path) -> bool:
    """True when a block can be read past the system's cache."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    with suppress(OSError):
        handle = os.open(file, os.O_RDONLY | flag)
        try:
            with mmap(-1, BLOCK_NBYTES) as aligned:
                return os.readv(handle, [aligned]) == BLOCK_NBYTES
        finally:
            os.close(handle)
    return False


def file_system(where: Path) -> str:
    """The type of the file system of the mount that ``where`` is on."""
    best, kind = -1, "unknown"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = Path(left.split()[4].replace("\\040", " "))
            if (where == mount or mount in where.parents) and len(mount.parts) > best:
                best, kind = len(mount.parts), right.split()[0]
    return kind
