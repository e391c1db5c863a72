"""The one place where settings become components: tiers, store, worker and controller, joined in a :class:`Cache`.

    cache = build(settings, spec, namespace, endpoint)
    request = cache.open("r1", keys)        what an adapter asks goes through the request
    cache.step()                            hands out new work, takes in results; never blocks
    cache.run_until(done, timeout)          steps until ``done()``; blocks at most so long
    cache.close()                           drains within a deadline; never hangs

Settings are resolved first (:mod:`hicache.resolve.choose`): what cannot work is refused before memory is taken. Then a
self-test sends a few pages round; a byte that differs is an error at start, and a store that fails is off, which
:attr:`Cache.health` says.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace

from hicache.cache import Cache, Clock, Parts, close_quietly, make_store
from hicache.control.books import ControlConfig
from hicache.control.controller import Controller
from hicache.data.moves import DataPlane, Endpoint
from hicache.data.platform.base import Platform
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool, slots_for
from hicache.data.store.base import Store
from hicache.data.worker import Worker
from hicache.errors import ConfigError, HiCacheError, InvariantError
from hicache.keys import Namespace
from hicache.layout import LAYOUTS, Layout
from hicache.policy import WritePolicy
from hicache.records import JobKind, Where
from hicache.resolve import Chosen, Resolution
from hicache.resolve.catalog import make_engine
from hicache.resolve.choose import Surroundings, choose
from hicache.resolve.request import NONE
from hicache.selftest import Report, self_test
from hicache.settings import Settings, StoreSettings
from hicache.spec import CacheSpec

_LOG = logging.getLogger(__name__)

process_clock: Clock = time.monotonic
"""The clock of a real process; simulated ones bring their own."""

DEVICE_LAYOUT = LAYOUTS["layer_first"]
"""What the device tier uses: the one layout that holds every group, and the nearest to an engine's own."""

__all__ = ["Cache", "Clock", "Surroundings", "build", "process_clock"]


def build(
    settings: Settings,
    spec: CacheSpec,
    namespace: Namespace,
    endpoint: Endpoint,
    *,
    clock: Clock = process_clock,
    around: Surroundings | None = None,
) -> Cache:
    """Make a :class:`Cache`. ConfigError when these settings cannot work here; CapacityError without memory.

    ``around``: where the engine's memory is, who else is on the machine, and who is told how far we are.
    """
    around = around or Surroundings()
    resolution = choose(settings, spec, around)
    chosen = resolution.require()
    for step in resolution.warnings:
        _LOG.warning("%s", step)
    sizes = _sizes(settings, spec, chosen)
    config = _control(settings, chosen, sizes)
    engine, platform = make_engine(chosen.engine), CpuPlatform()
    pools: dict[Where, Pool] = {}
    store: Store | None = None
    health: dict[str, str] = {}
    try:
        for where, slots in sizes.items():
            layout = _layout(chosen, where)
            pools[where] = Pool(spec, layout, slots, platform, where, progress=around.progress)
        if settings.store is not None:
            store = _opened(settings.store, spec, clock, health)
        data = DataPlane(spec, pools, endpoint, engine, store)
        data, report = _tested(data, platform, clock, health)
        store = data.store
        if settings.strict and health:
            raise ConfigError("the store cannot be used", **health)
        parts = Parts(
            Controller(replace(config, store=data.store is not None), clock),
            Worker(data, clock),
            data,
            _without_store(resolution) if health else resolution,
            report,
            health,
        )
        return Cache(settings, namespace, parts, clock)
    except BaseException:
        for pool in pools.values():
            pool.close()
        if store is not None:
            close_quietly(store)
        raise


def _opened(settings: StoreSettings, spec: CacheSpec, clock: Clock, health: dict[str, str]) -> Store | None:
    """The store, or None and why in ``health`` when it is damaged, of another format or out of reach."""
    try:
        return make_store(settings, spec, clock)
    except (ConfigError, InvariantError):
        raise
    except HiCacheError as error:
        _LOG.warning("the store is off: %s", error)
        health["store"] = f"off: {error}"
        return None


def _tested(
    data: DataPlane, platform: Platform, clock: Clock, health: dict[str, str]
) -> tuple[DataPlane, Report]:
    """The data plane after its self-test, without its store where that failed; ConfigError where memory did."""
    report = self_test(data, platform, clock, secrets.randbits(64))
    if report.failure is not None:
        raise ConfigError(f"the self-test failed: {report.failure}", **_facts(data))
    if report.store is None:
        return data, report
    _LOG.warning("the store is off, its self-test failed: %s", report.store)
    if data.store is not None and not report.store.hangs:
        close_quietly(data.store)
    health["store"] = f"off: {report.store}"
    return replace(data, store=None), report


def _facts(data: DataPlane) -> dict[str, object]:
    layouts = ",".join(pool.layout.name for pool in data.pools.values())
    return {"engine": data.engine.name, "layouts": layouts, "spec": data.spec.describe()}


def _without_store(resolution: Resolution) -> Resolution:
    return replace(resolution, chosen=replace(resolution.require(), store=NONE))


def _layout(chosen: Chosen, where: Where) -> Layout:
    return DEVICE_LAYOUT if where is Where.DEVICE else LAYOUTS[chosen.layout]


def _control(settings: Settings, chosen: Chosen, sizes: dict[Where, int]) -> ControlConfig:
    times, best_effort = settings.deadlines, chosen.prefetch == "best_effort"
    limits = {
        JobKind.LOOKUP: times.lookup_s,
        JobKind.FETCH: times.fetch_s,
        JobKind.WRITE: times.write_s,
    }
    if chosen.prefetch == "wait_complete":
        del limits[JobKind.FETCH]
    return ControlConfig(
        device_slots=sizes.get(Where.DEVICE, 0),
        host_slots=sizes.get(Where.HOST, 0),
        store=settings.store is not None,
        shards=1,
        into_host=WritePolicy(chosen.into_host),
        into_store=WritePolicy(chosen.into_store),
        fetch_at=settings.fetch_at or ("lookup" if best_effort else "load"),
        best_effort=best_effort,
        weighs=settings.load_when == "faster",
        fetch_pages_min=-(-settings.prefetch_min_tokens // settings.page_tokens),
        fetch_pages_max=settings.prefetch_max_tokens // settings.page_tokens,
        fetch_wait_s=times.prefetch_s,
        deadlines=limits,
        fetch_page_s=times.fetch_1024_s * settings.page_tokens / 1024,
        fetch_s_max=times.fetch_most_s,
    )


def _sizes(settings: Settings, spec: CacheSpec, chosen: Chosen) -> dict[Where, int]:
    """Slots of each memory tier."""
    if spec.shards != 1:
        raise ConfigError("one process writes one shard; this spec has more", shards=spec.shards)
    sizes: dict[Where, int] = {}
    if settings.device is not None:
        try:
            sizes[Where.DEVICE] = slots_for(spec, DEVICE_LAYOUT, settings.device.nbytes)
        except ConfigError as error:
            raise ConfigError(
                "the budget does not hold one page",
                key="device.bytes",
                value=settings.device.bytes,
                **error.context,
            ) from None
    if chosen.size is not None:
        sizes[Where.HOST] = chosen.size.slots
    return sizes
