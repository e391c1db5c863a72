"""A cache that runs: one controller, its worker, its pools and its store, with one lock around them.

:func:`hicache.build.build` makes it. A store can be put in place and taken away while it runs.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hicache.control.controller import Controller
from hicache.control.request import Request
from hicache.data.moves import DataPlane
from hicache.data.platform.cpu import CpuPlatform
from hicache.data.pool import Pool
from hicache.data.store.base import Store, Trouble, Usage
from hicache.data.store.guard import Guard
from hicache.data.worker import Worker
from hicache.deadlines import SECONDS_MAX
from hicache.errors import ConfigError, HiCacheError, UnavailableError
from hicache.keys import Namespace, PageKey
from hicache.metrics import Metrics
from hicache.records import EndpointFree, Event, Loaded, LookedUp, Where
from hicache.registry import store_factory
from hicache.resolve import Chosen, Resolution, attach
from hicache.resolve.choose import Surroundings, pieces, store_name
from hicache.resolve.request import NONE
from hicache.selftest import Report, self_test
from hicache.settings import Settings, StoreSettings
from hicache.spec import CacheSpec

_LOG = logging.getLogger(__name__)

Clock = Callable[[], float]

SPARE_SLOTS = 4
"""Slots of the pools that a store is tested with while the cache runs."""

_WAIT_S = 0.05
"""The longest single wait: how late a result that came in between is noticed."""

_LAST_S = 0.1
"""What a lane, or the store, gets to end in when the deadline of closing has passed already."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What :func:`build` joins, and how it came about.

    health: what is off although it was asked for, and why.
    """

    controller: Controller
    worker: Worker
    data: DataPlane
    resolution: Resolution
    report: Report
    health: dict[str, str] = field(default_factory=dict)


class Cache:
    """One controller, its worker, its pools and its store. Calls are serialised by ``lock``, which is re-entrant."""

    def __init__(self, settings: Settings, namespace: Namespace, parts: Parts, clock: Clock) -> None:
        self.settings = settings
        self.namespace = namespace
        self.controller = parts.controller
        self.worker = parts.worker
        self.data = parts.data
        self.resolution = parts.resolution
        self.report = parts.report
        self._off = parts.health
        self.lock = threading.RLock()
        self._clock = clock
        self._inbox: dict[int, list[Event]] = {}
        self._closed = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """True in a forked child: the threads, the store's files and perhaps the lock are its parent's."""
        return os.getpid() != self._pid

    @property
    def health(self) -> dict[str, str]:
        """What does not work although it was asked for, and why: empty when all is well."""
        store: object = self.data.store
        trouble = store.trouble() if isinstance(store, Trouble) else None
        return dict(self._off) if trouble is None else {**self._off, "store": trouble}

    def metrics(self) -> Metrics:
        """What a Prometheus registry collects."""
        store: object = self.data.store
        usage = store.usage if isinstance(store, Usage) else None
        worth = self.controller.books.worth
        return Metrics(
            lambda: self.controller.stats,
            self.controller.pools,
            usage,
            lambda: self.health,
            None if worth is None else worth.estimates,
        )

    def fetch_wait_s(self, tokens: int) -> float:
        """Seconds for which a fetch of so many tokens from the store is worth waiting for: it is given up then."""
        policy = self.chosen.prefetch
        if policy == "timeout":
            return self.settings.deadlines.fetch_limit(tokens)
        return 0.0 if policy == "best_effort" else SECONDS_MAX

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of a prompt in so long: what loading from the store is weighed against."""
        with self.lock:
            self.controller.computed(tokens / self.spec.page_tokens, seconds)

    @property
    def spec(self) -> CacheSpec:
        """What a page is made of."""
        return self.data.spec

    @property
    def chosen(self) -> Chosen:
        """What was resolved, and runs."""
        return self.resolution.require()

    def open(
        self,
        id: Hashable,  # noqa: A002
        keys: Sequence[PageKey],
        namespace: Namespace | None = None,
    ) -> Request:
        """Begin a request, in the cache's namespace where none is named; its events are kept until :meth:`forget`."""
        self.refuse_fork()
        with self.lock:
            self._refuse_closed(id=id)
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

    def refuse_fork(self) -> None:
        """UnavailableError in a forked child: to be asked before the lock is, which nobody there may ever give back."""
        if self.forked:
            raise UnavailableError(
                "this cache belongs to the process that made it; a forked child needs its own",
                made_by=self._pid,
            )

    def _refuse_closed(self, **context: object) -> None:
        if self._closed:
            raise ConfigError("the cache is closed", **context)

    def _limit(self, timeout: float | None) -> float:
        return self.settings.deadlines.close_s if timeout is None else _seconds(timeout)

    def step(self) -> list[Event]:
        """Hand out new Jobs, take in what has ended. Never blocks."""
        self.refuse_fork()
        with self.lock:
            try:
                self.worker.submit(self.controller.take_jobs())
                events = self.controller.apply(self.worker.poll())
                for event in events:
                    if isinstance(event, Loaded | LookedUp | EndpointFree) and event.handle in self._inbox:
                        self._inbox[event.handle].append(event)
            except HiCacheError:
                raise
            except BaseException as error:  # Jobs, Dones or events may be lost on the way
                self.controller.give_up(f"a step was interrupted by {type(error).__name__}")
                raise
            if self.chosen.host_mode == "staging":  # what no Job needs any more has passed through
                self.controller.evict(Where.HOST, self.data.pools[Where.HOST].slots)
            return events

    def run_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Step until ``done()``; False when the time is up, or when nothing is left that could bring it about."""
        self.refuse_fork()
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
        self.refuse_fork()
        with self.lock:
            self._refuse_closed()
            return self._flush(self._clock() + _seconds(timeout))

    def _flush(self, until: float) -> int:
        before = -1
        while True:
            missing = self.controller.flush()
            self.run_until(lambda: self.controller.idle, max(0.0, until - self._clock()))
            if not missing or missing == before or self._clock() >= until:
                return self.controller.flush() if missing else 0
            before = missing

    def attach_store(self, settings: StoreSettings, spec: CacheSpec | None = None) -> Report:
        """Put a store in place while the cache runs; ConfigError when the running layout does not suit it.

        The same question as at start, and the same test of its legs: a store that fails it is not attached, and
        the report and :attr:`health` say why. A store that is there already has to be detached first.
        """
        self.refuse_fork()
        with self.lock:
            self._refuse_closed()
            if self.chosen.store != NONE:
                raise ConfigError("a store is attached already", store=self.chosen.store)
            asked = replace_settings(self.settings, store=settings)
            answer = attach(self.resolution, store_name(settings) or NONE, pieces(asked, Surroundings()))
            answer.require()
            store = make_store(settings, self.spec, self._clock)
            report = self_test(
                replace(self.data, pools=self._spare_pools(), store=store),
                CpuPlatform(),
                self._clock,
                secrets.randbits(64),
            )
            failure = report.failure or report.store
            if failure is not None:
                self._off["store"] = f"off: {failure}"
                if not failure.hangs:
                    close_quietly(store)
                return report
            self._off.pop("store", None)
            self.settings, self.resolution, self.data = asked, answer, replace(self.data, store=store)
            self.worker.replace_store(store)
            self.controller.attach_store()
            return report

    def detach_store(self, timeout: float | None = None) -> list[str]:
        """Take the store away: what is under way ends first, within ``timeout``. Memory tiers stay as they are.

        ConfigError where the cache cannot be without. Returns the names of calls that hang.
        """
        self.refuse_fork()
        with self.lock:
            self._refuse_closed()
            limit = self._limit(timeout)
            answer = attach(self.resolution, NONE, pieces(self.settings, Surroundings()))
            answer.require()
            store = self.data.store
            if store is None:
                return []
            until = self._clock() + limit
            self.controller.detach_store()
            ended = self.run_until(lambda: self.controller.idle, limit) or self.controller.idle
            self.worker.replace_store(None)
            hanging = self._close_store(max(_LAST_S, until - self._clock())) if ended else ["store"]
            self.settings = replace_settings(self.settings, store=None)
            self.resolution, self.data = answer, replace(self.data, store=None)
            return hanging

    def _spare_pools(self) -> dict[Where, Pool]:
        """Pools of a few pages that look like ours, for a test while ours are in use."""
        return {
            where: Pool(self.spec, pool.layout, min(pool.slots, SPARE_SLOTS), CpuPlatform(), where)
            for where, pool in self.data.pools.items()
        }

    def close(self, timeout: float | None = None) -> list[str]:
        """Finish what is under way, within ``timeout`` (default: ``deadlines.close_s``), then let go of everything.

        Pages that a ``back`` leg keeps above are written down first. Returns the names of lanes whose call hangs;
        what they use stays allocated, and they end with the process. Closing twice does nothing, and neither does
        closing in a forked child: all of it is the parent's.
        """
        if self.forked:
            return []
        with self.lock:
            if self._closed:
                return []
            limit = self._limit(timeout)
            self._closed = True
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
        if "back" in (self.chosen.into_host, self.chosen.into_store):
            self._flush(until)
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


def _seconds(timeout: object) -> float:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
        raise ConfigError("a timeout is a number of seconds, at least 0", timeout=repr(timeout))
    return timeout


def close_quietly(store: Store) -> None:
    """Close a store that is not ours any more."""
    with suppress(Exception):  # whatever a store raises
        store.close()


def make_store(settings: StoreSettings, spec: CacheSpec, clock: Clock) -> Guard:
    """The store of these settings, with its guard.

    ConfigError where they are wrong, another HiCacheError where the store cannot be opened.
    """
    name = store_name(settings) or NONE
    try:
        return Guard(store_factory(name)(settings.options(), spec), spec.fingerprint(), clock)
    except HiCacheError:
        raise
    except Exception as error:  # whatever the system, or another package's store, has to say
        raise UnavailableError("the store cannot be opened", store=name, reason=repr(error)) from error


def replace_settings(settings: Settings, **changes: object) -> Settings:
    """The same settings but for ``changes``, checked again."""
    kept = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return Settings(**{**kept, **changes})
