"""A workload over tiny tiers, what may be said of it afterwards, and ways to spoil what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hicache.adapters.transformers import Result, TransformersCache
from hicache.build import Cache
from hicache.data.store.base import Hit
from hicache.errors import InvariantError
from hicache.records import Where
from hicache.settings import Settings, load
from hicache.testing.replay import Recorder, Replay

PAGE = 4
SLOT = 4096  # a page of the tiny model is 2048 bytes, padded to this in the page-major layouts
NEW = 4

A = [11, 7, 401, 93, 5, 5, 5, 250, 77, 31, 8, 120, 66, 43]
B = [300 + 3 * i for i in range(14)]
A_FORK = [*A[:9], 499, 2, 88, 17]
WHOLE = A[:12]  # whole pages only
SHORT = [9, 8]  # less than a page
LOADABLE = (len(A) - 1) // PAGE * PAGE

FIRST = (A, A, A, B, B, B, A_FORK, SHORT, WHOLE, B, A)
AGAIN = (A, B, A_FORK, A)


def settings(
    *, device: int = 0, host: int = 0, store: Path | None = None, layout: str = "page_first", **more: object
) -> Settings:
    """Settings with tiers of so many pages, from nowhere but here."""
    size = SLOT if layout in ("page_first", "page_first_direct", "page_head") else SLOT // 2
    return load(
        environ={},
        page_tokens=PAGE,
        layout=layout,
        device={"bytes": device * SLOT // 2} if device else None,
        host={"bytes": host * size} if host else None,
        store={"type": "segment", "path": str(store), "cap": "4MiB"} if store else None,
        **{"load_when": "always", **more},  # a tiny model is soon faster than a busy disk
    )


def settle(cached: TransformersCache) -> None:
    """Let everything that is under way end, so that what the next call finds does not depend on the machine."""
    cache = cached.cache
    cache.run_until(lambda: cache.controller.idle, 20.0)
    assert cache.controller.idle


def work(
    cached: TransformersCache, prompts: Sequence[Sequence[int]], *, settled: bool = True
) -> list[Result]:
    """Generate for each prompt; what every single result must satisfy is checked here."""
    results = []
    for prompt in prompts:
        result = cached.generate(list(prompt), NEW)
        assert len(result.tokens) == NEW
        assert sum(result.sources.values()) == result.prompt_tokens == len(prompt)
        assert sum(result.reasons.values()) == result.sources["computed"] >= 1
        assert all(tokens > 0 for tokens in result.reasons.values())
        assert result.calls[0][0] == result.hit_tokens
        assert (result.load_bytes > 0) == (result.hit_tokens > 0)
        assert 0 <= result.load_s <= result.ttft_s
        results.append(result)
        if settled:
            settle(cached)
        cached.cache.controller.check()
    assert not cached.errors
    return results


def complaints(model: object, recorder: Recorder, said: Sequence[Sequence[int]] | None = None) -> list[str]:
    """Everything that speaks against what was recorded: bytes that came back wrong, tokens that the replay denies."""
    found = [f"bytes of page {wrong.page} of run {wrong.run}" for wrong in recorder.wrong]
    again = Replay(model, recorder)
    for run, program in enumerate(recorder.programs):
        tokens = list(said[run]) if said is not None else program.tokens
        try:
            if again.tokens(run) != tokens:
                found.append(f"tokens of run {run}")
        except InvariantError as error:
            found.append(f"program of run {run}: {error}")
    return found


class Spoiled:
    """A copy engine that copies, and then spoils what a load from one pool has put into the rows."""

    name = "spoiled"

    def __init__(self, cache: Cache, where: Where, spoil: object) -> None:
        self._inner = cache.data.engine
        self._pool = cache.data.pools[where]
        self._pools = [pool.surface(0) for pool in cache.data.pools.values()]
        self._spoil = spoil
        self.spoiled = 0

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        ticket = self._inner.submit(source, source_slots, target, target_slots, layers=layers)
        load = source is self._pool.surface(0) and not any(target is pool for pool in self._pools)
        if load and len(target_slots):
            ticket.wait()
            self.spoiled += len(target_slots)
            self._spoil(target, list(target_slots))
        return ticket


def zeros(target, slots) -> None:
    """Nothing but zeros came back."""
    for plane in target.views:
        for layer in plane:
            layer[slots] = 0


def swap_k_and_v(target, slots) -> None:
    """K came back as V and V as K."""
    for k, v in zip(*target.views, strict=True):
        k[slots], v[slots] = v[slots].copy(), k[slots].copy()


def skip_first(target, slots) -> None:
    """The first page of the load was left as it was: here, as rows that nobody has written."""
    zeros(target, slots[:1])


def spoil_loads(cached: TransformersCache, where: Where, spoil: object) -> Spoiled:
    """Spoil what loads from one tier bring."""
    engine = Spoiled(cached.cache, where, spoil)
    object.__setattr__(cached.cache.data, "engine", engine)
    return engine


def zero_reads(cached: TransformersCache) -> list[int]:
    """Zero every payload that the store has read and verified; returns a list that grows by one a record."""
    store, read, count = cached.cache.data.store, cached.cache.data.store.read, []

    def spoiled(namespace, keys, into):
        outcomes = read(namespace, keys, into)
        for outcome, views in zip(outcomes, into, strict=True):
            if isinstance(outcome, Hit):
                count.append(1)
                for view in views:
                    view[:] = bytes(len(view))
        return outcomes

    store.read = spoiled
    return count
