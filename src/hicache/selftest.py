"""The self-test: before the first request a few random pages travel every leg, and are compared byte for byte.

    device -> host -> store -> host -> device

It runs what requests will run (the same pools, engine and moves), on free slots; only the device's rows are its
own, and so is the memory that a store writes to, because a store may hang with it. It is bounded: at most
:data:`PAGES` pages, and :data:`NBYTES_MAX` bytes a leg where one page is not more already; a store has
:data:`STORE_S` seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.data.copy.base import Bytes, Surface
from hicache.data.moves import Answer, DataPlane, Moves, keys_of
from hicache.data.platform.base import Platform
from hicache.data.pool import Pool
from hicache.data.scratch import Scratch
from hicache.data.store.base import Delete
from hicache.keys import Namespace, PageKey, RecordKey, page_keys
from hicache.layout import LAYOUTS
from hicache.records import Job, JobKind, Span, Where
from hicache.spec import CacheSpec

PAGES = 3
NBYTES_MAX = 64 << 20
STORE_S = 20.0
POISON = 0xA5

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Failure:
    """Where bytes went wrong: ``byte`` is the first that differs, counted in the plane's own order of a page."""

    leg: str
    reason: str
    plane: str = ""
    page: int | None = None
    byte: int | None = None
    hangs: bool = False  # a call has not come back: nothing that it may touch can be closed

    def __str__(self) -> str:
        where = {"plane": self.plane or None, "page": self.page, "byte": self.byte}
        at = " ".join(f"{name}={value}" for name, value in where.items() if value is not None)
        return f"leg={self.leg} {at}: {self.reason}" if at else f"leg={self.leg}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was tried, what it cost, and what failed; ``store`` apart, because a cache works without one."""

    pages: int
    nbytes: int
    seconds: Mapping[str, float]
    failure: Failure | None = None
    store: Failure | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "pages": self.pages,
            "bytes_a_leg": self.nbytes,
            "seconds": {leg: round(s, 6) for leg, s in self.seconds.items()},
            "failure": str(self.failure) if self.failure else None,
            "store_failure": str(self.store) if self.store else None,
        }


class _FailedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Rows:
    """An engine's memory: rows of our own, laid out as engines do."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def surface(self, handle: int | None, group: int) -> Surface:
        """The pages."""
        return self.pool.surface(group)


def _views(surface: Surface) -> Iterator[tuple[int, int, Bytes]]:
    for number, plane in enumerate(surface.views):
        for layer, view in enumerate(plane):
            yield number, layer, view


def first_difference(
    spec: CacheSpec, got: Pool, wanted: Pool, slots: range, at: int
) -> tuple[str, int, int] | None:
    """(plane, page, byte) of the first byte that differs between pages ``slots`` of both; ``at``: got's first slot."""
    for number, group in enumerate(spec.groups):
        for page in slots:
            for p, plane in enumerate(group.planes):
                ours = np.stack([view[at + page] for view in got.surface(number).views[p]]).ravel()
                theirs = np.stack([view[page] for view in wanted.surface(number).views[p]]).ravel()
                differs = np.flatnonzero(ours != theirs)
                if differs.size:
                    return f"{group.name}/{plane.name}", page, int(differs[0])
    return None


