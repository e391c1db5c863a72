"""How fast pages travel between an engine's tensors and a host pool, against a plain copy of as many bytes.

Rows are `<way>/<layout>/<wb|ld>/<shape>/p<page>/t<tokens>`: `wb` writes pages back from the engine's layer-first
tensors to the pool, `ld` loads them again; slots are shuffled on both sides. Ways: `native` (host.c with its
helpers), `numpy` (the engine without a compiler), `torch-index` (index_select and index_copy_ a layer), `page-loop`
(one numpy assignment for each page and layer). Baselines are copies of one contiguous array: `memcpy-1` with one
thread, `memcpy-2` with two (numpy on two halves, or the native engine, whichever is faster). All memory is written
before it is timed: what has never been written reads as one shared page of zeros, from the cache. Every way runs
once a round, and a figure is the best of its rounds, as the machine may be shared; ways far behind stop early.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, arguments, interleaved, report

from hicache.data.copy.base import Bytes, CopyEngine, Surface
from hicache.data.copy.host import HostEngine
from hicache.data.copy.strided import NumpyEngine
from hicache.data.platform.cpu import CpuBuffer
from hicache.data.pool import surface_of
from hicache.layout import LAYOUTS, place, undefined
from hicache.plan import plan
from hicache.spec import Group, Plane

try:
    import torch
except ImportError:
    torch = None

STAGES = ((1, 6.0), (2, 2.5), (9, 1.0))
"""(rounds, times slower): a way that is so far behind the native one after these rounds is measured no further."""

LONG_RUN = 256
"""Bytes of a run from which a gather is to be as fast as a copy by one thread; below, four fifths of it."""

QUICK_TOKENS = {"smollm2": 1024, "llama_8b": 256, "mla": 512}
FULL_TOKENS = (2048, 16_384)


def group_of(shape: str, page: int) -> Group:
    """What one page of a model holds."""
    return {
        "smollm2": Group("main", (Plane("k", 30, page, 3, 128), Plane("v", 30, page, 3, 128))),
        "llama_8b": Group("main", (Plane("k", 32, page, 8, 256), Plane("v", 32, page, 8, 256))),
        "mla": Group("main", (Plane("latent", 61, page, 1, 1152),)),
    }[shape]


def written(nbytes: int) -> Bytes:
    """Memory as a pool has it, full of noise."""
    view = CpuBuffer(nbytes).view
    noise = np.random.default_rng(1).integers(1, 256, 1 << 20, dtype=np.uint8)
    for start in range(0, nbytes, noise.size):
        piece = view[start : start + noise.size]
        piece[:] = noise[: piece.size]
    return view


@dataclass(frozen=True)
class Cell:
    """One direction of one layout: two surfaces and the slots on both sides."""

    name: str
    source: Surface
    sources: list[int]
    target: Surface
    targets: list[int]
    nbytes: int
    run_nbytes: int

    def with_engine(self, engine: CopyEngine) -> None:
        """The copy as the data plane does it."""
        engine.submit(self.source, self.sources, self.target, self.targets).wait()

    def with_page_loop(self) -> None:
        """The copy as one would write it first."""
        for ours, theirs in zip(self.source.views, self.target.views, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                for s, t in zip(self.sources, self.targets, strict=True):
                    b[t] = a[s]

    def with_torch(self) -> Callable[[], None]:
        """The copy as an adapter in torch writes it, on words of 8 bytes."""
        pairs = [
            (torch.from_numpy(a.view(np.int64)), torch.from_numpy(b.view(np.int64)))
            for ours, theirs in zip(self.source.views, self.target.views, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        sources, targets = torch.tensor(self.sources), torch.tensor(self.targets)

        def copy() -> None:
            for a, b in pairs:
                b.index_copy_(0, targets, a.index_select(0, sources))

        return copy


def cells(shape: str, page: int, tokens: int) -> Iterator[Cell]:
    """Both directions of every layout that can hold the shape."""
    group, slots = group_of(shape, page), tokens // page
    rng = np.random.default_rng(2)
    tensors = place(group, LAYOUTS["layer_first"], slots)
    device = surface_of(tensors, written(tensors.nbytes))
    device_slots, host_slots = rng.permutation(slots).tolist(), rng.permutation(slots).tolist()
    for layout in LAYOUTS.values():
        if undefined(group, layout):
            continue
        pages = place(group, layout, slots)
        pool = surface_of(pages, written(pages.nbytes))
        run, nbytes = plan(tensors, pages).run_nbytes, slots * group.nbytes
        where = f"{shape}/p{page}/t{tokens}"
        yield Cell(f"{layout.name}/wb/{where}", device, device_slots, pool, host_slots, nbytes, run)
        yield Cell(f"{layout.name}/ld/{where}", pool, host_slots, device, device_slots, nbytes, run)


class Plain:
    """Copies of one contiguous array: what the memory gives."""

    def __init__(self, nbytes: int, native: HostEngine | None) -> None:
        self.a, self.b = written(nbytes), written(nbytes)
        self.native = native
        pieces = [slice(i, min(i + (1 << 20), nbytes)) for i in range(0, nbytes, 1 << 20)]
        whole = len(pieces) - (nbytes % (1 << 20) > 0)
        one = place(Group("main", (Plane("all", 1, 1, 1, 1 << 20),)), LAYOUTS["layer_first"], whole)
        self.surfaces = (surface_of(one, self.a), surface_of(one, self.b))
        self.pages = list(range(whole))
        self.pool = ThreadPoolExecutor(2)

    def with_one(self) -> None:
        """One thread."""
        np.copyto(self.b, self.a)

    def with_two(self) -> None:
        """Two threads, a half each."""
        half = len(self.a) // 2
        list(self.pool.map(lambda s: np.copyto(self.b[s], self.a[s]), (slice(half), slice(half, None))))

    def with_native(self) -> None:
        """The native engine on pages of 1 MiB, in order."""
        if self.native is not None:
            self.native.submit(self.surfaces[0], self.pages, self.surfaces[1], self.pages)


def timed(copy: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call."""

    def once() -> float:
        start = time.perf_counter()
        copy()
        return time.perf_counter() - start

    return once


