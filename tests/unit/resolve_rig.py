"""Machines and specs to resolve for, and a small cache that runs what was chosen, numpy standing for the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np

from hicache.capability import Declarations, Direction, EngineDeclaration, Kernel, Place, Shards
from hicache.control import ControlConfig, Controller
from hicache.data.copy.base import Surface
from hicache.data.copy.direct import DirectEngine
from hicache.data.copy.reference import ReferenceEngine
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.memory import MemoryStore
from hicache.data.store.segment import SegmentStore
from hicache.data.worker import Worker
from hicache.keys import Namespace, page_keys
from hicache.layout import LAYOUTS
from hicache.policy import WritePolicy
from hicache.records import Loaded, Where
from hicache.resolve import Chosen
from hicache.resolve.catalog import declarations, simulate
from hicache.spec import CacheSpec, Group, Plane, Window
from hicache.testing.house import fill, holds, put

PAGE = 4
PAGES = 5
CAP = 32 << 20
NAMESPACE = Namespace.of({"weights": "of the resolver's tests"})
POISON = 0xA5


@cache
def spec_of(name: str, shards: int = 1) -> CacheSpec:
    planes = {
        "mha": (Plane("k", 3, PAGE, 2, 32), Plane("v", 3, PAGE, 2, 32)),
        "mla": (Plane("latent", 3, PAGE, 1, 96),),
        "asymmetric": (Plane("k", 3, PAGE, 2, 64), Plane("v", 3, PAGE, 2, 32)),
        "opaque": (Plane("block", 3, 1, 1, 200),),
    }
    groups = [Group("kv", planes.get(name, planes["mha"]))]
    if name == "draft":
        groups.append(Group("draft", (Plane("k", 1, PAGE, 2, 32), Plane("v", 1, PAGE, 2, 32))))
    if name == "window":
        groups.append(
            Group("window", (Plane("k", 2, PAGE, 1, 48), Plane("v", 2, PAGE, 1, 48)), Window(2 * PAGE))
        )
    return CacheSpec(tuple(groups), PAGE, shards)


SHARDS = (Shards(), Shards(tensor=2), Shards(pipeline=2))
ATTENTIONS = ("mha", "mla", "asymmetric", "opaque")


GONE = ("triton", "staged-writeback", "pinning")


@cache
def machines() -> dict[str, Declarations]:
    """What is declared on a CPU, on platforms known by name, and on CUDA and ROCm less any set of abilities."""
    found = {name: simulate(name) for name in ("cpu", "xpu", "npu")}
    for platform in ("cuda", "rocm"):
        for count in range(len(GONE) + 1):
            for without in itertools.combinations(GONE, count):
                found["-".join((platform, *without))] = simulate(platform, without)
        found[f"{platform}-same-address"] = simulate(platform, ["same-address"])
        found[f"{platform}-host-access"] = simulate(platform, ["host-access"])
    return {name: declarations(machine) for name, machine in found.items()}


class WrongPlaceError(Exception):
    """What a kernel says to a list of slots in the wrong place."""


class Slots(tuple):  # noqa: SLOT001  (it has a field)
    """A list of slots that knows where it lies."""

    place: Place

    @classmethod
    def at(cls, place: Place, slots) -> Slots:
        made = cls(slots)
        made.place = place
        return made


def run_kernel(kernel: Kernel, engine, source: Surface, sources: Slots, target: Surface, targets: Slots):
    """Stands for a kernel on a device: it can read a list of slots only where it lies."""
    for side, slots, place in (
        ("Source", sources, kernel.source_index),
        ("Destination", targets, kernel.target_index),
    ):
        if slots.place is not place:
            raise WrongPlaceError(f"{side} indices must be a {place.value} tensor, got {slots.place.value}")
    return engine.submit(source, sources, target, targets)


class SimulatedEngine:
    """The engine that was chosen, in numpy: every copy goes through the kernel of its direction."""

    def __init__(self, declaration: EngineDeclaration, chosen: Chosen) -> None:
        self.name = declaration.name
        self.used: set[str] = set()
        self.host: list[Surface] = []
        self._layout = LAYOUTS[chosen.layout]
        self._declaration = declaration
        self._inner = DirectEngine() if chosen.io == "direct" else ReferenceEngine()

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        saving = any(target is surface for surface in self.host)
        kernel = self._declaration.kernel(self._layout, Direction.SAVE if saving else Direction.LOAD)
        self.used.add(kernel.name)
        return run_kernel(
            kernel,
            self._inner,
            source,
            Slots.at(kernel.source_index, source_slots),
            target,
            Slots.at(kernel.target_index, target_slots),
        )


class WholePages(MemoryStore):
    """Stands for a store that reads the host pool itself: a record's bytes must lie there, in one piece."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.pools: list[Pool] = []

    def write(self, namespace, records):
        for record in records:
            (piece,) = record.payload
            group = record.key.group
            bytes_, wholes = (
                np.frombuffer(piece, np.uint8),
                [pool._buffers[group].view for pool in self.pools],
            )
            assert any(np.shares_memory(bytes_, whole) for whole in wholes), "a page was copied to be stored"
        return super().write(namespace, records)


