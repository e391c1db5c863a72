"""Load or compute: what both would take, learned from what both have taken, and the decision.

A fetch is a line, ``seconds = fixed + each * pages``, fitted by least squares to the fetches seen, where each new one
makes the older ones count a tenth less. Computing is a speed by length, as attention makes long prompts slower and a
short one does not fill the processor: one decaying mean of seconds a page for each power of two. What has not been
seen is not guessed: without an estimate of both, pages are loaded.

What is not loaded is not measured either, so a store that was slow once would stay unused. Every ``PROBE_S`` seconds
a few pages are fetched that nobody waits for, one and eight in turn, which is enough for a line, and what was seen
before counts for little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEEP = 0.9
"""How much of its weight an observation keeps when the next one comes."""
STALE = 0.25
"""And how much when nothing has come for so long that a probe is sent."""
FELT_S = 0.05
"""What nobody feels, and what a busy machine adds to either side: no reason to leave a hit."""
PROBE_S = 10.0
PROBE_PAGES = (1, 8)


@dataclass(slots=True)
class Line:
    """Seconds by pages: decaying sums of weight, pages, seconds and their products."""

    weight: float = 0.0
    pages: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def see(self, pages: float, seconds: float) -> None:
        """One more observation."""
        self.fade(KEEP)
        self.weight += 1.0
        self.pages += pages
        self.seconds += seconds
        self.squares += pages * pages
        self.products += pages * seconds

    def fade(self, keep: float) -> None:
        """What was seen counts less from now on."""
        self.weight *= keep
        self.pages *= keep
        self.seconds *= keep
        self.squares *= keep
        self.products *= keep

    def fit(self) -> tuple[float, float] | None:
        """(fixed, each) in seconds, neither negative; None before the first observation."""
        if not self.weight:
            return None
        mean_pages, mean_seconds = self.pages / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean_pages * mean_pages
        if spread <= 1e-9 * mean_pages * mean_pages:  # all of one size: nothing tells the two apart
            return 0.0, mean_seconds / mean_pages
        each = (self.products / self.weight - mean_pages * mean_seconds) / spread
        fixed = mean_seconds - each * mean_pages
        if each < 0.0:
            return mean_seconds, 0.0
        return (fixed, each) if fixed >= 0.0 else (0.0, mean_seconds / mean_pages)


@dataclass(slots=True)
class Speed:
    """Seconds a page by length, a decaying mean for each power of two of pages."""

    means: dict[int, float] = field(default_factory=dict)

    def see(self, pages: float, seconds: float) -> None:
        """One more observation."""
        size, each = int(pages).bit_length(), seconds / pages
        self.means[size] = KEEP * self.means.get(size, each) + (1.0 - KEEP) * each

    def at(self, pages: int) -> float | None:
        """Seconds for so many pages, at the speed of the nearest length that was seen; the longer one of two."""
        if not self.means:
            return None
        size = pages.bit_length()
        nearest = min(self.means, key=lambda seen: (abs(seen - size), -seen))
        return self.means[nearest] * pages


@dataclass(slots=True)
class Worth:
    """What fetching from the store and computing take, and which of them is faster."""

    fetch: Line = field(default_factory=Line)
    compute: Speed = field(default_factory=Speed)
    seen: float = float("-inf")  # when the last fetch was heard of, or a probe sent
    probes: int = 0

    def fetched(self, pages: int, seconds: float, now: float) -> None:
        """A fetch of so many pages took so long."""
        self.fetch.see(pages, max(seconds, 0.0))
        self.seen = now

    def computed(self, pages: float, seconds: float) -> None:
        """The engine computed so many pages (or a part of one) in so long."""
        if pages > 0.0 and seconds > 0.0:
            self.compute.see(pages, seconds)

    def loading(self, pages: int) -> bool:
        """False when so many pages are computed sooner than they come from the store, by more than ``FELT_S``."""
        line, compute = self.fetch.fit(), self.compute.at(pages)
        return line is None or compute is None or line[0] + line[1] * pages <= compute + FELT_S

    def probe(self, now: float) -> int:
        """How many pages to fetch only to learn; 0 as long as what is known is fresh."""
        if now - self.seen < PROBE_S:
            return 0
        self.seen = now
        self.probes += 1
        self.fetch.fade(STALE)
        return PROBE_PAGES[self.probes % len(PROBE_PAGES)]

    def estimates(self) -> dict[str, float]:
        """Seconds, for the metrics: of a fetch's fixed part and each page, and of computing a page by length."""
        fixed, each = self.fetch.fit() or (0.0, 0.0)
        rows = {"fetch": fixed, "fetch_page": each} if self.fetch.weight else {}
        return rows | {
            f"compute_page_of_{1 << max(0, size - 1)}": mean for size, mean in self.compute.means.items()
        }
