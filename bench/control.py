"""How much the control plane costs a page, and whether that depends on how many pages are resident.

Drives the real Controller as an adapter does: open, match, load, publish in calls of 512 pages, take_jobs, apply,
close; the bytes are left out. Times are the thread's own CPU time: the code neither waits nor does I/O, so on a quiet
machine that is the wall clock, and on a shared one it leaves the neighbours out. Prompts have 131,072 tokens. `cold` publishes a prompt nobody has seen, into free
slots; `evict` the same into a full pool; `warm` loads and publishes a resident one again. Cases are interleaved;
a figure is the best of its rounds, as the machine may be shared.
"""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, arguments, middle, report

from hicache.control import ControlConfig, Controller
from hicache.keys import KeyMemo, Namespace, PageKey
from hicache.records import Done

TOKENS = 131_072
CALL = 512
NAMESPACE = Namespace.of({"model": "bench"})


def chain(seed: int, pages: int) -> list[PageKey]:
    """Keys of a chain of its own."""
    key, keys = NAMESPACE.root, []
    for page in range(pages):
        key = hashlib.sha256(key + seed.to_bytes(8, "little") + page.to_bytes(4, "little")).digest()
        keys.append(key)
    return keys


class Subject:
    """One controller with ``resident`` pages, in chains of 64 to 1,024 pages, and room for ``spare`` more."""

    def __init__(self, resident: int, spare: int) -> None:
        self.controller = Controller(ControlConfig(host_slots=resident + spare), lambda: 0.0)
        self.seed = resident << 32
        self.worst = 0.0
        lengths, left, n = (64, 1024, 128, 512), resident, 0
        while left:
            pages = min(lengths[n % 4], left)
            self.run(self.new(pages))
            left -= pages
            n += 1
        self.worst = 0.0

    def new(self, pages: int) -> list[PageKey]:
        """Keys nobody has seen."""
        self.seed += 1
        return chain(self.seed, pages)

    def timed(self, pages: int, call: Callable[..., object], *args: object) -> object:
        """Make one call; remember the worst one, longer calls in proportion to 512 pages."""
        start = time.thread_time()
        result = call(*args)
        self.worst = max(self.worst, (time.thread_time() - start) * min(1.0, CALL / max(pages, 1)))
        return result

    def run(self, keys: list[PageKey]) -> float:
        """A request's life; returns seconds."""
        controller, pages, ids = self.controller, len(keys), range(len(keys))
        start = time.thread_time()
        request = controller.open(object(), NAMESPACE, keys)
        match = self.timed(pages, request.match)
        if match.pages:  # type: ignore[attr-defined]
            self.timed(pages, request.load, match, ids)
        for upto in range(CALL, pages + CALL, CALL):
            self.timed(CALL, request.publish, min(upto, pages), ids)
            for job in controller.take_jobs().jobs:
                self.timed(job.pages, controller.apply, [Done(job.id)])
        request.close()
        controller.apply()
        return time.thread_time() - start


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def index_bytes(resident: int) -> Row:
    """What a page costs in memory, keys included: growth of a fresh process that makes a full controller."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        nbytes = fresh.submit(_grow, resident).result()
    return Row(f"index_bytes_per_page/n{resident}", nbytes / resident, "bytes", 300, "target")


def _grow(resident: int) -> int:
    before = rss()
    subject = Subject(resident, 1)
    gc.collect()
    return rss() - before + 0 * subject.seed


def hashing(page: int) -> list[Row]:
    """What hashing costs a page, and that an extended prompt hashes its new pages only."""
    tokens = np.random.default_rng(1).integers(0, 50_000, TOKENS + 64 * page, dtype=np.uint32)
    pages, rows = TOKENS // page, []
    cold, longer = [], []
    for _ in range(5):
        memo = KeyMemo(page)
        start = time.thread_time()
        memo.keys(NAMESPACE, tokens[:TOKENS])
        cold.append(time.thread_time() - start)
        hashed = memo.hashed
        start = time.thread_time()
        memo.keys(NAMESPACE, tokens)
        longer.append(time.thread_time() - start)
        hashed = memo.hashed - hashed
    rows.append(
        Row(
            f"control/hash/cold/p{page}",
            min(cold) / pages * 1e6,
            "us/page",
            min(cold) / pages * 1e6,
            "itself",
        )
    )
    rows.append(Row(f"control/hash/extended/p{page}", hashed, "pages hashed", 64, "new pages"))
    rows.append(
        Row(f"control/hash/extended_s/p{page}", min(longer) * 1e3, "ms", min(cold) * 1e3, "hashing it all")
    )
    return rows


def measure(sizes: list[int], page: int, rounds: int) -> list[Row]:
    """Rows for one page size."""
    pages = TOKENS // page
    spare = pages * (rounds + 1)
    subjects = {size: Subject(size, spare) for size in sizes}
    times: dict[tuple[str, int], list[float]] = {}
    worst: dict[int, list[float]] = {size: [] for size in sizes}

    def note(kind: str, size: int, seconds: float) -> None:
        times.setdefault((kind, size), []).append(seconds / pages * 1e6)

    for _ in range(rounds):
        for size, subject in subjects.items():
            keys = subject.new(pages)
            subject.worst = 0.0
            note("cold", size, subject.run(keys))
            note("warm", size, subject.run(keys))
            worst[size].append(subject.worst)
    for subject in subjects.values():  # fill what is left, so that every new page must evict one
        free = subject.controller.books.tiers.top.slots.free
        subject.run(subject.new(free))
    for _ in range(rounds):
        for size, subject in subjects.items():
            keys = subject.new(pages)
            subject.worst = 0.0
            note("evict", size, subject.run(keys))
            worst[size].append(subject.worst)
    rows = []
    for kind in ("cold", "warm", "evict"):
        base = min(times[kind, 10_000])
        for size in sizes:
            value = min(times[kind, size])
            rows.append(
                Row(
                    f"control/match_publish/{kind}/p{page}/n{size}",
                    value,
                    "us/page",
                    base,
                    "the same at 10,000",
                )
            )
    for size in sizes:
        target = "target, call of 512 pages"
        rows.append(Row(f"worst_call_ms/p{page}/n{size}", middle(worst[size]) * 1e3, "ms", 5, target))
        rows.append(Row(f"worst_call_ms_any_round/p{page}/n{size}", max(worst[size]) * 1e3, "ms", 5, target))
    return rows


def main() -> None:
    """Run the bench."""
    args = arguments(__doc__ or "").parse_args()
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    if not args.quick:
        sizes.append(10_000_000)
    rows = []
    for page in (16, 64):
        rows += hashing(page)
        rows += measure(sizes, page, 4 if args.quick else 9)
    rows += [index_bytes(size) for size in sizes if size >= 100_000]
    report(f"control plane, one process, pid {os.getpid()}", rows, args.json)


if __name__ == "__main__":
    main()
