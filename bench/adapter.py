"""What the Transformers adapter costs a prompt that nobody has seen: nothing is loaded, everything is saved.

SmolLM2-135M in float32, one new token, a host tier. Each round computes two fresh prompts of equal length, one by the
model's own `generate` and one through the attached cache, in turns that change places each round; the cached one is
timed until its pages are saved. `cpu/<tokens>` is CPU time in per cent of the wall time of the quickest prefill:
`cpu_adapter` of the caller's thread in `generate`, less the model's own; `cpu_lanes` of every thread that came with the
cache, helpers of the copy engine included. `ab/<tokens>` is the wall time with the cache over that without, the median of the
pairs, with the ends of its 95 % interval (bootstrap, seeded). Torch computes with as many threads as it likes.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would be measured, not the work
sys.path.insert(0, str(Path(__file__).parent))
import torch
import transformers
from common import Row, arguments, middle, report

from hicache.adapters.transformers import TransformersCache, attach
from hicache.settings import load
from hicache.testing.model import smollm2_dir

SEED = 4
RESAMPLES = 2000


class Own:
    """The model's own ``generate``, and how much CPU time the calling thread spends in it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, on the clock."""
        start = time.thread_time()
        try:
            return type(self.model).generate(self.model, *args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start


def threads() -> dict[str, int]:
    """CPU time of each thread of this process, in nanoseconds."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has ended since
            continue
    return found


class Bench:
    """A model with a cache, and prompts nobody has seen."""

    def __init__(self, tokens: int, rounds: int) -> None:
        self.tokens = tokens
        self.rounds = rounds
        self.rng = random.Random(SEED + tokens)
        folder = smollm2_dir("float32", progress=lambda line: print(line, file=sys.stderr))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.own = Own(self.model)
        self.adapter: list[float] = []
        self.lanes: list[float] = []
        self.ratios: list[float] = []
        self.plain: list[float] = []

    def prompt(self) -> dict[str, Any]:
        """Arguments of a call."""
        ids = torch.tensor([self.rng.choices(range(100, 40_000), k=self.tokens)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}

    def without(self) -> float:
        """Seconds of a call without the cache."""
        asked = self.prompt()
        start = time.perf_counter()
        type(self.model).generate(self.model, **asked)
        return time.perf_counter() - start

    def with_cache(self, cached: TransformersCache, others: set[str]) -> float:
        """Seconds of a call through the cache until all is saved; notes the CPU seconds of adapter and lanes."""
        asked, before, self.own.seconds = self.prompt(), threads(), 0.0
        start, mine = time.perf_counter(), time.thread_time()
        self.model.generate(**asked)
        cached.cache.run_until(lambda: cached.cache.controller.idle, 60.0)
        mine = time.thread_time() - mine - self.own.seconds
        seconds = time.perf_counter() - start
        spent = {task: now - before.get(task, 0) for task, now in threads().items() if task not in others}
        if cached.last is None or cached.last.hit_tokens or cached.errors:
            raise SystemExit(f"this was no miss: {cached.last} {cached.errors} {cached.uncacheable}")
        self.adapter.append(mine)
        self.lanes.append(sum(spent.values()) / 1e9)
        return seconds

    def run(self) -> list[Row]:
        """All rounds."""
        self.without()
        others = set(threads())
        self.model.generate = self.own
        size = {"bytes": 4 * self.tokens * 46_080 + (1 << 20)}
        with attach(self.model, load(environ={}, host=size)) as cached:
            self.with_cache(cached, others)
            for number in range(self.rounds):
                gc.collect()
                if number % 2:
                    through = self.with_cache(cached, others)
                    plain = self.without()
                else:
                    plain = self.without()
                    through = self.with_cache(cached, others)
                self.plain.append(plain)
                self.ratios.append(through / plain)
        return self.rows()

    def kinds(self) -> list[tuple[str, list[float]]]:
        """CPU seconds of each round, but for the first call's."""
        return [("adapter", self.adapter[1:]), ("lanes", self.lanes[1:])]

    def rows(self) -> list[Row]:
        """What came out."""
        prefill, name = min(self.plain), f"t{self.tokens}"
        low, high = interval(self.ratios)
        share = {kind: middle(found) / prefill * 100 for kind, found in self.kinds()}
        return [
            Row(f"adapter/cpu/{name}", sum(share.values()), "%", 1.0, "target: at most"),
            *(
                Row(f"adapter/cpu_{kind}/{name}", value, "%", 1.0, "part of it")
                for kind, value in share.items()
            ),
            Row(
                f"adapter/cpu_ms/{name}", sum(share.values()) * prefill * 10, "ms", prefill * 1e3, "a prefill"
            ),
            Row(f"adapter/prefill/{name}", prefill, "s", middle(self.plain), "the median prefill"),
            Row(f"adapter/ab/{name}", middle(self.ratios), "x", 1.0, "without the cache"),
            Row(f"adapter/ab_low/{name}", low, "x", 1.0, "target: not above"),
            Row(f"adapter/ab_high/{name}", high, "x", 1.0, "target: not below"),
        ]


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median ratio."""
    logs, rng = [math.log(ratio) for ratio in ratios], random.Random(SEED)
    medians = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(medians[round(0.025 * RESAMPLES)]), math.exp(medians[round(0.975 * RESAMPLES) - 1])


def main() -> None:
    """Run the bench."""
    args = arguments(__doc__ or "").parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows: list[Row] = []
    for tokens, rounds in [(500, 12)] if args.quick else [(500, 40), (2000, 20)]:
        rows += Bench(tokens, rounds).run()
    report(f"misses under Transformers, {torch.get_num_threads()} threads, seed {SEED}", rows, args.json)


if __name__ == "__main__":
    main()
