"""Whether a path lies on a disk of this machine."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from hicache.errors import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    [
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
    ]
)
NETWORK_FUSE = ("ceph", "gcsfuse", "glusterfs", "goofys", "juicefs", "rclone", "s3fs", "sshfs")


def check_local(path: Path) -> None:
    """ConfigError on a network file system: the index is a mapped file, and neither it nor its locks work there."""
    kind = file_system(path.resolve())
    family, _, program = kind.partition(".")
    if kind in NETWORK or (family == "fuse" and program.startswith(NETWORK_FUSE)):
        raise ConfigError(
            "a segment store needs a local disk",
            path=path,
            file_system=kind,
            nearest="a directory on a local disk, one for each machine",
        )


def file_system(path: Path) -> str:
    """The kind of file system that a path lies on, or "" where the system does not tell."""
    best, kind = -1, ""
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            about, _, source = line.partition(" - ")
            fields = about.split()
            if len(fields) < 5 or not source:
                continue
            mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
            if (
                path.is_relative_to(mount) and len(mount.parts) >= best
            ):  # a later one lies over an earlier one
                best, kind = len(mount.parts), source.split()[0]
    return kind
