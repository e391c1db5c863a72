"""A whole cache without a model: Controller, worker, pools, store, and an engine whose pages carry their own key.

For tests of what moves where: every page's bytes follow from its key, so any wrong, stale or half-copied page
shows. Jobs of chosen kinds can be held before they run, and Dones before they are applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.control import ControlConfig, Controller, Request
from hicache.data.copy.base import Bytes, CopyEngine, Surface
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.base import Store
from hicache.data.worker import Worker
from hicache.keys import Namespace, PageKey, TokenIds, page_keys
from hicache.layout import LAYOUTS
from hicache.records import Batch, Done, EndpointFree, Event, Job, JobKind, Loaded, Where
from hicache.spec import CacheSpec, Group, Plane

POISON = 0xA5
PATIENCE_S = 30.0
PAGE_TOKENS = 64
SPEC = CacheSpec(
    (Group("kv", (Plane("k", 2, PAGE_TOKENS, 1, 16), Plane("v", 2, PAGE_TOKENS, 1, 16))),), PAGE_TOKENS
)
NAMESPACE = Namespace.of({"weights": "the only ones"})


def _timeless() -> float:
    """The clock of a house, unless it has another: nothing in it waits for a time."""
    return 0.0


def content(key: PageKey, plane: int, layer: int, shape: Sequence[int]) -> Bytes:
    """What a page holds: bytes that follow from its key, another row for each plane and layer."""
    seed = hashlib.sha256(key + bytes([plane, layer])).digest()
    return np.resize(np.frombuffer(seed, np.uint8), tuple(shape))


def put(surface: Surface, slot: int, key: PageKey) -> None:
    """Write the bytes of ``key`` into a page."""
    for p, plane in enumerate(surface.views):
        for layer, view in enumerate(plane):
            view[slot] = content(key, p, layer, view.shape[1:])


def holds(surface: Surface, slot: int, key: PageKey) -> bool:
    """True when a page has exactly the bytes of ``key``."""
    return all(
        np.array_equal(view[slot], content(key, p, layer, view.shape[1:]))
        for p, plane in enumerate(surface.views)
        for layer, view in enumerate(plane)
    )


def fill(surface: Surface, slot: int, value: int) -> None:
    """Set every byte of a page."""
    for plane in surface.views:
        for view in plane:
            view[slot] = value


@dataclass
class Served:
    """What became of one request: pages loaded (right to the last byte), by tier, pages computed, the request."""

    loaded: int
    by_tier: dict[Where, int]
    computed: int
    request: Request
    events: list[Event] = field(default_factory=list)


class House:
    """One cache and its engine.

    config: a ControlConfig's arguments. endpoint: pages the engine has. attached: False = the control plane does
    not know of the store until ``controller.attach_store()``.
    """

    clock: Callable[[], float] = staticmethod(_timeless)

    def __init__(
        self,
        *,
        store: Store | None = None,
        attached: bool = True,
        engine: CopyEngine | None = None,
        layout: str = "page_first",
        endpoint: int = 64,
        spec: CacheSpec = SPEC,
        **config: object,
    ) -> None:
        settings = ControlConfig(**{"host_slots": 16, "store": attached and store is not None, **config})  # type: ignore[arg-type]
        self.controller = Controller(settings, self.clock)
        platform = CpuPlatform()
        sizes = {Where.DEVICE: settings.device_slots, Where.HOST: settings.host_slots}
        self.pools = {
            where: Pool(spec, LAYOUTS[layout], slots, platform, where)
            for where, slots in sizes.items()
            if slots
        }
        self.engine = Pool(spec, LAYOUTS["layer_first"], endpoint, platform, Where.DEVICE)
        self.store = store
        self.worker = Worker(
            DataPlane(spec, self.pools, self, engine or ReferenceEngine(), store), self.clock
        )
        self.free = list(range(endpoint))
        self.held: set[JobKind] = set()  # kinds that are not handed to the worker
        self.muted: set[JobKind] = set()  # kinds whose Dones are not applied
        self.waiting: list[Job] = []
        self.dones: list[Done] = []
        self.log: list[Event] = []
        self._kinds: dict[int, JobKind] = {}
        self._lent: dict[int, tuple[list[int], set[JobKind]]] = {}

    def surface(self, handle: int | None, group: int) -> Surface:
        """The engine's pages."""
        return self.engine.surface(group)

    # ---- driving

    def settle(self) -> list[Event]:
        """Run everything that is not held, apply everything that is not muted, until nothing moves; check the books."""
        seen: list[Event] = []
        while True:
            batch = self.controller.take_jobs()
            go: list[Job] = []
            for job in batch.jobs:
                self._kinds[job.id] = job.kind
                stuck = {waiting.id for waiting in self.waiting}
                (self.waiting if job.kind in self.held or stuck & set(job.after) else go).append(job)
            self.worker.submit(replace(batch, jobs=tuple(go)))
            if not self.worker.drain(None):
                raise AssertionError("the worker did not finish")
            dones = self.worker.poll()
            self.dones += [done for done in dones if self._kinds.get(done.job) in self.muted]
            events = self.controller.apply([d for d in dones if self._kinds.get(d.job) not in self.muted])
            seen += events
            self._hear(events)
            self.controller.check()
            if not go and not events and not dones:
                return seen

    def release(self, *, still: Collection[JobKind] = ()) -> list[Event]:
        """Let the held Jobs run and the muted Dones be applied; Jobs emitted from now on are held if of kinds ``still``."""
        self.held = set(still)
        self.muted.clear()
        jobs, self.waiting = tuple(self.waiting), []
        self.worker.submit(Batch(jobs))
        dones, self.dones = self.dones, []
        events = self.controller.apply(dones)
        self._hear(events)
        return events + self.settle()

    def _hear(self, events: Collection[Event]) -> None:
        self.log += events
        for event in events:
            if isinstance(event, EndpointFree) and event.handle in self._lent:
                ids, due = self._lent[event.handle]
                due.discard(event.kind)
                if not due:
                    del self._lent[event.handle]
                    for slot in ids:
                        fill(self.engine.surface(0), slot, POISON)
                    self.free += ids

    # ---- an engine's moves

    def keys(self, tokens: TokenIds, namespace: Namespace = NAMESPACE) -> list[PageKey]:
        """Keys of a prompt's full pages."""
        return page_keys(namespace.root, tokens, PAGE_TOKENS)

    def open(self, name: object, keys: Sequence[PageKey], namespace: Namespace = NAMESPACE) -> Request:
        """Open a request and lend it poisoned engine pages (``ids(request)``), one a key."""
        request = self.controller.open(name, namespace, keys)
        if request.handle not in self._lent:
            ids = [self.free.pop() for _ in keys]
            self._lent[request.handle] = (ids, {JobKind.LOAD, JobKind.SAVE})
            for slot in ids:
                fill(self.engine.surface(0), slot, POISON)
        return request

    def ids(self, request: Request) -> list[int]:
        """The engine pages lent to a request."""
        return self._lent[request.handle][0]

    def compute(self, request: Request, pages: range) -> None:
        """The engine computes these pages."""
        for page in pages:
            put(self.engine.surface(0), self.ids(request)[page], request.keys[page])

    def right(self, request: Request, pages: range) -> bool:
        """True when the engine's pages hold exactly what their keys say."""
        ids = self.ids(request)
        return all(holds(self.engine.surface(0), ids[page], request.keys[page]) for page in pages)

    def serve(
        self,
        name: object,
        keys: Sequence[PageKey],
        namespace: Namespace = NAMESPACE,
        *,
        load_max: int | None = None,
    ) -> Served:
        """A request's whole life; AssertionError when a loaded page has a wrong byte."""
        request = self.open(name, keys, namespace)
        events = self.settle()
        match = request.match()
        load = request.load(match, self.ids(request)[:load_max])
        events += self.settle()
        good = sum(e.good for e in events if isinstance(e, Loaded) and e.handle == request.handle)
        if not self.right(request, range(good)):
            raise AssertionError(f"a loaded page is wrong: {name} {good} {load}")
        self.compute(request, range(good, len(keys)))
        request.publish(len(keys), self.ids(request))
        request.close()
        events += self.settle()
        return Served(good, dict(load.by_tier), len(keys) - good, request, events)

    def empty(self, *tiers: Where) -> None:
        """Evict everything from memory tiers, all of them by default."""
        freed = True
        while freed:  # a page may have to wait for its children in another tier
            freed = False
            for where in tiers or tuple(self.pools):
                freed |= self.controller.evict(where, 1 << 30) > 0 or not self.controller.idle
                self.settle()

    def close(self) -> None:
        """End the worker and give memory back."""
        if self.worker.close(PATIENCE_S):
            raise AssertionError("a lane hangs")
        for pool in (*self.pools.values(), self.engine):
            pool.close()
