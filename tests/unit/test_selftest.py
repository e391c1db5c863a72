"""The self-test finds a wrong byte on every leg and names it; a store that fails it is off; stores come and go."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from test_build import PAGES, SPACE, Engine, load_all, make, publish

from hicache import build as build_module
from hicache import registry, selftest
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.base import WriteOutcome
from hicache.data.store.memory import MemoryStore
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.records import Where
from hicache.resolve import catalog
from hicache.resolve.catalog import ENGINES
from hicache.settings import MemoryStoreSettings, SegmentStoreSettings
from hicache.spec import CacheSpec, Group, Plane, Window

CPU = CpuPlatform()
SPEC = CacheSpec(
    (
        Group("kv", (Plane("k", 3, 4, 2, 32), Plane("v", 3, 4, 2, 16))),
        Group("window", (Plane("k", 2, 4, 1, 24),), Window(8)),
    ),
    4,
)
LEGS = ["device -> host", "host -> device"]
TIERED = ["engine -> device", "device -> host", "device -> engine", "host -> engine"]


class Ticks:
    """A clock of whole seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


class WrongByte(ReferenceEngine):
    """Right but for one bit of one byte in the copy of a given number."""

    def __init__(self, at, plane=0, layer=1, page=1, token=2):
        self.at, self.where, self.copies = at, (plane, layer, page, token), 0

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        ticket = super().submit(source, source_slots, target, target_slots, layers=layers)
        plane, layer, page, token = self.where
        if self.copies == self.at:
            target.views[plane][layer][target_slots[page], token, 0, 3] ^= 4
        self.copies += 1
        return ticket


def plane_of(engine=None, store=None, tiers=(Where.HOST,), layout="page_first", slots=5):
    pools = {
        w: Pool(SPEC, LAYOUTS["layer_first" if w is Where.DEVICE else layout], slots, CPU, w) for w in tiers
    }
    return DataPlane(SPEC, pools, None, engine or ReferenceEngine(), store)