def measure(cell: Cell, plain: Plain, native: HostEngine | None) -> list[Row]:
    """All ways of one cell, a plain copy of as many bytes among them."""
    ways: dict[str, Callable[[], object]] = {"memcpy-1": plain.with_one, "memcpy-2": plain.with_two}
    if native is not None:
        ways |= {"memcpy-2n": plain.with_native, "native": lambda: cell.with_engine(native)}
    ways |= {"numpy": lambda: cell.with_engine(NumpyEngine()), "page-loop": cell.with_page_loop}
    if torch is not None:
        ways["torch-index"] = cell.with_torch()
    clocked = {name: timed(copy) for name, copy in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for rounds, behind in STAGES:
        for name, seconds in interleaved(rounds, clocked).items():
            best[name] = min(best[name], *seconds)
        limit = behind * best.get("native", max(best.values()))
        clocked = {n: once for n, once in clocked.items() if best[n] <= limit or n.startswith("memcpy")}
    speed = {name: cell.nbytes / seconds / 1e9 for name, seconds in best.items()}
    two = max(speed["memcpy-2"], speed.pop("memcpy-2n", 0.0))
    order = [name for name in ("native", "numpy", "torch-index", "page-loop") if name in speed]
    note = f"memcpy-1; {{:.2f}} of memcpy-2; runs of {cell.run_nbytes} B"
    rows = [
        Row(f"{name}/{cell.name}", speed[name], "GB/s", speed["memcpy-1"], note.format(speed[name] / two))
        for name in order
    ]
    return [*rows, Row(f"memcpy-2/{cell.name}", two, "GB/s", speed["memcpy-1"], "memcpy-1")]


def verdict(cell: Cell, rows: list[Row]) -> Iterator[str]:
    """What of the targets a cell misses."""
    by_way = {row.name.split("/")[0]: row for row in rows}
    native = by_way.get("native")
    if native is None:
        return
    wanted = 1.0 if cell.run_nbytes >= LONG_RUN else 0.8
    if native.ratio < wanted:
        yield f"{native.name}: {native.ratio:.2f} of a copy by one thread, wanted {wanted}"
    for way in ("numpy", "torch-index", "page-loop"):
        if way in by_way and by_way[way].value > native.value:
            yield f"{native.name}: slower than {way} ({native.value:.1f} against {by_way[way].value:.1f} GB/s)"


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--shapes", default="smollm2,llama_8b,mla", help="comma-separated; default: %(default)s"
    )
    options = parser.parse_args()
    reason = HostEngine.available()
    native = HostEngine() if reason is None else None
    print(f"load average at start {os.getloadavg()[0]:.2f}; native engine: {reason or 'there'}", flush=True)
    rows: list[Row] = []
    missed: list[str] = []
    for shape in options.shapes.split(","):
        for tokens in (QUICK_TOKENS[shape],) if options.quick else FULL_TOKENS:
            plain = Plain(tokens * group_of(shape, 1).nbytes, native)
            for page in (16,) if options.quick else (1, 16, 64):
                for cell in cells(shape, page, tokens):
                    got = measure(cell, plain, native)
                    rows += got
                    missed += verdict(cell, got)
    report("Transfer between engine and host pool", rows, options.json)
    for line in missed:
        Console(soft_wrap=True, highlight=False).print(f"missed: {line}")


if __name__ == "__main__":
    main()
