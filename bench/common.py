"""What every bench shares: flags, interleaved rounds, the table a person reads and the rows a machine reads."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One result: ``ratio`` is value / baseline; what the baseline is stands in ``note``."""

    name: str
    value: float
    unit: str
    baseline: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times the baseline."""
        return self.value / self.baseline if self.baseline else float("nan")


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags every bench takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under 60 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    return parser


def interleaved(rounds: int, cases: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run every case once a round, in turn, so that a noisy minute hits them all; returns each case's values."""
    values: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            values[name].append(case())
    return values


def report(title: str, rows: list[Row], to: Path | None) -> None:
    """Print the table and write the rows."""
    table = Table(title=title, caption=f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    for column in ("name", "value", "unit", "baseline", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right", no_wrap=True)
    table.add_column("baseline is")
    for row in rows:
        table.add_row(
            row.name, f"{row.value:.3g}", row.unit, f"{row.baseline:.3g}", f"{row.ratio:.2f}", row.note
        )
    Console(width=None if Console().is_terminal else 140).print(table)
    if to is not None:
        keep = ("name", "value", "unit", "baseline")
        out = [{**{k: v for k, v in asdict(row).items() if k in keep}, "ratio": row.ratio} for row in rows]
        to.write_text(json.dumps(out, indent=1) + "\n")


def middle(values: list[float]) -> float:
    """The median: what a noisy machine does to one round does not move it."""
    return statistics.median(values)