class Rank:
    """One shard: its pools, its engine memory, its worker."""

    def __init__(self, cache: Running, shard: int) -> None:
        chosen, spec = cache.chosen, cache.spec
        platform = CpuPlatform()
        sizes = {Where.DEVICE: cache.config.device_slots, Where.HOST: cache.config.host_slots}
        self.pools = {
            where: Pool(
                spec,
                LAYOUTS["layer_first" if where is Where.DEVICE else chosen.layout],
                slots,
                platform,
                where,
            )
            for where, slots in sizes.items()
            if slots
        }
        self.rows = Pool(spec, LAYOUTS["layer_first"], PAGES, platform, Where.DEVICE)
        self.engine = SimulatedEngine(cache.declaration, chosen)
        if Where.HOST in self.pools:
            self.engine.host = [self.pools[Where.HOST].surface(g) for g in range(len(spec.groups))]
        if isinstance(cache.store, WholePages):
            cache.store.pools.append(self.pools[Where.HOST])
        data = DataPlane(spec, self.pools, self, self.engine, cache.store, shard)
        self.worker = Worker(data, lambda: 0.0)

    def surface(self, handle, group):
        return self.rows.surface(group)


class Running:
    """What was chosen, with pools of a few pages: five pages go down, are evicted, and come back."""

    def __init__(self, chosen: Chosen, spec: CacheSpec, path) -> None:
        self.chosen, self.spec = chosen, spec
        known = declarations(simulate(chosen.platform))
        self.declaration = next(e for e in known.engines if e.name == chosen.engine)
        self.store = self._store(path)
        back = chosen.into_host == "back"
        self.config = ControlConfig(
            device_slots=PAGES if back else 0,
            host_slots=PAGES if chosen.host_mode != "off" else 0,
            store=self.store is not None,
            shards=spec.shards,
            into_host=WritePolicy(chosen.into_host),
            into_store=WritePolicy(chosen.into_store),
        )
        self.controller = Controller(self.config, lambda: 0.0)
        self.ranks = [Rank(self, shard) for shard in range(spec.shards)]
        self.keys = page_keys(NAMESPACE.root, range(PAGES * PAGE), PAGE)

    def _store(self, path):
        fingerprint = self.spec.fingerprint()
        if self.chosen.store == "segment":
            return SegmentStore(path, CAP, fingerprint)
        if self.chosen.store == "mooncake":
            return WholePages(CAP, fingerprint)
        return MemoryStore(CAP, fingerprint) if self.chosen.store == "memory" else None

    def settle(self):
        events = []
        while True:
            batch = self.controller.take_jobs()
            dones = []
            for shard, rank in enumerate(self.ranks):
                rank.worker.submit(batch)
                assert rank.worker.drain(30.0)
                dones += [replace(done, shard=shard) for done in rank.worker.poll()]
            new = self.controller.apply(dones)
            events += new
            self.controller.check()
            if not batch.jobs and not new:
                return events

    def _sides(self):
        for shard, rank in enumerate(self.ranks):
            for group in range(len(self.spec.groups)):
                yield shard, group, rank.rows.surface(group)

    def _key(self, page: int, shard: int, group: int) -> bytes:
        return self.keys[page] + bytes([shard, group])

    def round_trip(self, name: str) -> int:
        """Load what can be loaded into poisoned pages, compare, compute the rest, publish; pages loaded."""
        request = self.controller.open(name, NAMESPACE, self.keys)
        for _, _, surface in self._sides():
            for page in range(PAGES):
                fill(surface, page, POISON)
        self.settle()
        request.load(request.match(), list(range(PAGES)))
        good = sum(e.good for e in self.settle() if isinstance(e, Loaded))
        for shard, group, surface in self._sides():
            for page in range(PAGES):
                if page < good:
                    assert holds(surface, page, self._key(page, shard, group)), (name, shard, group, page)
                else:
                    put(surface, page, self._key(page, shard, group))
        request.publish(PAGES, list(range(PAGES)))
        request.close()
        self.settle()
        return good

    def empty(self, *tiers: Where) -> None:
        freed = True
        while freed:
            freed = False
            for where in tiers:
                freed |= self.controller.evict(where, 1 << 30) > 0
                self.settle()

    def five_pages(self) -> None:
        """Back up, evict, load back; with a store also spill and fetch, with equal bytes each time."""
        assert self.round_trip("first") == 0
        if "selective" in (self.chosen.into_host, self.chosen.into_store):
            self.round_trip("again")
        host = self.config.host_slots > 0
        if self.config.device_slots and host:
            self.empty(Where.DEVICE)
        assert self.round_trip("from memory") == PAGES
        if self.store is not None:
            for _ in range(3):
                self.controller.flush()
                self.settle()
            self.empty(*(w for w in (Where.DEVICE, Where.HOST) if w in self.ranks[0].pools))
            assert self.round_trip("from the store") == PAGES
        for rank in self.ranks:
            if host and self.config.device_slots == 0:
                assert self.chosen.save.name in rank.engine.used

    def close(self) -> None:
        for rank in self.ranks:
            assert not rank.worker.close(30.0)
            for pool in (*rank.pools.values(), rank.rows):
                pool.close()
        if self.store is not None:
            self.store.close()
