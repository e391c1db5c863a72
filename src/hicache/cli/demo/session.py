"""One process's side of the demo: a model with its cache, turns of conversations, and the figures of each tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hicache.adapters.transformers import Result, attach
from hicache.adapters.transformers.probe import forward, probe
from hicache.adapters.transformers.rows import joined_cache
from hicache.build import DEVICE_LAYOUT
from hicache.cli.demo.engine import Engine, Tell
from hicache.cli.demo.plan import DECIMALS, PAGE_TOKENS, Figure, Plan, Turn
from hicache.cli.demo.watch import WHERE, Watch
from hicache.data.pool import nbytes_for
from hicache.data.store.record import HEADER_NBYTES
from hicache.errors import UnavailableError
from hicache.layout import LAYOUTS
from hicache.records import Where
from hicache.settings import Settings, load
from hicache.testing.replay import Recorder

SETTLE_S = 120.0
"""How long a demo waits for pages on their way down: a slow disk is no failure."""

LAYOUT = "page_first"
"""Of the host tier: named, because the tiers' sizes are computed from it."""

DEVICE_SHARE, HOST_SHARE = 1.2, 1.5
"""Tiers in conversations: more than one fits, two do not, so the other's end is always further down."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages of each memory tier; bytes of all three."""

    device_pages: int
    host_pages: int
    device: int
    host: int
    storage: int

    @classmethod
    def of(cls, engine: Engine, plan: Plan, prompts: Sequence[Sequence[int]], figure: int) -> Sizes:
        """Sizes for these conversations, from the bytes that a page of this model really has."""
        spec = probe(engine.model).spec(PAGE_TOKENS)
        growth = (plan.turns + 1) * (plan.new_tokens + 40)
        longest = -(-(max(map(len, prompts)) + growth) // PAGE_TOKENS)
        figure_pages = -(-figure // PAGE_TOKENS) + 1
        device = max(int(DEVICE_SHARE * longest), figure_pages)
        host = max(int(HOST_SHARE * longest), figure_pages + 1)
        record = nbytes_for(spec, LAYOUTS[LAYOUT], 1) + HEADER_NBYTES
        return cls(
            device,
            host,
            nbytes_for(spec, DEVICE_LAYOUT, device),
            nbytes_for(spec, LAYOUTS[LAYOUT], host),
            2 * record * (len(prompts) * longest + figure_pages),
        )

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Device, host, storage."""
        return self.device, self.host, self.storage


def settings_for(store: Path, sizes: tuple[int, int, int]) -> Settings:
    """The demo's settings come from here alone: the user's file and environment are about another cache."""
    return load(
        environ={},
        page_tokens=PAGE_TOKENS,
        layout=LAYOUT,
        into_host="through",
        into_store="through",
        device={"bytes": sizes[0]},
        host={"bytes": sizes[1]},
        store={"type": "segment", "path": str(store), "cap": sizes[2]},
        deadlines={"lookup_s": 10.0, "fetch_s": SETTLE_S, "write_s": SETTLE_S, "close_s": SETTLE_S},
    )


class Session:
    """A model with a cache that is watched. A context manager; after an error or Ctrl-C it closes within a second."""

    def __init__(
        self, engine: Engine, plan: Plan, settings: Settings, recorder: Recorder, tell: Tell
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.recorder = recorder
        self.watch = Watch(recorder, plan.inject)
        tell("attaching the cache: preparing its memory, and reading the weights to know them again")
        self.cached = attach(engine.model, settings, witness=self.watch)
        controller = self.cached.cache.controller
        self.watch.loaded = lambda: controller.stats.loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.cached.close(None if kind is None else 1.0)

    @property
    def errors(self) -> dict[str, int]:
        """Errors that the cache turned into recomputation."""
        return dict(self.cached.errors)

    # ---- the two ways to a first token

    def with_cache(self, ids: Sequence[int], new_tokens: int) -> tuple[Result, float, int]:
        """Generate with the cache; the result, seconds to the first token less checking, and wrong pages."""
        wrong = len(self.recorder.wrong)
        result = self.cached.generate(list(ids), new_tokens, eos=self.engine.speech.eos)
        self.settle()
        return result, result.ttft_s - self.watch.seconds, len(self.recorder.wrong) - wrong

    def without(self, ids: Sequence[int]) -> float:
        """Seconds to the first token of one plain forward call over the whole prompt, without HiCache."""
        cache = joined_cache(self.engine.model, [])
        began = time.perf_counter()
        forward(self.engine.model, ids, cache)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until every page has arrived where it is going: the next step must not depend on this disk's speed."""
        cache = self.cached.cache
        cache.run_until(lambda: cache.controller.idle, SETTLE_S)
        if not cache.controller.idle:
            raise UnavailableError("pages are still on their way down", after_s=SETTLE_S)

    def evict(self, where: Where) -> None:
        """Empty a memory tier; what it held is in those below."""
        cache = self.cached.cache
        with cache.lock:
            cache.controller.evict(where, cache.controller.pools()[where]["ready"])
        self.settle()

    # ---- what the demo shows

    def turn(self, name: str, question: str, ids: Sequence[int], tell: Tell, *, restarted: bool) -> Turn:
        """One turn with the cache, then the same prompt without."""
        tell(f"turn {name}: {len(ids):,} tokens with the cache")
        before = self.recorder.restored_pages
        result, seconds, wrong = self.with_cache(ids, self.plan.new_tokens)
        tell(f"turn {name}: the same without it")
        without = self.without(ids)
        return Turn(
            name=name,
            restarted=restarted,
            question=question,
            answer=self.engine.speech.decode(result.tokens),
            tokens=result.tokens,
            prompt_tokens=result.prompt_tokens,
            device=result.sources["device"],
            host=result.sources["host"],
            storage=result.sources["store"],
            computed=result.sources["computed"],
            seconds_with=round(seconds, DECIMALS),
            seconds_without=round(without, DECIMALS),
            load_bytes=result.load_bytes,
            save_bytes=result.save_bytes,
            restored_pages=self.recorder.restored_pages - before,
            wrong_pages=wrong,
            run=len(self.recorder.programs) - 1,
        )

    def figures(self, ids: Sequence[int], tell: Tell, *, restarted: bool) -> list[Figure]:
        """Seconds to the first token from each source, best of the plan's repetitions, all sources in each round."""
        sources = ("storage",) if restarted else ("device", "host", "storage")
        wanted = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
        found = [self._empty(source, len(ids), wanted, restarted) for source in ("computed", *sources)]
        if not restarted:
            tell(f"a prompt of {len(ids):,} tokens: filling the cache")
            self.with_cache(ids, 1)
        for number in range(self.plan.repeats):
            turn = f"a prompt of {len(ids):,} tokens, round {number + 1} of {self.plan.repeats}"
            for figure in found:
                tell(f"{turn}: {figure.label}")
                if figure.source == "computed":
                    figure.seconds.append(round(self.without(ids), DECIMALS))
                else:
                    self._measure(figure, ids)
        return found

    def _empty(self, source: str, prompt: int, wanted: int, restarted: bool) -> Figure:  # noqa: FBT001
        return Figure(
            source=source,
            restarted=restarted,
            prompt_tokens=prompt,
            wanted=0 if source == "computed" else wanted,
            hit_tokens=0 if source == "computed" else wanted,
            seconds=[],
            wrong_pages=0,
            tokens=[],
            runs=[],
        )

    def _measure(self, figure: Figure, ids: Sequence[int]) -> None:
        above: Callable[[Where], bool] = lambda where: where < WHERE[figure.source]  # noqa: E731
        for where in filter(above, (Where.DEVICE, Where.HOST)):
            self.evict(where)
        result, seconds, wrong = self.with_cache(ids, 1)
        name = "store" if figure.source == "storage" else figure.source
        figure.hit_tokens = min(figure.hit_tokens, result.sources[name])
        figure.seconds.append(round(seconds, DECIMALS))
        figure.wrong_pages += wrong
        figure.tokens += result.tokens
        figure.runs.append(len(self.recorder.programs) - 1)
