"""How fast the segment store moves pages to and from a disk, against the disk itself and one file a page.

Rows are `<what>/<page>`. `segment/write/recycled` overwrites the slots of a full store, `segment/write/fresh` fills a
new directory, `segment/read` reads in random order and verifies every page; batches are those of the worker, from and
to page-aligned memory, and a write is durable when it returns. Baseline `device` is the same file system read and
overwritten in the same blocks with O_DIRECT by four threads, durable at the end. `file/*` is one file a page (written
beside, synced, renamed; four threads). What may lie in the page cache is dropped before each reading.

`cpu/*` are CPU seconds a GB. `exists` asks for 1,024 keys at once. `open/<pages>` is the time to open a store and
find one key; its baseline is the smallest population. Everything runs once a round, in turn; figures are medians.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, arguments, interleaved, middle, report

from hicache.data.moves import PAGES_A_CALL, WRITES_A_CALL
from hicache.data.platform.cpu import CpuBuffer
from hicache.data.store.base import Hit, Record, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore
from hicache.keys import Namespace, RecordKey

PAGES = {"1.47MB": 1_474_560, "8MB": 8 << 20}
THREADS = 4
NAMESPACE = Namespace.of({"weights": "bench"})
TARGETS = {"segment/write/recycled": 0.9, "segment/write/fresh": 0.5, "segment/read": 0.95}
SLOT_HEADER = 4096
FRESH_CAP = 4 << 30
"""From this cap on segments have their full size, 256 MiB."""


def key_of(name: str, number: int) -> RecordKey:
    """A key that nobody else has."""
    return RecordKey(hashlib.sha256(f"{name}/{number}".encode()).digest())


def forget(folder: Path) -> None:
    """Drop what the page cache has of these files; all of it is on the disk already."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Memory:
    """Two pools of ``count`` pages: one full of noise to write from, one to read into."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        source, target = (CpuBuffer(count * nbytes).view for _ in range(2))
        noise = np.random.default_rng(1).integers(1, 256, nbytes + count, dtype=np.uint8)
        for number in range(count):
            source[number * nbytes : (number + 1) * nbytes] = noise[number : number + nbytes]
        self.source = [source[i * nbytes : (i + 1) * nbytes].data for i in range(count)]
        self.target = [target[i * nbytes : (i + 1) * nbytes].data for i in range(count)]

    def check(self, order: Sequence[int]) -> None:
        """What was read must be what was written; ``order[i]`` is the page that lies in target ``i``."""
        for number in range(0, self.count, 7):
            if self.target[number] != self.source[order[number]]:
                raise SystemExit("a page came back wrong")


class Device:
    """The file system itself: one written file, aligned blocks, O_DIRECT, four threads."""

    def __init__(self, folder: Path, memory: Memory) -> None:
        self.memory = memory
        path = folder / "device"
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, memory.count * memory.nbytes)
        self.pool = ThreadPoolExecutor(THREADS)
        self.write()

    def write(self) -> None:
        """Overwrite all of it, durably."""
        nbytes = self.memory.nbytes
        list(
            self.pool.map(
                lambda i: os.pwrite(self.fd, self.memory.source[i], i * nbytes), range(self.memory.count)
            )
        )
        os.fdatasync(self.fd)

    def read(self, order: Sequence[int]) -> None:
        """Read the pages in this order."""
        nbytes, target = self.memory.nbytes, self.memory.target
        list(
            self.pool.map(
                lambda i: os.preadv(self.fd, [target[i]], order[i] * nbytes), range(self.memory.count)
            )
        )

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()
        os.close(self.fd)


class FileAPage:
    """One file a page, as one would write it first: written beside, synced, renamed."""

    def __init__(self, folder: Path, memory: Memory) -> None:
        self.folder, self.memory = folder / "files", memory
        self.folder.mkdir()
        self.pool = ThreadPoolExecutor(THREADS)

    def write(self) -> None:
        """Write every page."""

        def one(number: int) -> None:
            path = self.folder / f"{number}.tmp"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(fd, self.memory.source[number])
            os.fdatasync(fd)
            os.close(fd)
            path.rename(self.folder / str(number))

        list(self.pool.map(one, range(self.memory.count)))

    def read(self, order: Sequence[int]) -> None:
        """Read the pages in this order."""

        def one(number: int) -> None:
            with (self.folder / str(order[number])).open("rb", buffering=0) as file:
                file.readinto(self.memory.target[number])

        list(self.pool.map(one, range(self.memory.count)))

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


class Segments:
    """Segment stores over one memory: a full one that is written over and read, and fresh ones."""

    def __init__(self, folder: Path, memory: Memory) -> None:
        self.folder, self.memory = folder, memory
        self.cap = self._cap()
        self.store = SegmentStore(folder / "full", self.cap)
        self.generation = 0
        self.write_recycled()

    def _cap(self) -> int:
        """The least cap that holds all pages."""
        cap = self.memory.count * (self.memory.nbytes + SLOT_HEADER)
        while SegmentStore.capacity(cap, self.memory.nbytes) < self.memory.count:
            cap += self.memory.nbytes + SLOT_HEADER
        return cap

    def _write(self, store: SegmentStore, name: str) -> None:
        for first in range(0, self.memory.count, WRITES_A_CALL):
            numbers = range(first, min(first + WRITES_A_CALL, self.memory.count))
            records = [Record(key_of(name, i), None, "page_first", [self.memory.source[i]]) for i in numbers]
            if set(store.write(NAMESPACE, records)) != {WriteOutcome.STORED}:
                raise SystemExit("a page was not stored")

    def write_recycled(self) -> None:
        """New pages over the slots of the old ones."""
        self.generation += 1
        self._write(self.store, str(self.generation))

    def write_fresh(self) -> None:
        """A new directory."""
        store = SegmentStore(self.folder / "fresh", FRESH_CAP)
        self._write(store, "fresh")
        store.close()

    def remove_fresh(self) -> None:
        """Take it away again."""
        shutil.rmtree(self.folder / "fresh")

    def read(self, order: Sequence[int]) -> None:
        """Read the newest pages in this order, verified."""
        for first in range(0, self.memory.count, PAGES_A_CALL):
            numbers = range(first, min(first + PAGES_A_CALL, self.memory.count))
            keys = [key_of(str(self.generation), order[i]) for i in numbers]
            outcomes = self.store.read(NAMESPACE, keys, [[self.memory.target[i]] for i in numbers])
            if not all(isinstance(outcome, Hit) for outcome in outcomes):
                raise SystemExit("a page was not read")


def clocked(
    work: Callable[[], None], cpu: list[float], *, before: Callable[[], None] = lambda: None
) -> Callable[[], float]:
    """Seconds of one call; its CPU seconds go to ``cpu``."""

    def once() -> float:
        before()
        start, busy = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - start
        cpu.append(time.process_time() - busy)
        return seconds

    return once


def measure(folder: Path, page: str, count: int, rounds: int) -> list[Row]:
    """All rows of one size of page."""
    memory = Memory(count, PAGES[page])
    device, files, segments = Device(folder, memory), FileAPage(folder, memory), Segments(folder, memory)
    draw = random.Random(5)
    order = list(range(count))

    def cold(where: Path) -> Callable[[], None]:
        def prepare() -> None:
            draw.shuffle(order)
            forget(where)

        return prepare

    def clear_fresh() -> None:
        if (folder / "fresh").exists():
            segments.remove_fresh()

    work: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "device/write": (device.write, lambda: None),
        "segment/write/recycled": (segments.write_recycled, lambda: None),
        "segment/write/fresh": (segments.write_fresh, clear_fresh),
        "file/write": (files.write, lambda: None),
        "device/read": (lambda: device.read(order), cold(folder)),
        "segment/read": (lambda: segments.read(order), cold(folder / "full")),
        "file/read": (lambda: files.read(order), cold(folder / "files")),
    }
    cpu: dict[str, list[float]] = {name: [] for name in work}
    seconds = interleaved(
        rounds, {name: clocked(do, cpu[name], before=prepare) for name, (do, prepare) in work.items()}
    )
    segments.read(order)
    memory.check(order)
    for one in (device, files, segments.store):
        one.close()
    return list(rows_of(page, count * PAGES[page] / 1e9, seconds, cpu))


def rows_of(
    page: str, gigabytes: float, seconds: dict[str, list[float]], cpu: dict[str, list[float]]
) -> Iterator[Row]:
    """GB/s and CPU seconds a GB of every case, beside the device in the same round."""
    for name, mine in seconds.items():
        base = "device/" + name.split("/")[1]
        paired = [b / a for a, b in zip(mine, seconds[base], strict=True)]
        note = f"{base}, in the same round: median {statistics.median(paired):.2f}, {min(paired):.2f} to {max(paired):.2f}"
        yield Row(f"{name}/{page}", gigabytes / middle(mine), "GB/s", gigabytes / middle(seconds[base]), note)
    for name, mine in cpu.items():
        base = "device/" + name.split("/")[1]
        yield Row(f"cpu/{name}/{page}", middle(mine) / gigabytes, "s/GB", middle(cpu[base]) / gigabytes, base)


# ---- the index alone


class Hollow(Files):
    """Keeps no bytes: an index of a million records without their pages."""

    def make(self, path: Path, nbytes: int) -> None:
        """A file that takes no room."""
        with path.open("ab") as file:
            file.truncate(nbytes)
        path.chmod(0o600)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """Nowhere."""

    def sync(self, fd: int) -> None:
        """Nothing to wait for."""


def populate(path: Path, pages: int) -> int:
    """An index of so many records in chains of 64; returns its cap."""
    cap = pages * 2 * SLOT_HEADER + (1 << 30)
    store = SegmentStore(path, cap, files=Hollow())
    payload = [memoryview(bytes(256))]
    for first in range(0, pages, 4096):
        numbers = range(first, min(first + 4096, pages))
        keys = {n: key_of("page", n) for n in range(numbers.start - 1, numbers.stop)}
        store.write(
            NAMESPACE,
            [Record(keys[n], keys[n - 1] if n % 64 else None, "page_first", payload) for n in numbers],
        )
    store.close()
    return cap


def index_rows(folder: Path, populations: Sequence[int], rounds: int) -> Iterator[Row]:
    """Opening a store of so many records, and asking it for 1,024 keys."""
    opened: dict[int, list[float]] = {}
    asked: dict[int, list[float]] = {}
    for pages in populations:
        cap = populate(folder / str(pages), pages)
        draw = random.Random(pages)
        for _ in range(rounds):
            keys = [key_of("page", draw.randrange(pages)) for _ in range(1024)]
            start = time.perf_counter()
            store = SegmentStore(folder / str(pages), cap)
            if store.contains(NAMESPACE, keys[:1]) != [True]:
                raise SystemExit("a record is gone")
            opened.setdefault(pages, []).append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
            found = store.contains(NAMESPACE, keys)
            asked.setdefault(pages, []).append(len(keys) / (time.perf_counter() - start))
            if not all(found):
                raise SystemExit("a record is gone")
            store.close()
    least = populations[0]
    for pages in populations:
        yield Row(f"open/{pages}", middle(opened[pages]), "ms", middle(opened[least]), f"open/{least}")
        yield Row(f"exists/{pages}", middle(asked[pages]), "keys/s", middle(asked[least]), f"exists/{least}")


@contextmanager
def workplace(where: Path | None) -> Iterator[Path]:
    """A directory on the disk that is measured; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=where) as name:
        yield Path(name)


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--path", type=Path, help="a directory on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--pages", default=",".join(PAGES), help="sizes of pages; default: %(default)s")
    parser.add_argument("--no-index", action="store_true", help="leave out opening and asking")
    options = parser.parse_args()
    total, rounds = (192 << 20, 3) if options.quick else (800 << 20, 9)
    rows: list[Row] = []
    with workplace(options.path) as folder:
        for page in filter(None, options.pages.split(",")):
            nbytes = PAGES[page]
            (folder / page).mkdir()
            rows += measure(folder / page, page, total // nbytes, rounds)
            shutil.rmtree(folder / page)
        populations = (10_000, 100_000) if options.quick else (10_000, 100_000, 1_000_000)
        (folder / "index").mkdir()
        if not options.no_index:
            rows += index_rows(folder / "index", populations, rounds)
    report("Segment store", rows, options.json)
    for row in rows:
        wanted = TARGETS.get(row.name.rpartition("/")[0])
        if wanted is not None and row.ratio < wanted:
            print(f"missed: {row.name}: {row.ratio:.2f} of the device, wanted {wanted}")


if __name__ == "__main__":
    main()
