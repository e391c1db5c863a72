"""Where a demo stores its pages: a directory that is new or empty, and only what the demo has put there is deleted."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from hicache.errors import ConfigError

PAGES, RECORD = "pages", "record.json"


def demos_directory() -> Path:
    """``$XDG_CACHE_HOME/hicache/demo``, or below ``~/.cache``; a relative variable is ignored, as the rule is."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hicache" / "demo"


class Place:
    """One demo's directory: ``pages`` is the store, ``record.json`` the digests of what was stored."""

    def __init__(self, given: Path | None) -> None:
        self.path = given.absolute() if given else demos_directory() / time.strftime("%Y%m%d-%H%M%S")
        self.given = given is not None
        self.deleted = False
        self._made = self._opened = False

    @property
    def pages(self) -> Path:
        """The store's directory."""
        return self.path / PAGES

    @property
    def record(self) -> Path:
        """What the new process checks restored pages with."""
        return self.path / RECORD

    def open(self) -> None:
        """Make it and see that it can be written; ConfigError with what to do otherwise."""
        try:
            if not self.given:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path = Path(tempfile.mkdtemp(prefix=self.path.name + "-", dir=self.path.parent))
                self._made = self._opened = True
                return
            self._made = not self.path.exists()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise ConfigError(
                    "the demo's store is not empty: name another directory, or delete this one",
                    store=self.path,
                    delete=f"rm -r {self.path}",
                )
            with tempfile.TemporaryFile(dir=self.path):
                self._opened = True
        except OSError as error:
            raise ConfigError("the demo's store cannot be written", store=self.path, reason=error) from error

    def require(self, nbytes: int) -> None:
        """ConfigError unless so much is free: a demo on a full disk shows nothing."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise ConfigError(
                "the disk has no room for the demo's store",
                store=self.path,
                needed_bytes=nbytes,
                free_bytes=free,
            )

    def delete(self) -> None:
        """Remove what the demo has stored, and the directory if the demo made it; nothing of anybody else's."""
        if not self._opened or self.deleted:
            return
        shutil.rmtree(self.pages, ignore_errors=True)
        for path in (self.record, self.path / "handover.json"):
            path.unlink(missing_ok=True)
        if self._made:
            self.path.rmdir()
        self.deleted = True

    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.path.rglob("*") if path.is_file())

    def others(self) -> list[Path]:
        """What earlier demos have left in the default place."""
        there = demos_directory()
        return sorted(path for path in there.iterdir() if path != self.path) if there.is_dir() else []
