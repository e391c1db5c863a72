"""Building: what cannot work is refused before memory is taken; what was built steps, flushes and closes in time."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest

from hicache import build as build_module
from hicache import registry
from hicache.build import Surroundings, build
from hicache.data.platform.cpu import CpuBuffer, CpuPlatform
from hicache.data.pool import rows_surface
from hicache.data.store.segment import SegmentStore
from hicache.errors import CapacityError, ConfigError, HiCacheError
from hicache.keys import Namespace, page_keys
from hicache.records import EndpointFree, JobKind, Loaded, Where
from hicache.settings import load
from hicache.spec import CacheSpec, Group, Plane

PAGE, PAGES = 4, 6
SPACE = Namespace.of({"weights": b"w"})
SPEC = CacheSpec((Group("kv", (Plane("k", 8, PAGE, 1, 32), Plane("v", 8, PAGE, 1, 16))),), PAGE)
UNEVEN = CacheSpec((Group("kv", (Plane("k", 2, PAGE, 2, 32), Plane("v", 2, PAGE, 1, 32))),), PAGE)


class Engine:
    """An engine with rows for six pages and no model."""

    def __init__(self, spec=SPEC):
        planes = spec.groups[0].planes
        shape = [(PAGES * PAGE, plane.heads, plane.item_nbytes) for plane in planes]
        self.rows = [
            [np.zeros(s, np.uint8) for _ in range(p.layers)] for s, p in zip(shape, planes, strict=True)
        ]
        self._surface = rows_surface(spec.groups[0], self.rows, PAGES)

    def surface(self, handle, group):
        return self._surface

    def fill(self, seed):
        random = np.random.default_rng(seed)
        for plane in self.rows:
            for layer in plane:
                layer[:] = random.integers(0, 256, layer.shape)

    def bytes(self):
        return b"".join(layer.tobytes() for plane in self.rows for layer in plane)


def make(engine, spec=SPEC, **keywords):
    return build(load(environ={}, page_tokens=PAGE, **keywords), spec, SPACE, engine)


def publish(cache, engine, seed=1):
    engine.fill(seed)
    keys = page_keys(SPACE.root, range(100 * seed, 100 * seed + PAGES * PAGE), PAGE)
    request = cache.open(seed, keys)
    assert cache.run_until(lambda: request.publish(PAGES, range(PAGES)) == PAGES, 10)
    request.close()
    assert cache.run_until(lambda: len(frees(cache, request)) == 2, 10)
    cache.forget(request)
    return keys, engine.bytes()


def frees(cache, request):
    return {event.kind for event in cache.events(request) if isinstance(event, EndpointFree)}


def load_all(cache, engine, keys):
    request = cache.open("again", keys)
    cache.run_until(lambda: not request.match().pending, 10)
    loaded = request.load(request.match(), range(PAGES))
    cache.run_until(lambda: any(isinstance(event, Loaded) for event in cache.events(request)), 10)
    assert cache.events(request)[-1].good == PAGES
    request.close()
    assert cache.run_until(lambda: frees(cache, request) == {JobKind.LOAD, JobKind.SAVE}, 10)
    return loaded.by_tier


@pytest.mark.parametrize(
    "tiers",
    [
        {"host": {"bytes": "64KiB"}},
        {"host": None, "device": {"bytes": "64KiB"}},
        {"host": {"bytes": "64KiB"}, "device": {"bytes": "12KiB"}},
    ],
)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_what_was_published_comes_back_from_memory_and_after_a_restart_from_the_store(
    tmp_path, tiers, layout
):
    engine = Engine()
    store = {"type": "segment", "path": str(tmp_path), "cap": "8MiB"}
    cache = make(engine, layout=layout, store=store, **tiers)
    keys, before = publish(cache, engine)
    if len(tiers) == 2 and tiers["host"]:
        cache.flush(10)  # a page that is still being copied down cannot be evicted
        publish(cache, engine, 2)  # the device tier holds one of them
    engine.fill(9)
    held = load_all(cache, engine, keys)
    assert held[Where.STORE] == 0
    assert (held[Where.HOST] > 0) == (tiers["host"] is not None)
    assert engine.bytes() == before
    assert cache.close() == []
    engine.fill(9)
    cache = make(engine, layout=layout, store=store, **tiers)
    assert load_all(cache, engine, keys)[Where.STORE] == PAGES
    assert engine.bytes() == before
    cache.controller.check()
    assert cache.close() == []


def test_a_layout_that_cannot_hold_the_pages_is_refused_with_those_that_can():
    with pytest.raises(ConfigError) as refusal:
        make(Engine(UNEVEN), UNEVEN, layout="page_head", strict=True)
    assert refusal.value.context["layout"] == "page_head"
    assert refusal.value.context["nearest"] == "page_first+kernel"
    cache = make(Engine(UNEVEN), UNEVEN, layout="page_head", host={"bytes": "64KiB"})
    assert cache.data.pools[Where.HOST].layout.name == "page_first"
    assert [step.field for step in cache.resolution.warnings] == ["layout"]
    cache.close()


def test_budgets_shards_and_page_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"1024 bytes of host memory .* one page of 4096 bytes"):
        make(Engine(), host={"bytes": "1KiB"})
    with pytest.raises(ConfigError, match="does not hold one page"):
        make(Engine(), device={"bytes": 100}, host={"bytes": "64KiB"})
    with pytest.raises(ConfigError, match="one shard"):
        make(Engine(), CacheSpec(SPEC.groups, PAGE, shards=2))
    with pytest.raises(ConfigError, match="another page size"):
        make(Engine(), CacheSpec(SPEC.groups, 2 * PAGE))
    with pytest.raises(ConfigError, match="needs a device tier"):
        make(Engine(), into_host="back")
    with pytest.raises(ConfigError, match="unknown store"):
        make(Engine(), store={"type": "nonesuch"})


def test_what_was_made_before_a_failure_is_given_back(monkeypatch):
    closed = []

    class Pool(build_module.Pool):
        def close(self):
            closed.append(self.where)
            super().close()

    monkeypatch.setattr(build_module, "Pool", Pool)
    tiers = {"device": {"bytes": "64KiB"}, "host": {"bytes": "64KiB"}}
    with pytest.raises(ConfigError, match="to have 1125899906842624 bytes"):
        make(Engine(), **{**tiers, "host": {"bytes": 1 << 50}})
    assert closed == []  # refused before any memory is taken
    given = []

    def alloc(self, nbytes, where, *, progress=None):
        given.append(where)
        if where is Where.HOST:
            raise CapacityError("not enough memory")
        return CpuBuffer(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "alloc", alloc)
        with pytest.raises(CapacityError):
            make(Engine(), **tiers)
    assert given == [Where.DEVICE, Where.HOST]
    assert Where.DEVICE in closed
    closed.clear()

    def broken(options, spec):
        raise ConfigError("no such place")

    monkeypatch.setitem(registry.BUILT_IN, "memory", broken)
    with pytest.raises(ConfigError):
        make(Engine(), store={"type": "memory", "cap": 1}, host={"bytes": "64KiB"})
    assert closed == [Where.HOST]


def test_progress_of_the_memory_is_shown():
    seen = []
    settings = load(environ={}, page_tokens=PAGE, host={"bytes": "64KiB"})
    around = Surroundings(progress=lambda done, total: seen.append((done, total)))
    build(settings, SPEC, SPACE, Engine(), around=around).close()
    assert seen[-1][0] == seen[-1][1] == 64 << 10


def test_waiting_ends_when_nothing_is_left_to_wait_for():
    cache = make(Engine())
    began = time.monotonic()
    assert not cache.run_until(lambda: False, 60)
    assert time.monotonic() - began < 10
    cache.close()


def test_flush_says_how_much_cannot_go_down():
    engine = Engine()
    store = {"type": "memory", "cap": 3 * (512 + 1536)}
    cache = make(engine, host={"bytes": "64KiB"}, into_store="selective", store=store)
    publish(cache, engine)
    assert cache.data.store.usage()["records"] == 0
    assert cache.flush(10) == 3
    assert cache.data.store.usage()["records"] == 3
    cache.close()


@pytest.mark.parametrize("policy", ["through", "back"])
def test_closing_writes_what_back_has_kept(tmp_path, policy):
    engine = Engine()
    store = {"type": "segment", "path": str(tmp_path), "cap": "8MiB"}
    cache = make(engine, host={"bytes": "64KiB"}, into_store=policy, store=store)
    keys, before = publish(cache, engine)
    cache.close()
    cache = make(engine, host={"bytes": "64KiB"}, store=store)
    engine.fill(9)
    assert load_all(cache, engine, keys)[Where.STORE] == PAGES
    assert engine.bytes() == before
    cache.close()


@pytest.mark.parametrize("call", ["write", "close"])
def test_closing_never_hangs(call):
    engine, go = Engine(), threading.Event()
    cache = make(engine, host={"bytes": "64KiB"}, store={"type": "memory", "cap": "1MiB"})
    setattr(cache.data.store.inner, call, lambda *_args: go.wait(60) and [])
    try:
        publish(cache, engine)
        began = time.monotonic()
        assert cache.close(0.3) == (["write"] if call == "write" else ["store.close"])
        assert time.monotonic() - began < 5
        assert cache.close() == []
        with pytest.raises(ConfigError, match="closed"):
            cache.open(2, [])
    finally:
        go.set()


def test_one_caller_at_a_time():
    cache, inside = make(Engine()), []

    def other():
        with cache.lock:
            inside.append("other")

    with cache.lock:
        thread = threading.Thread(target=other)
        thread.start()
        cache.step()
        time.sleep(0.05)
        assert inside == []
    thread.join(5)
    assert inside == ["other"]
    cache.close()


def test_a_store_that_raises_while_it_is_opened_is_off_and_said_so(monkeypatch):
    def broken(options, spec):
        raise RuntimeError("connection refused")

    monkeypatch.setitem(registry.BUILT_IN, "memory", broken)
    cache = make(Engine(), store={"type": "memory", "cap": 1})
    assert "connection refused" in cache.health["store"]
    cache.close()
    with pytest.raises(ConfigError, match="connection refused"):
        make(Engine(), store={"type": "memory", "cap": 1}, strict=True)


def spoil_index(folder):
    folder.mkdir(mode=0o700)
    (folder / "index.mdb").write_bytes(bytes(40960))


def spoil_format(folder):
    store = SegmentStore(folder, 1 << 20)
    with store.directory.writing() as books:
        books.slots.set_number(b"format", 99)
    store.close()


def index_is_a_directory(folder):
    (folder / "index.mdb").mkdir(parents=True)
    folder.chmod(0o700)


@pytest.mark.parametrize("spoil", [spoil_index, spoil_format, index_is_a_directory])
def test_a_store_that_cannot_be_opened_is_off_and_said_so_and_refused_under_strict(tmp_path, spoil):
    spoil(tmp_path / "kv")
    store = {"type": "segment", "path": str(tmp_path / "kv"), "cap": "1MiB"}
    engine = Engine()
    cache = make(engine, store=store)
    assert cache.health["store"].startswith("off: ")
    assert "index" in cache.health["store"]
    assert cache.chosen.store == "none"
    keys, before = publish(cache, engine)
    engine.fill(9)
    load_all(cache, engine, keys)
    assert engine.bytes() == before
    cache.close()
    with pytest.raises(ConfigError, match=r"the store cannot be used \[store=off: "):
        make(Engine(), store=store, strict=True)
    cache = make(Engine())
    with pytest.raises(HiCacheError, match="index"):
        cache.attach_store(load(store=store).store)
    cache.close()


def test_a_directory_removed_under_a_running_cache_is_noticed_and_can_be_attached_anew(tmp_path):
    store = {"type": "segment", "path": str(tmp_path / "kv"), "cap": "1MiB"}
    engine = Engine()
    cache = make(engine, store=store)
    publish(cache, engine)
    cache.flush(10)
    assert cache.health == {}
    shutil.rmtree(tmp_path / "kv")
    assert "removed or put elsewhere" in cache.health["store"]
    assert 'hicache_off{reason="' in cache.metrics().text()
    keys, before = publish(cache, engine, 2)
    cache.flush(10)
    engine.fill(9)
    load_all(cache, engine, keys)
    assert engine.bytes() == before
    assert not (tmp_path / "kv").exists()
    cache.detach_store()
    assert cache.attach_store(load(store=store).store).store is None
    assert cache.health == {}
    publish(cache, engine, 3)
    assert cache.flush(10) == 0
    assert 'hicache_store{name="records"}' in cache.metrics().text()
    cache.close()


def test_a_relative_path_stays_where_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    engine = Engine()
    cache = make(engine, store={"type": "segment", "path": "kv", "cap": "1MiB"})
    monkeypatch.chdir(tmp_path)
    publish(cache, engine)
    assert cache.flush(10) == 0
    assert cache.health == {}
    cache.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_closed_cache_says_so(tmp_path):
    cache = make(Engine())
    cache.close()
    assert cache.close() == []
    store = load(store={"type": "segment", "path": str(tmp_path / "kv")}).store
    for call in (
        lambda: cache.flush(1),
        lambda: cache.attach_store(store),
        cache.detach_store,
        lambda: cache.open("x", [bytes(32)]),
    ):
        with pytest.raises(ConfigError, match="the cache is closed"):
            call()
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("timeout", [float("nan"), -1, "3", True])
def test_what_is_no_timeout_is_refused_and_closes_nothing(timeout):
    cache = make(Engine())
    for call in (cache.flush, cache.close, cache.detach_store):
        with pytest.raises(ConfigError, match="seconds"):
            call(timeout)
    assert cache.flush(1) == 0
    cache.close()
