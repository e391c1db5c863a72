"""The one place where settings become components: tiers, store, worker and controller, joined in a :class:`Cache`.

    cache = build(settings, spec, namespace, endpoint)
    request = cache.open("r1", keys)        what an adapter asks goes through the request
    cache.step()                            hands out new work, takes in results; never blocks
    cache.run_until(done, timeout)          steps until ``done()``; blocks at most so long
    cache.close()                           drains within a deadline; never hangs

Everything that cannot work is refused before memory is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hicache.capability import layout_refuses
from hicache.control.books import ControlConfig
from hicache.control.controller import Controller
from hicache.control.request import Request
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.moves import DataPlane, Endpoint
from hicache.data.platform.base import Progress
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool, slots_for
from hicache.data.store.base import Store
from hicache.data.worker import Worker
from hicache.errors import ConfigError, HiCacheError
from hicache.keys import Namespace, PageKey
from hicache.layout import LAYOUTS, Layout
from hicache.policy import WritePolicy
from hicache.records import EndpointFree, Event, JobKind, Loaded, LookedUp, Where
from hicache.registry import store_factory
from hicache.settings import MemoryStoreSettings, SegmentStoreSettings, Settings, StoreSettings
from hicache.spec import CacheSpec

_LOG = logging.getLogger(__name__)

Clock = Callable[[], float]

process_clock: Clock = time.monotonic
"""The clock of a real process; simulated ones bring their own."""

DEVICE_LAYOUT = LAYOUTS["layer_first"]
"""What the device tier uses: the one layout that holds every group, and the nearest to an engine's own."""

_WAIT_S = 0.05
"""The longest single wait: how late a result that came in between is noticed."""

_LAST_S = 0.1
"""What a lane, or the store, gets to end in when the deadline of closing has passed already."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What :func:`build` joins."""

    controller: Controller
    worker: Worker
    data: DataPlane