@dataclass(slots=True)
class _Test:
    """One run. ``home`` holds the random pages; ``rows`` is the device, pages in its first half, results behind."""

    data: DataPlane
    pages: int
    home: Pool
    rows: Pool
    clock: Clock
    namespace: Namespace
    keys: list[PageKey]
    seconds: dict[str, float] = field(default_factory=dict)

    def leg(self, data: DataPlane, kind: JobKind, spans: tuple[Span, ...], name: str) -> None:
        """Run one Job; _FailedError names what of it is bad."""
        parents = (self.namespace.root, *self.keys[:-1]) if kind is JobKind.WRITE else ()
        job = Job(0, kind, None, spans, parents=parents, namespace=self.namespace)
        answer, moves, scratch = Answer(), Moves(data), Scratch(data.spec)
        answer.expect(job, ())
        began = self.clock()
        try:
            moves.run(job, (), answer, scratch)
        except Exception as error:
            raise _FailedError(Failure(name, f"it raised {error!r}")) from error
        finally:
            self.seconds[name] = self.clock() - began
        if answer.bad:
            key = next(key for key in keys_of(job) if key in answer.bad)
            raise _FailedError(Failure(name, answer.bad[key].value, page=self.keys.index(key)))

    def compare(self, leg: str, got: Pool, at: int) -> None:
        """_FailedError when pages of ``got`` from slot ``at`` are not what was sent."""
        found = first_difference(self.data.spec, got, self.home, range(self.pages), at)
        if found is not None:
            raise _FailedError(Failure(leg, "a byte differs", *found))

    def _span(
        self, source: Where, target: Where, sources: range | None, targets: range | None
    ) -> tuple[Span, ...]:
        return (Span(source, target, tuple(self.keys), tuple(sources or ()), tuple(targets or ())),)

    def memory(self) -> None:
        """Device to the tiers and back, each leg that a request would take."""
        data = replace(self.data, endpoint=_Rows(self.rows))
        front, back = range(self.pages), range(self.pages, 2 * self.pages)
        tiers = [where for where in (Where.DEVICE, Where.HOST) if where in data.pools]
        above = Where.ENDPOINT
        for where in tiers:
            _poison(data.pools[where], front)
            kind = JobKind.SAVE if above is Where.ENDPOINT else JobKind.DOWN
            name = f"{_name(above, tiers)} -> {where.name.lower()}"
            self.leg(data, kind, self._span(above, where, front, front), name)
            self.compare(name, data.pools[where], 0)
            above = where
        for where in tiers:
            _poison(self.rows, back)
            name = f"{where.name.lower()} -> {_name(Where.ENDPOINT, tiers)}"
            self.leg(data, JobKind.LOAD, self._span(where, Where.ENDPOINT, front, back), name)
            self.compare(name, self.rows, self.pages)

    def store(self, platform: Platform) -> Failure | None:
        """The lowest tier's pages to the store and back, in memory of their own; why not, if not."""
        lowest = Where.HOST if Where.HOST in self.data.pools else Where.DEVICE
        own = Pool(self.data.spec, self.data.pools[lowest].layout, 2 * self.pages, platform, lowest)
        data = replace(self.data, pools={lowest: own}, endpoint=_Rows(self.home))
        front, back = range(self.pages), range(self.pages, 2 * self.pages)
        outcome: list[Failure | None] = []

        def run() -> None:
            try:
                self.leg(
                    data, JobKind.SAVE, self._span(Where.ENDPOINT, lowest, front, front), "device -> staging"
                )
                self.leg(
                    data,
                    JobKind.WRITE,
                    self._span(lowest, Where.STORE, front, None),
                    f"{lowest.name.lower()} -> store",
                )
                _poison(own, back)
                name = f"store -> {lowest.name.lower()}"
                self.leg(data, JobKind.FETCH, self._span(Where.STORE, lowest, None, back), name)
                self.compare(name, own, self.pages)
                self._forget()
                outcome.append(None)
            except _FailedError as failed:
                outcome.append(failed.failure)
            except Exception as error:  # noqa: BLE001  (whatever a store does; it is off then)
                outcome.append(Failure("store", f"it raised {error!r}"))

        thread = threading.Thread(target=run, name="hicache-self-test", daemon=True)
        thread.start()
        thread.join(STORE_S)
        if thread.is_alive():
            return Failure("store", f"no answer within {STORE_S} seconds", hangs=True)
        own.close()
        return outcome[0]

    def _forget(self) -> None:
        """The pages are of no use to anybody."""
        store: object = self.data.store
        if isinstance(store, Delete):
            groups = reversed(range(len(self.data.spec.groups)))
            store.delete(
                [RecordKey(key, group, self.data.shard) for group in groups for key in reversed(self.keys)]
            )


def _name(where: Where, tiers: list[Where]) -> str:
    if where is not Where.ENDPOINT:
        return where.name.lower()
    return "engine" if Where.DEVICE in tiers else "device"


def _poison(pool: Pool, slots: range) -> None:
    for group in range(len(pool.spec.groups)):
        for _, _, view in _views(pool.surface(group)):
            view[slots.start : slots.stop] = POISON


def pages_for(spec: CacheSpec, most: int) -> int:
    """How many pages travel."""
    return max(1, min(PAGES, most, NBYTES_MAX // spec.page_nbytes))


def self_test(
    data: DataPlane, platform: Platform, clock: Clock, seed: int, *, pages: int | None = None
) -> Report:
    """Run it on a data plane that nobody uses yet; the tiers' slots that it used are zero afterwards.

    ``seed`` is another one each time: processes that share a store must not meet in the keys that follow from it.
    ``pages``: more than a test needs, for a measurement.
    """
    if pages is None:
        pages = pages_for(data.spec, min(pool.slots for pool in data.pools.values()))
    engine = LAYOUTS["layer_first"]
    home = Pool(data.spec, engine, pages, platform, Where.DEVICE)
    rows = Pool(data.spec, engine, 2 * pages, platform, Where.DEVICE)
    rng = np.random.default_rng(seed)
    for group in range(len(data.spec.groups)):
        for (_, _, view), (_, _, row) in zip(
            _views(home.surface(group)), _views(rows.surface(group)), strict=True
        ):
            view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)
            row[:pages] = view
    space = Namespace.of({"hicache": "self-test", "seed": seed})
    tokens = range(pages * data.spec.page_tokens)
    test = _Test(data, pages, home, rows, clock, space, page_keys(space.root, tokens, data.spec.page_tokens))
    failure = off = None
    try:
        test.memory()
        off = None if data.store is None else test.store(platform)
    except _FailedError as failed:
        failure = failed.failure
    for pool in data.pools.values():
        for group in range(len(data.spec.groups)):
            for _, _, view in _views(pool.surface(group)):
                view[:pages] = 0
    rows.close()
    if off is None or not off.hangs:
        home.close()
    return Report(pages, pages * data.spec.page_nbytes, test.seconds, failure, off)
