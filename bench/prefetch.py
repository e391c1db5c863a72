"""How fast pages come from storage into an engine's memory, and what the control plane adds to a request for it.

`prefetch/store_host_device` is the chain that a hit in the store takes, against the slower of its two legs alone:
the fetch from the store into the host tier, and the load from there. `prefetch/control` is the CPU time, in
microseconds a request, of everything the control plane does for one such request, against the same for a hit in host
memory. A real segment store on a real file system, the worker's lanes and the native copy engine; rounds interleaved,
medians.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, arguments, interleaved, middle, report

from hicache.build import Cache, build
from hicache.control.request import Request
from hicache.data.copy.base import Surface
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.keys import Namespace, PageKey, page_keys
from hicache.layout import LAYOUTS
from hicache.records import Loaded, Where
from hicache.settings import load
from hicache.spec import CacheSpec, Group, Plane

PAGE_TOKENS = 16
SHAPES = {
    "smollm2": (Plane("k", 30, PAGE_TOKENS, 3, 128), Plane("v", 30, PAGE_TOKENS, 3, 128)),
    "llama_8b": (Plane("k", 32, PAGE_TOKENS, 8, 256), Plane("v", 32, PAGE_TOKENS, 8, 256)),
}
WAIT_S = 120.0


class Rig:
    """A cache with a store, an engine of one prompt's pages, and that prompt in the store."""

    def __init__(self, shape: str, pages: int, folder: str, fetch_at: str) -> None:
        self.pages = pages
        spec = CacheSpec((Group("kv", SHAPES[shape]),), PAGE_TOKENS)
        self.nbytes = pages * spec.page_nbytes
        self.rows = Pool(spec, LAYOUTS["layer_first"], pages, CpuPlatform(), Where.DEVICE)
        settings = load(
            environ={},
            page_tokens=PAGE_TOKENS,
            fetch_at=fetch_at,
            host={"bytes": 2 * self.nbytes + (64 << 20)},
            store={"type": "segment", "path": f"{folder}/{fetch_at}", "cap": 3 * self.nbytes + (256 << 20)},
            deadlines={"lookup_s": WAIT_S, "fetch_s": WAIT_S, "write_s": WAIT_S},
        )
        space = Namespace.of({"bench": "prefetch"})
        self.cache: Cache = build(settings, spec, space, self)
        self.keys: list[PageKey] = page_keys(space.root, range(pages * PAGE_TOKENS), PAGE_TOKENS)
        self.number = 0
        first = self.cache.open("first", self.keys)
        first.publish(pages, range(pages))
        first.close()
        if self.cache.flush(WAIT_S):
            raise SystemExit("the store does not take the prompt")

    def surface(self, handle: int | None, group: int) -> Surface:
        """The engine's pages."""
        return self.rows.surface(group)

    def forget(self) -> None:
        """Nothing is left in host memory."""
        self.cache.controller.evict(Where.HOST, 2 * self.pages)

    def serve(self) -> float:
        """Seconds from open to the last page in the engine's memory."""
        began = time.monotonic()
        request = self._open()
        loaded = request.load(request.match(), range(self.pages))
        heard: list[Loaded] = []

        def done() -> bool:
            heard.extend(e for e in self.cache.events(request) if isinstance(e, Loaded))
            return bool(heard)

        self.cache.run_until(done, WAIT_S)
        seconds = time.monotonic() - began
        if loaded.pages != self.pages or heard[0].good != self.pages:
            raise SystemExit(f"only {heard} of {self.pages} pages came: {loaded}")
        self._close(request)
        return seconds

    def fetch(self) -> float:
        """Seconds from open to the last page in host memory."""
        began = time.monotonic()
        request = self._open()
        self.cache.run_until(lambda: request.match().ready == self.pages, WAIT_S)
        seconds = time.monotonic() - began
        self._close(request)
        return seconds

    def _open(self) -> Request:
        self.number += 1
        request = self.cache.open(self.number, self.keys)
        self.cache.run_until(lambda: not request.match().pending, WAIT_S)
        return request

    def _close(self, request: Request) -> None:
        request.close()
        self.cache.run_until(lambda: self.cache.controller.idle, WAIT_S)
        self.cache.forget(request)


def control_us(rig: Rig, *, cold: bool) -> float:
    """CPU microseconds of this thread in the control plane for one request."""
    if cold:
        rig.forget()
    spent = time.thread_time()
    rig.serve()
    return (time.thread_time() - spent) * 1e6


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__ or "").parse_args()
    shape, pages, rounds = ("smollm2", 128, 5) if options.quick else ("llama_8b", 256, 11)
    folder = tempfile.mkdtemp(prefix="hicache-bench-", dir=".")
    try:
        at_load, at_lookup = Rig(shape, pages, folder, "load"), Rig(shape, pages, folder, "lookup")

        def chain() -> float:
            at_load.forget()
            return at_load.serve()

        def fetch() -> float:
            at_lookup.forget()
            return at_lookup.fetch()

        seconds = interleaved(rounds, {"chain": chain, "fetch": fetch, "load": at_load.serve})
        cpu = interleaved(
            rounds,
            {
                "store": lambda: control_us(at_load, cold=True),
                "host": lambda: control_us(at_load, cold=False),
            },
        )
        speed = {name: at_load.nbytes / middle(values) / 1e9 for name, values in seconds.items()}
        slower = min(speed["fetch"], speed["load"])
        rows = [
            Row("prefetch/store_host_device", speed["chain"], "GB/s", slower, "the slower leg alone"),
            Row("prefetch/store_host", speed["fetch"], "GB/s", speed["load"], "host -> device alone"),
            Row(
                "prefetch/control",
                middle(cpu["store"]),
                "us/request",
                middle(cpu["host"]),
                "a hit in host memory",
            ),
        ]
        report(
            f"store -> host -> engine, {shape}, {pages} pages, {at_load.nbytes >> 20} MiB", rows, options.json
        )
        for rig in (at_load, at_lookup):
            rig.cache.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