class Cache:
    """One controller, its worker, its pools and its store. Calls are serialised by ``lock``, which is re-entrant."""

    def __init__(self, settings: Settings, namespace: Namespace, parts: Parts, clock: Clock) -> None:
        self.settings = settings
        self.namespace = namespace
        self.controller = parts.controller
        self.worker = parts.worker
        self.data = parts.data
        self.lock = threading.RLock()
        self._clock = clock
        self._inbox: dict[int, list[Event]] = {}
        self._closed = False

    @property
    def spec(self) -> CacheSpec:
        """What a page is made of."""
        return self.data.spec

    def open(
        self,
        id: Hashable,  # noqa: A002
        keys: Sequence[PageKey],
        namespace: Namespace | None = None,
    ) -> Request:
        """Begin a request, in the cache's namespace where none is named; its events are kept until :meth:`forget`."""
        with self.lock:
            if self._closed:
                raise ConfigError("the cache is closed", id=id)
            request = self.controller.open(id, namespace or self.namespace, keys)
            self._inbox.setdefault(request.handle, [])
            return request

    def events(self, request: Request) -> list[Event]:
        """What has happened to a request so far, oldest first."""
        with self.lock:
            return list(self._inbox.get(request.handle, ()))

    def forget(self, request: Request) -> None:
        """Nobody asks for the events of this request any more."""
        with self.lock:
            self._inbox.pop(request.handle, None)

    def step(self) -> list[Event]:
        """Hand out new Jobs, take in what has ended. Never blocks."""
        with self.lock:
            self.worker.submit(self.controller.take_jobs())
            events = self.controller.apply(self.worker.poll())
            for event in events:
                if isinstance(event, Loaded | LookedUp | EndpointFree) and event.handle in self._inbox:
                    self._inbox[event.handle].append(event)
            return events

    def run_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Step until ``done()``; False when the time is up, or when nothing is left that could bring it about."""
        with self.lock:
            until = self._clock() + timeout
            while True:
                self.step()
                if done():
                    return True
                left = until - self._clock()
                if left <= 0 or self.controller.idle:
                    return False
                self.worker.wait(min(left, _WAIT_S))

    def flush(self, timeout: float) -> int:
        """Write down everything the tiers below lack; returns how many pages they still lack when it ends."""
        with self.lock:
            until = self._clock() + timeout
            before = -1
            while True:
                missing = self.controller.flush()
                self.run_until(lambda: self.controller.idle, max(0.0, until - self._clock()))
                if not missing or missing == before or self._clock() >= until:
                    return self.controller.flush() if missing else 0
                before = missing

    def close(self, timeout: float | None = None) -> list[str]:
        """Finish what is under way, within ``timeout`` (default: ``deadlines.close_s``), then let go of everything.

        Pages that a ``back`` leg keeps above are written down first. Returns the names of lanes whose call hangs;
        what they use stays allocated, and they end with the process. Closing twice does nothing.
        """
        with self.lock:
            if self._closed:
                return []
            self._closed = True
            limit = self.settings.deadlines.close_s if timeout is None else timeout
            until = self._clock() + limit
            try:
                self._drain(until)
            finally:
                hanging = self.worker.close(max(_LAST_S, until - self._clock()))
                if not hanging:
                    hanging = self._close_store(max(_LAST_S, until - self._clock()))
                if not hanging:
                    for pool in self.data.pools.values():
                        pool.close()
            if hanging:
                _LOG.warning("closed while these hang in a call: %s", ",".join(hanging))
            return hanging

    def _drain(self, until: float) -> None:
        for request in list(self.controller.books.open.values()):
            request.close(abort=True)
        if "back" in (self.settings.into_host, self.settings.into_store):
            self.flush(max(0.0, until - self._clock()))
        if not self.run_until(lambda: self.controller.idle, max(0.0, until - self._clock())):
            live = len(self.controller.books.ledger.live)
            _LOG.warning("closing with %d copies under way: what they carry is lost", live)

    def _close_store(self, timeout: float) -> list[str]:
        """Close the store on a thread of its own: a store that hangs does not hang us."""
        store = self.data.store
        if store is None:
            return []

        def close() -> None:
            try:
                store.close()
            except Exception:  # noqa: BLE001  (whatever a store raises; we are closing)
                _LOG.exception("closing the store raised")

        thread = threading.Thread(target=close, name="hicache-close", daemon=True)
        thread.start()
        thread.join(timeout)
        return ["store.close"] if thread.is_alive() else []


def build(
    settings: Settings,
    spec: CacheSpec,
    namespace: Namespace,
    endpoint: Endpoint,
    *,
    clock: Clock = process_clock,
    progress: Progress | None = None,
) -> Cache:
    """Make a :class:`Cache`. ConfigError when the settings cannot hold ``spec``; CapacityError without memory.

    ``progress`` is called with (bytes ready, bytes in all) while the tiers' memory is prepared.
    """
    sizes = _sizes(settings, spec)
    config = ControlConfig(
        device_slots=sizes.get(Where.DEVICE, 0),
        host_slots=sizes.get(Where.HOST, 0),
        store=settings.store is not None,
        shards=1,
        into_host=WritePolicy(settings.into_host),
        into_store=WritePolicy(settings.into_store),
        fetch_at=settings.fetch_at,
        deadlines={
            JobKind.LOOKUP: settings.deadlines.lookup_s,
            JobKind.FETCH: settings.deadlines.fetch_s,
            JobKind.WRITE: settings.deadlines.write_s,
        },
    )
    platform = CpuPlatform()
    pools: dict[Where, Pool] = {}
    store: Store | None = None
    try:
        for where, slots in sizes.items():
            pools[where] = Pool(spec, _layout(settings, where), slots, platform, where, progress=progress)
        if settings.store is not None:
            store = _store(settings.store, spec)
        data = DataPlane(spec, pools, endpoint, ReferenceEngine(), store)
        parts = Parts(Controller(config, clock), Worker(data, clock), data)
        return Cache(settings, namespace, parts, clock)
    except BaseException:
        for pool in pools.values():
            pool.close()
        if store is not None:
            with suppress(HiCacheError):
                store.close()
        raise


def _layout(settings: Settings, where: Where) -> Layout:
    return DEVICE_LAYOUT if where is Where.DEVICE else LAYOUTS[settings.layout]


def _sizes(settings: Settings, spec: CacheSpec) -> dict[Where, int]:
    """Slots of each memory tier; ConfigError when a layout cannot hold the spec or a budget not even one page."""
    if spec.shards != 1:
        raise ConfigError("one process writes one shard; this spec has more", shards=spec.shards)
    if spec.page_tokens != settings.page_tokens:
        raise ConfigError(
            "the spec has another page size than the settings",
            page_tokens=settings.page_tokens,
            spec_page_tokens=spec.page_tokens,
        )
    sizes: dict[Where, int] = {}
    for where, tier in ((Where.DEVICE, settings.device), (Where.HOST, settings.host)):
        if tier is None:
            continue
        layout, name = _layout(settings, where), where.name.lower()
        reason = layout_refuses(spec, layout)
        if reason:
            fitting = ",".join(other.name for other in LAYOUTS.values() if not layout_refuses(spec, other))
            raise ConfigError(reason, tier=name, layout=layout.name, nearest=fitting, spec=spec.describe())
        try:
            sizes[where] = slots_for(spec, layout, tier.nbytes)
        except ConfigError as error:
            raise ConfigError(
                "the budget does not hold one page", key=f"{name}.bytes", value=tier.bytes, **error.context
            ) from None
    return sizes


def _store(settings: StoreSettings, spec: CacheSpec) -> Store:
    if isinstance(settings, MemoryStoreSettings | SegmentStoreSettings):
        name = str(settings.__struct_config__.tag)
    else:
        name = settings.type
    return store_factory(name)(settings.options(), spec)