def run(data):
    return selftest.self_test(data, CPU, Ticks(), 7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tiers", [(Where.HOST,), (Where.DEVICE,), (Where.DEVICE, Where.HOST)])
def test_all_legs_are_walked_and_nothing_is_left_behind(layout, tiers):
    layout = "page_first" if layout == "page_head" else layout
    store = MemoryStore(1 << 20, SPEC.fingerprint())
    data = plane_of(store=store, tiers=tiers, layout=layout)
    report = run(data)
    assert (report.failure, report.store) == (None, None)
    if len(tiers) == 2:
        assert list(report.seconds)[:4] == TIERED
    assert sum("store" in leg for leg in report.seconds) == 2
    assert set(report.seconds.values()) == {1.0}
    assert report.pages == selftest.PAGES
    assert report.nbytes == selftest.PAGES * SPEC.page_nbytes
    assert store.usage()["records"] == 0
    for pool in data.pools.values():
        for group in range(2):
            assert all((view == 0).all() for plane in pool.surface(group).views for view in plane)


@pytest.mark.parametrize("tiers,legs", [((Where.HOST,), LEGS), ((Where.DEVICE, Where.HOST), TIERED)])
@pytest.mark.parametrize("group", [0, 1])
def test_a_wrong_byte_on_any_leg_is_named(tiers, legs, group):
    for number, leg in enumerate(legs):
        failure = run(plane_of(WrongByte(2 * number + group), tiers=tiers)).failure
        heads, item = ((2, 32), (1, 24))[group]
        assert (failure.leg, failure.plane, failure.page) == (leg, ("kv/k", "window/k")[group], 1)
        assert failure.byte == (1 * 4 + 2) * heads * item + 3
        assert f"leg={leg} plane={failure.plane} page=1 byte={failure.byte}" in str(failure)


class Store(MemoryStore):
    """A store that is wrong in one way."""

    def __init__(self, fault):
        super().__init__(1 << 20, SPEC.fingerprint())
        self.fault, self.go = fault, threading.Event()
        self.closes = 0

    def close(self):
        self.closes += 1
        super().close()

    def write(self, namespace, records):
        if self.fault == "refuses":
            return [WriteOutcome.NO_ROOM] * len(records)
        if self.fault == "raises":
            raise OSError("the wire is cut")
        if self.fault == "hangs":
            self.go.wait(60)
        return super().write(namespace, records)

    def read(self, namespace, keys, into):
        if self.fault == "nothing":  # says that it has read, and has not
            into = [[memoryview(bytearray(len(views[0])))] for views in into]
        found = super().read(namespace, keys, into)
        if self.fault == "flips":
            np.frombuffer(into[2][0], np.uint8)[5] ^= 1
        if self.fault == "swaps":
            np.frombuffer(into[0][0], np.uint8)[:] = np.frombuffer(into[2][0], np.uint8)
        return found


@pytest.mark.parametrize(
    "fault,leg",
    [
        ("refuses", "host -> store"),
        ("raises", "host -> store"),
        ("hangs", "store"),
        ("flips", "store -> host"),
        ("swaps", "store -> host"),
        ("nothing", "store -> host"),
    ],
)
def test_a_store_that_fails_is_a_matter_of_the_store_alone(monkeypatch, fault, leg):
    monkeypatch.setattr(selftest, "STORE_S", 0.3)
    store = Store(fault)
    report = run(plane_of(store=store))
    store.go.set()
    assert report.failure is None
    assert report.store.leg == leg


def test_its_cost_is_bounded():
    big = CacheSpec((Group("kv", (Plane("k", 64, 64, 8, 2048),)),), 64)
    assert selftest.pages_for(big, 1000) == 1
    assert selftest.pages_for(SPEC, 1000) == selftest.PAGES
    assert selftest.pages_for(SPEC, 1) == 1
    assert run(plane_of(slots=1)).failure is None


# -- at start


def test_a_wrong_byte_is_an_error_at_start(monkeypatch):
    monkeypatch.setattr(build_module, "make_engine", lambda name: WrongByte(0, page=0))
    with pytest.raises(ConfigError, match="self-test failed: leg=device -> host plane=kv/k page=0 byte="):
        make(Engine(), host={"bytes": "64KiB"})


@pytest.fixture
def faulty(monkeypatch):
    """Makes every ``memory`` store one with the fault that is named; returns the list of those that were made."""

    def install(fault):
        made = []

        def factory(options, spec):
            made.append(Store(fault))
            made[-1]._fingerprint = spec.fingerprint()
            return made[-1]

        monkeypatch.setattr(selftest, "STORE_S", 0.3)
        monkeypatch.setitem(registry.BUILT_IN, "memory", factory)
        return made

    return install


@pytest.mark.parametrize("fault", ["refuses", "flips", "hangs"])
def test_a_store_that_fails_is_off_with_a_health_flag_and_the_cache_works(faulty, fault):
    made, engine = faulty(fault), Engine()
    cache = make(engine, host={"bytes": "64KiB"}, store={"type": "memory", "cap": "1MiB"})
    assert cache.health["store"].startswith("off: leg=")
    assert cache.data.store is None
    assert cache.chosen.store == "none"
    keys, before = publish(cache, engine)
    engine.fill(9)
    load_all(cache, engine, keys)
    assert engine.bytes() == before
    assert cache.close() == []
    made[0].go.set()


def test_the_report_of_a_start_is_kept():
    cache = make(Engine(), host={"bytes": "64KiB"})
    assert cache.report.failure is None
    assert cache.report.as_dict()["seconds"].keys() == set(LEGS)
    cache.close()


# -- while it runs


def test_a_store_is_attached_and_detached_while_the_cache_runs(tmp_path):
    engine = Engine()
    cache = make(engine, host={"bytes": "64KiB"})
    keys, before = publish(cache, engine)
    report = cache.attach_store(SegmentStoreSettings(path=str(tmp_path), cap="8MiB"))
    assert (report.failure, report.store) == (None, None)
    assert cache.chosen.store == "segment"
    publish(cache, engine, 1)  # a page in memory is written when a request passes
    assert cache.flush(10) == 0
    assert cache.data.store.usage()["records"] == PAGES
    with pytest.raises(ConfigError, match="attached already"):
        cache.attach_store(MemoryStoreSettings(cap="1MiB"))
    assert cache.detach_store() == []
    assert cache.data.store is cache.worker._data.store is None
    engine.fill(9)
    load_all(cache, engine, keys)  # memory tiers are as they were
    assert engine.bytes() == before
    assert cache.close() == []
    cache = make(
        engine, host={"bytes": "64KiB"}, store={"type": "segment", "path": str(tmp_path), "cap": "8MiB"}
    )
    engine.fill(9)
    assert load_all(cache, engine, keys)[Where.STORE] == PAGES
    assert engine.bytes() == before
    cache.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_attaching_follows_the_rules_of_the_start(monkeypatch, layout):
    """A store of whole pages on a scattered layout: SGLang attached it, and then stored nothing, ever."""
    whole = tuple(replace(one, whole_pages=True) if one.name == "memory" else one for one in catalog.STORES)
    monkeypatch.setattr(catalog, "STORES", whole)
    cache = make(Engine(), host={"bytes": "64KiB"}, layout=layout)
    if layout == "page_first":
        cache.attach_store(MemoryStoreSettings(cap="1MiB"))
        assert cache.chosen.store == "memory"
    else:
        with pytest.raises(ConfigError, match="needs whole pages") as error:
            cache.attach_store(MemoryStoreSettings(cap="1MiB"))
        assert "nearest=page_first" in str(error.value)
        assert cache.chosen.store == "none"
    cache.close()


@pytest.mark.parametrize("fault,closes", [("flips", 1), ("hangs", 0)])
@pytest.mark.parametrize("strict", [False, True])
def test_a_store_is_never_closed_under_a_call_that_hangs(faulty, fault, closes, strict):
    made = faulty(fault)
    started = {"host": {"bytes": "64KiB"}, "store": {"type": "memory", "cap": "1MiB"}}
    if strict:
        with pytest.raises(ConfigError, match="the store cannot be used"):
            make(Engine(), strict=True, **started)
    else:
        cache = make(Engine(), **started)
        cache.attach_store(MemoryStoreSettings(cap="1MiB"))
        cache.close()
    assert [store.closes for store in made] == [closes] * (1 if strict else 2)
    for store in made:
        store.go.set()


def test_a_store_that_fails_its_test_is_not_attached(faulty):
    faulty("flips")
    cache = make(Engine(), host={"bytes": "64KiB"})
    assert cache.attach_store(MemoryStoreSettings(cap="1MiB")).store.leg == "store -> host"
    assert (cache.data.store, cache.chosen.store) == (None, "none")
    assert "store" in cache.health
    cache.close()


def test_host_memory_for_staging_keeps_nothing_and_cannot_be_without_its_store():
    engine = Engine()
    cache = make(engine, host={"bytes": "64KiB", "mode": "staging"}, store={"type": "memory", "cap": "1MiB"})
    keys, before = publish(cache, engine)
    assert cache.flush(10) == 0
    cache.step()
    assert cache.controller.pools()[Where.HOST]["free"] == cache.controller.pools()[Where.HOST]["total"]
    engine.fill(9)
    assert load_all(cache, engine, keys)[Where.STORE] == PAGES
    assert engine.bytes() == before
    with pytest.raises(ConfigError, match="needs a store"):
        cache.detach_store()
    cache.close()


def test_every_cpu_engine_is_built_and_passes():
    for declaration in ENGINES:
        if "cpu" in declaration.platforms:
            assert build_module.make_engine(declaration.name).name
            data = plane_of(
                build_module.make_engine(declaration.name), MemoryStore(1 << 20, SPEC.fingerprint())
            )
            assert run(data).failure is None
    assert SPACE
