"""Time to first token when a prompt lies in a store that is fast or slow: never worse than computing it.

SmolLM2-135M in float32, a prompt that the store holds and memory does not. Rows are `ttft/<store>`: the median of the
time to first token with the cache, against the model's own without one, of the same prompt, in turns that change
places. `load/<store>` is the same with `load_when = "always"`. Stores are a memory store behind a wire: so many bytes a
second and so long a latency for each call. A few rounds before the measured ones let the cache learn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
import transformers
from common import Row, arguments, middle, report

from hicache.adapters.transformers import TransformersCache, attach
from hicache.data.store.base import Hit, Iovec, ReadOutcome
from hicache.keys import Namespace, RecordKey
from hicache.records import Where
from hicache.settings import load
from hicache.testing.model import smollm2_dir

LEARN = 2
WIRES = {
    "local": (10e9, 0.0),
    "100MBps-10ms": (100e6, 0.01),
    "20MBps-1ms": (20e6, 0.001),
    "20MBps-1s": (20e6, 1.0),
    "2MBps-1ms": (2e6, 0.001),
}
QUICK = ("local", "2MBps-1ms")


def wire(cached: TransformersCache, speed: float, latency: float) -> None:
    """Put a wire before the store's reads."""
    store: Any = cached.cache.data.store
    read = store.inner.read

    def slow(namespace: Namespace, keys: Sequence[RecordKey], into: Sequence[Iovec]) -> list[ReadOutcome]:
        found: list[ReadOutcome] = read(namespace, keys, into)
        time.sleep(latency + sum(one.nbytes for one in found if isinstance(one, Hit)) / speed)
        return found

    store.inner.read = slow


class Bench:
    """A model, and one prompt of so many tokens."""

    def __init__(self, tokens: int) -> None:
        folder = smollm2_dir("float32", progress=lambda line: print(line, file=sys.stderr))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.randint(100, 40_000, (1, tokens), generator=torch.Generator().manual_seed(6))
        self.call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}
        self.plain()

    def plain(self) -> float:
        """Seconds to the first token without a cache."""
        began = time.monotonic()
        type(self.model).generate(self.model, **self.call)
        return time.monotonic() - began

    def run(self, name: str, load_when: str, rounds: int) -> tuple[float, float, dict[str, int]]:
        """Medians with and without, and what became of the last prompt's tokens."""
        settings = load(
            environ={},
            host={"bytes": "256MiB"},
            store={"type": "memory", "cap": "512MiB"},
            load_when=load_when,
            deadlines={"fetch_s": 60.0, "lookup_s": 10.0},
        )
        with attach(self.model, settings) as cached:
            self.model.generate(**self.call)
            cached.flush(60)
            wire(cached, *WIRES[name])

            def served() -> float:
                cached.cache.controller.evict(Where.HOST, 1 << 20)
                began = time.monotonic()
                self.model.generate(**self.call)
                seconds = time.monotonic() - began
                cached.flush(60)
                return seconds

            for _ in range(LEARN):
                served()
            pairs = []
            for number in range(rounds):
                cases = [served, self.plain][:: 1 if number % 2 else -1]
                times = [case() for case in cases]
                pairs.append(times if cases[0] == served else times[::-1])
            assert cached.last is not None, "the last call was served"
            found = {**cached.last.sources, **cached.last.reasons}
        return middle([a for a, _ in pairs]), middle([b for _, b in pairs]), found


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__ or "").parse_args()
    tokens, rounds = (128, 3) if options.quick else (1024, 7)
    bench, rows = Bench(tokens), []
    for name in QUICK if options.quick else WIRES:
        for way in ("faster", "always"):
            with_cache, without, found = bench.run(name, way, rounds)
            told = ", ".join(f"{what} {count}" for what, count in found.items() if count)
            kind = "ttft" if way == "faster" else "load"
            rows.append(Row(f"{kind}/{name}", with_cache, "s", without, f"no cache; {told}"))
    report(f"a prompt of {tokens} tokens in the store", rows, options.json)


if __name__ == "__main__":
    main()
