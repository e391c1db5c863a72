"""Seconds to the first token over the length of the prompt, with a cache that has seen it and without; and the plot.

SmolLM2-135M in float32, host tier. `ttft/<tokens>` is a `generate` call of one new token whose prompt is in the cache,
its baseline the same call without one, interleaved, medians. `--png FILE` draws both lines (needs matplotlib).
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))
import torch
import transformers
from common import Row, arguments, interleaved, middle, report

import hicache
from hicache.testing.model import smollm2_dir

TOKENS = (125, 250, 500, 1000, 2000, 4000)


def measure(model: Any, tokens: int, rounds: int) -> Row:
    """Both figures for one length."""
    ids = torch.tensor([random.Random(tokens).choices(range(100, 40_000), k=tokens)])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}

    def timed(generate: Any) -> float:
        start = time.perf_counter()
        generate(**asked)
        return time.perf_counter() - start

    settings = hicache.load(environ={}, host={"bytes": tokens * 2 * 46_080 + (1 << 20)}, page_tokens=16)
    without = model.generate
    with hicache.attach(model, settings) as cached:
        timed(model.generate)
        found = interleaved(
            rounds, {"with": lambda: timed(model.generate), "without": lambda: timed(without)}
        )
        if cached.last is None or cached.last.hit_tokens < tokens - 16:
            raise SystemExit(f"the cache was not used: {cached.last} {cached.errors}")
    return Row(f"ttft/{tokens}", middle(found["with"]), "s", middle(found["without"]), "without the cache")


def plot(rows: list[Row], to: Path) -> None:
    """Draw the lines."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    tokens = [int(row.name.partition("/")[2]) for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(tokens, [row.baseline for row in rows], marker="o", color="#b0413e", label="computed")
    axes.plot(tokens, [row.value for row in rows], marker="o", color="#2a6f97", label="from the host tier")
    axes.set(xlabel="prompt, tokens", ylabel="seconds to the first token", ylim=(0, None), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(to, dpi=150)
    plt.close(figure)


def main() -> None:
    """Run the bench."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plot")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = smollm2_dir("float32", progress=lambda line: print(line, file=sys.stderr))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths, rounds = (TOKENS[:3], 2) if args.quick else (TOKENS, 5)
    rows = [measure(model, tokens, rounds) for tokens in lengths]
    report("time to the first token", rows, args.json)
    if args.png is not None:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
