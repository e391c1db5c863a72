"""A picture of the time to the first token by source. matplotlib is optional; without it there is no picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.demo.plan import Figure
from hicache.cli.demo.verdict import ratios
from hicache.errors import ConfigError

COMPUTED, LOADED = "#8a8f98", "#1f7a5c"


def draw(figures: Sequence[Figure], title: str, path: Path) -> bool:
    """Write the chart as PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Picture
    except ImportError:
        return False
    sooner = ratios(figures)
    picture = Picture(figsize=(8, 0.7 * len(figures) + 1.4), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    labels = [f"hit from {f.label}" if f.label in sooner else f.label for f in figures]
    colors = [LOADED if f.label in sooner else COMPUTED for f in figures]
    bars = axes.barh(labels, [f.best for f in figures], color=colors, height=0.6)
    texts = [
        f"{f.best:.2f} s" + (f"   {sooner[f.label]:.0f} times sooner" if f.label in sooner else "")
        for f in figures
    ]
    axes.bar_label(bars, texts, padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(f.best for f in figures))
    axes.set_xlabel("seconds to the first token (shorter is better)")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        picture.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ConfigError("the chart cannot be written", path=path, reason=error) from error
    return True
