"""What the cases of storage share: segment stores of pages of one size, fresh processes on them, and where a record lies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hicache.data.store.segment import SegmentStore
from hicache.keys import Namespace, RecordKey
from hicache.records import Where
from hicache.testing.house import SPEC, House, Served
from hicache.testing.stores import PAGE_NBYTES

SLOT = 3 * 4096
"""A header and PAGE_NBYTES, in whole blocks."""

HOUSE_SLOT = 2 * 4096
"""A header and a page of a house."""

PROMPT = range(16 * 64)
"""16 pages of a house."""

NAMESPACE = Namespace.of({"weights": "test"})

PRELUDE = """
import os, random, signal, sys
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import Namespace, RecordKey
from hicache.testing.stores import chain_of, read_back
namespace = Namespace.of({"weights": "test"})
store = SegmentStore(sys.argv[1], int(sys.argv[2]))
"""


def opened(path: Path, pages: int, nbytes: int = PAGE_NBYTES, **more) -> SegmentStore:
    """A store whose cap is exactly so many slots of this page size."""
    return SegmentStore(path, cap_of(pages, nbytes), **more)


def cap_of(pages: int, nbytes: int = PAGE_NBYTES) -> int:
    return pages * (-(-nbytes // 4096) + 1) * 4096


def start(path: Path, cap: int, script: str, *arguments: str) -> subprocess.Popen:
    """Start a script in a fresh process; ``store``, ``namespace`` and ``sys.argv[3:]`` are there."""
    command = [sys.executable, "-c", PRELUDE + script, str(path), str(cap), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen) -> str:
    """Wait for its end and return what it printed; it must not have failed."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def place(store: SegmentStore, key: RecordKey) -> tuple[Path, int]:
    """(file, byte offset) of a record's slot."""
    row = store.directory.rows([bytes(key)])[0]
    assert row is not None
    return store.directory.segments.path(row.segment), row.offset * 4096


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def house_store(path: Path, pages: int = 16, **more) -> SegmentStore:
    """A store for the pages of a house."""
    return SegmentStore(path, pages * HOUSE_SLOT, SPEC.fingerprint(), **more)


@contextmanager
def house_on(store: SegmentStore, **more) -> Iterator[House]:
    """A house without anything in memory, on this store; its books are checked at the end."""
    one = House(store=store, **{"host_slots": 32, **more})
    try:
        yield one
        one.controller.check()
        pool = one.controller.pools()[Where.HOST]
        assert pool["free"] + pool["ready"] == pool["total"], "a slot of the host pool is lost"
    finally:
        one.close()


def ask(path: Path, tokens: Sequence[int] = PROMPT, pages: int = 16, **more) -> tuple[Served, dict[str, int]]:
    """Open the store anew, serve one prompt from it, write what was missing; what was served and the store's gauges."""
    store = house_store(path, pages, **more)
    with house_on(store) as one:
        served = one.serve("prompt", one.keys(tokens))
    gauges = store.usage()
    store.check()
    store.close()
    assert served.by_tier[Where.STORE] >= served.loaded
    return served, gauges


def used_on_disk(path: Path) -> int:
    """Bytes of the directory's segment files."""
    return sum(entry.stat().st_size for entry in path.glob("segment-*"))
