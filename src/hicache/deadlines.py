"""How long each step may take before the engine goes on without it."""

from __future__ import annotations

import math

from hicache.errors import ConfigError
from hicache.tables import Table

SECONDS_MAX = 86_400.0
FETCH_MAX_S = 30.0


class Deadlines(Table, frozen=True, kw_only=True):
    """Seconds after which a step is given up; a prompt is computed instead, so the engine never waits longer.

    fetch_s: of a fetch from the store, with fetch_1024_s more for every 1,024 tokens, up to fetch_max_s in all (30, or
    fetch_s where that is more). prefetch_s: how long a prefetch may wait for its turn. close_s: how long closing may wait for pages that are
    still on their way down.
    """

    lookup_s: float = 1.0
    prefetch_s: float = 10.0
    fetch_s: float = 2.0
    fetch_1024_s: float = 0.1
    fetch_max_s: float | None = None
    write_s: float = 60.0
    close_s: float = 30.0

    def check(self) -> None:
        """All are seconds, and no fetch has more than the most."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None or (name == "fetch_1024_s" and value == 0):
                continue
            if not math.isfinite(value) or not 0 < value <= SECONDS_MAX:
                expected = f"seconds, more than 0 and at most {SECONDS_MAX:.0f}"
                raise ConfigError("not a time limit", key=name, value=value, expected=expected)
        if self.fetch_most_s < self.fetch_s:
            raise ConfigError(
                "the most that a fetch may take is less than what every fetch may",
                key="fetch_max_s",
                value=self.fetch_max_s,
                fetch_s=self.fetch_s,
                nearest=self.fetch_s,
            )

    def fetch_limit(self, tokens: int) -> float:
        """Seconds after which a fetch of so many tokens is given up."""
        return min(self.fetch_s + self.fetch_1024_s * tokens / 1024, self.fetch_most_s)

    @property
    def fetch_most_s(self) -> float:
        """Seconds that no fetch may take longer."""
        return max(FETCH_MAX_S, self.fetch_s) if self.fetch_max_s is None else self.fetch_max_s
