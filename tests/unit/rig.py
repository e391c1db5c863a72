"""A worker with everything fake but the bytes: gated engine, gated store, fake clock, pages with identities."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hicache.data.copy.reference import ReferenceEngine
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.base import Corrupt, Hit, Miss, WriteOutcome
from hicache.data.worker import Worker
from hicache.keys import Namespace, RecordKey, page_keys
from hicache.layout import LAYOUTS
from hicache.records import Batch, Done, Job, JobKind, Span, Where
from hicache.spec import CacheSpec, Group, Plane

PATIENCE_S = 20.0
MAIN = Group("main", (Plane("k", 2, 4, 2, 32), Plane("v", 2, 4, 2, 16)))
INDEX = Group("index", (Plane("index", 2, 4, 1, 24),))
SPEC = CacheSpec((MAIN, INDEX), page_tokens=4)
NAMESPACE = Namespace.of({"weights": "w1"})
SLOTS = 12
POISON = 0xEE


def chain(pages: int, salt: int = 0) -> list[bytes]:
    return page_keys(NAMESPACE.root, [salt * 1000 + i for i in range(4 * pages)], 4)


def parents_of(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    return (NAMESPACE.root, *keys[:-1])[: len(keys)]


def identity(key: bytes, group: int, plane: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    seed = hashlib.sha256(key + bytes([group, plane, layer])).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "big")).integers(0, 256, shape, dtype=np.uint8)


def put(side, slot: int, key: bytes, groups: int = 2) -> None:
    """Write the identity of ``key`` into a slot of a pool or an endpoint."""
    for group in range(groups):
        for p, plane in enumerate(side.surface(group).views):
            for i, view in enumerate(plane):
                view[slot] = identity(key, group, p, i, view.shape[1:])


def holds(side, slot: int, key: bytes, groups: int = 2) -> bool:
    return all(
        np.array_equal(view[slot], identity(key, group, p, i, view.shape[1:]))
        for group in range(groups)
        for p, plane in enumerate(side.surface(group).views)
        for i, view in enumerate(plane)
    )


def poison(side, slots: Sequence[int] = range(SLOTS), groups: int = 2) -> None:
    for group in range(groups):
        for plane in side.surface(group).views:
            for view in plane:
                view[list(slots)] = POISON


def poisoned(side, slot: int, groups: int = 2) -> bool:
    return all(
        bool((view[slot] == POISON).all())
        for group in range(groups)
        for plane in side.surface(group).views
        for view in plane
    )


def raising(error):
    def hook(*_):
        raise error

    return hook


class Gate:
    """A door in a fake: says when somebody stands before it, and lets them pass when it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S), "nobody opened the gate"

    def open(self) -> None:
        self.opened.set()

    def wait_for_somebody(self) -> None:
        assert self.entered.wait(PATIENCE_S), "nobody came to the gate"


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0
        self.step = 0.0  # how far it moves each time it is read

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class FakeEngine(ReferenceEngine):
    """The reference engine with a log, gates by call number and errors by call number."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.before: Callable[[int], None] = lambda number: None

    def submit(self, source, source_slots, target, target_slots, *, layers=None):
        self.calls.append((tuple(source_slots), tuple(target_slots)))
        self.before(len(self.calls) - 1)
        return super().submit(source, source_slots, target, target_slots, layers=layers)


class FakeStore:
    """A store in a dict. ``before[method]`` runs first (gates, errors); ``after[method]`` may change the answer."""

    name = "fake"

    def __init__(self) -> None:
        self.records: dict[bytes, tuple[bytes | None, str, bytes]] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[list], object]] = {}
        self.calls: list[tuple[str, tuple]] = []
        self.threads: set[threading.Thread] = set()
        self.room = 1 << 30

    def _answer(self, method: str, what: tuple, make: Callable[[], list]):
        self.calls.append((method, what))
        self.threads.add(threading.current_thread())
        self.before.get(method, lambda: None)()
        return self.after.get(method, lambda answer: answer)(make())

    def asked(self, method: str) -> list:
        return [item for name, what in self.calls if name == method for item in what]

    def read(self, namespace, keys, into):
        def one(key, buffers):
            if bytes(key) not in self.records:
                return Miss()
            _, layout, payload = self.records[bytes(key)]
            room = sum(len(buffer) for buffer in buffers)
            if len(payload) > room:
                return Miss("too long")
            assert len(buffers) == 1
            buffers[0][: len(payload)] = payload
            if payload.startswith(b"rotten"):
                return Corrupt("rotten")
            return Hit(layout, len(payload))

        assert namespace == NAMESPACE
        return self._answer(
            "read", tuple(keys), lambda: [one(key, buffers) for key, buffers in zip(keys, into, strict=True)]
        )

    def write(self, namespace, records):
        def one(record):
            parent = None if record.parent is None else bytes(record.parent)
            if parent is not None and parent not in self.records:
                return WriteOutcome.PARENT_ABSENT
            if bytes(record.key) in self.records:
                return WriteOutcome.EXISTS
            if self.room <= 0:
                return WriteOutcome.NO_ROOM
            self.room -= 1
            payload = b"".join(bytes(view) for view in record.payload)
            self.records[bytes(record.key)] = (parent, record.layout, payload)
            return WriteOutcome.STORED

        assert namespace == NAMESPACE
        return self._answer(
            "write", tuple(r.key for r in records), lambda: [one(record) for record in records]
        )

    def contains(self, namespace, keys):
        return self._answer("contains", tuple(keys), lambda: [bytes(key) in self.records for key in keys])

    def close(self) -> None: ...


class TouchableStore(FakeStore):
    def touch(self, keys) -> None:
        self._answer("touch", tuple(keys), list)


class FakeEndpoint:
    """An engine's memory: one pool whose slots are the engine's pages, for any handle but 404."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def surface(self, handle, group):
        if handle == 404:
            raise LookupError("no such handle")
        return self.pool.surface(group)


