"""The report of a demo: what it has found, whether that is a success, and all of it as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hicache import __version__
from hicache.cli.demo.place import Place
from hicache.cli.demo.plan import FACTOR, Figure, Plan, Turn
from hicache.cli.demo.verdict import problems, ratios, warnings


def machine_load() -> tuple[float, float, float]:
    """Processes that wanted to run, on average over 1, 5 and 15 minutes."""
    return os.getloadavg()


@dataclass(slots=True)
class Report:
    """What a demo has found so far."""

    plan: Plan
    turns: list[Turn] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    load_before: tuple[float, float, float] = field(default_factory=machine_load)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Why it fails; empty when it does not."""
        return problems(self.turns, self.figures, self.errors)

    def as_dict(self, place: Place) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "hicache": __version__,
            "passed": not self.problems,
            "problems": self.problems,
            "warnings": warnings(self.figures),
            "plan": msgspec.to_builtins(self.plan),
            "turns": msgspec.to_builtins(self.turns),
            "figures": msgspec.to_builtins(self.figures),
            "times_sooner": {label: round(ratio, 3) for label, ratio in ratios(self.figures).items()},
            "errors": self.errors,
            "machine": {
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "load_before": self.load_before,
                "load_after": machine_load(),
            },
            "store": {"path": str(place.path), "deleted": place.deleted},
            "seconds": round(self.seconds, 3),
        }

    def verdict(self) -> list[str]:
        """The last lines a person reads."""
        sooner = ", ".join(f"{label} {ratio:.0f}x" for label, ratio in ratios(self.figures).items())
        before, after = self.load_before[0], machine_load()[0]
        cores = os.cpu_count() or 1
        busy = " It was busy: seconds are longer and ratios less certain." if after > cores + 1 else ""
        return [
            *warnings(self.figures),
            f"A hit on {self.plan.figure_tokens:,} tokens gives the first token sooner (target {FACTOR:.0f}x): {sooner}.",
            f"Machine: {cores} cores, load {before:.1f} before and {after:.1f} after.{busy}",
            *([f"FAILED: {problem}" for problem in self.problems] or [self._passed()]),
        ]

    def _passed(self) -> str:
        pages = sum(turn.restored_pages for turn in self.turns)
        return (
            f"PASSED in {self.seconds:.0f} s: device, host and storage all served hits, storage also after a restart;"
            f" all {pages:,} pages that came back in {len(self.turns)} turns had the right bytes, and every answer is"
            " the same as without a cache."
        )