class Rig:
    def __init__(
        self,
        *,
        spec: CacheSpec = SPEC,
        layout: str = "page_first",
        store: FakeStore | None = None,
        shard: int = 0,
        writes_max: int = 256,
    ) -> None:
        self.spec = spec
        self.clock, self.engine = FakeClock(), FakeEngine()
        self.store = FakeStore() if store is None else store
        platform = CpuPlatform()
        self.device = Pool(spec, LAYOUTS["layer_first"], SLOTS, platform, Where.DEVICE)
        self.host = Pool(spec, LAYOUTS[layout], SLOTS, platform, Where.HOST)
        self.rows = Pool(spec, LAYOUTS["page_first_direct"], SLOTS, platform)
        self.sides = {Where.DEVICE: self.device, Where.HOST: self.host, Where.ENDPOINT: self.rows}
        self.groups = len(spec.groups)
        for side in self.sides.values():
            poison(side, groups=self.groups)
        self.data = DataPlane(
            spec,
            {Where.DEVICE: self.device, Where.HOST: self.host},
            FakeEndpoint(self.rows),
            self.engine,
            self.store,
            shard,
        )
        self.worker = Worker(self.data, self.clock, writes_max=writes_max)

    def submit(self, *jobs: Job, applied: tuple[int, ...] = (), touched: tuple[bytes, ...] = ()) -> None:
        self.worker.submit(Batch(jobs, applied, touched))

    def next(self, jobs: int = 1) -> dict[int, Done]:
        """The next so many Dones, by Job."""
        got: list[Done] = []
        while len(got) < jobs:
            assert self.worker.wait(PATIENCE_S), f"only {got}"
            got += self.worker.poll()
        assert len(got) == jobs
        assert len({done.job for done in got}) == jobs
        return {done.job: done for done in got}

    def run(self, *jobs: Job) -> list[Done]:
        self.submit(*jobs)
        dones = self.next(len(jobs))
        return [dones[job.id] for job in jobs]

    def stored(self, keys: Sequence[bytes], base: int = 0) -> None:
        """Put pages into the store through the worker, from host slots that are poisoned again."""
        for i, key in enumerate(keys):
            put(self.host, base + i, key, self.groups)
        (done,) = self.run(write(900, keys, range(base, base + len(keys))))
        assert not done.bad, done
        poison(self.host, range(base, base + len(keys)), self.groups)


def span_job(number, kind, way, keys, sources=(), targets=(), **more) -> Job:
    span = Span(*way, tuple(keys), tuple(sources), tuple(targets))
    return Job(number, kind, more.pop("handle", 1), (span,), namespace=NAMESPACE, **more)


def lookup(number, keys, **more) -> Job:
    return Job(number, JobKind.LOOKUP, 1, keys=tuple(keys), namespace=NAMESPACE, **more)


def fetch(number, keys, targets, **more) -> Job:
    return span_job(number, JobKind.FETCH, (Where.STORE, Where.HOST), keys, (), targets, **more)


def write(number, keys, sources, parents=None, **more) -> Job:
    parents = parents_of(keys) if parents is None else tuple(parents)
    return span_job(
        number, JobKind.WRITE, (Where.HOST, Where.STORE), keys, sources, (), parents=parents, **more
    )


def load(number, keys, sources, targets, where=Where.HOST, **more) -> Job:
    return span_job(number, JobKind.LOAD, (where, Where.ENDPOINT), keys, sources, targets, **more)


def save(number, keys, sources, targets, **more) -> Job:
    return span_job(number, JobKind.SAVE, (Where.ENDPOINT, Where.DEVICE), keys, sources, targets, **more)


def down(number, keys, sources, targets, **more) -> Job:
    return span_job(number, JobKind.DOWN, (Where.DEVICE, Where.HOST), keys, sources, targets, **more)


def record(key: bytes, group: int = 0, shard: int = 0) -> bytes:
    return bytes(RecordKey(key, group, shard))
