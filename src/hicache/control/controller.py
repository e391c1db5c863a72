"""The Controller: the life of a request, and the two doors through which work leaves and results come back.

    h = open(id, namespace, keys)      h.match() -> h.load() ... h.publish() ... h.close()
    take_jobs() -> Batch               apply([Done, ...]) -> [Event, ...]

Pure: no threads, no I/O; the clock is passed in. It has one caller at a time (the adapter's lock); a second one,
or a call from inside a call, raises InvariantError. A call that is broken off from outside (Ctrl-C) may leave a change
half made; the controller then gives up: it promises and hands out nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from hicache.control import audit
from hicache.control.books import Books, ControlConfig
from hicache.control.down import Below
from hicache.control.fetch import Fetcher
from hicache.control.index import STORED
from hicache.control.publish import Publisher
from hicache.control.read import Reader
from hicache.control.request import Request
from hicache.control.settle import Settler
from hicache.errors import ConfigError, HiCacheError, InvariantError, UnavailableError
from hicache.keys import KEY_NBYTES, Namespace, PageKey
from hicache.records import Batch, Done, Event, JobKind, Load, Match, Reason, Stats, Where

_ON_FINISH = frozenset({JobKind.LOOKUP, JobKind.LOAD, JobKind.FETCH})
_ON_ABORT = _ON_FINISH | {JobKind.SAVE, JobKind.DOWN, JobKind.WRITE}


class Controller:
    """Who holds which page, and what is to be copied where. Knows keys and slots, never tokens or bytes."""

    def __init__(self, config: ControlConfig, clock: Callable[[], float]) -> None:
        self.books = Books(config, clock)
        self._below = Below(self.books)
        self._fetcher = Fetcher(self.books, self._below)
        self._reader = Reader(self.books, self._fetcher)
        self._publisher = Publisher(self.books, self._below)
        self._settler = Settler(self.books, self._fetcher)
        self._inside = ""
        self.broken = ""  # why the books cannot be trusted any more

    @contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        if self._inside:
            raise InvariantError("one caller at a time", inside=self._inside, called=verb)
        self._inside = verb
        try:
            yield
        except HiCacheError:
            raise
        except BaseException as error:  # Ctrl-C, for one: a change may be half made
            self.broken = f"{verb} was interrupted by {type(error).__name__}"
            raise
        finally:
            self._inside = ""

    def give_up(self, reason: str) -> None:
        """Trust the books no more: from now on nothing is promised, taken or handed out, and ``open`` is refused."""
        self.broken = self.broken or reason

    # ---- a request's life

    def open(self, id: Hashable, namespace: Namespace, keys: Sequence[PageKey]) -> Request:  # noqa: A002
        """Begin a request, or return the open one of that id (its keys may have grown).

        An id that was closed and is opened again is a new generation with another handle, even while copies of
        the old one still run. Starts a store look-up.
        """
        if self.broken:
            raise UnavailableError("this cache is off; make a new one", because=self.broken)
        with self._alone("open"):
            books = self.books
            request = books.open.get(id)
            if request is not None:
                self._grow(request, keys)
                return request
            if any(len(key) != KEY_NBYTES for key in keys):
                raise ConfigError("a page key has 32 bytes", id=id)
            books.last_handle += 1
            books.stats.requests += 1
            request = Request(self, id, books.last_handle, namespace, list(keys))
            books.open[id] = books.requests[request.handle] = request
            self._reader.start_lookup(request)
            return request

    def extend(self, request: Request, keys: Sequence[PageKey]) -> None:
        """See :meth:`Request.extend`."""
        if self.broken:
            return
        with self._alone("extend"):
            request.must_be_open("extend")
            request.add_keys(keys)

    def _grow(self, request: Request, keys: Sequence[PageKey]) -> None:
        known = len(request.keys)
        if list(keys[:known]) != request.keys[: len(keys)]:
            raise InvariantError("an open request's prompt does not change", id=request.id)
        request.add_keys(keys[known:])

    def match(self, request: Request, computed: int = 0) -> Match:
        """See :meth:`Request.match`."""
        if self.broken:
            return Match(computed, 0, 0, 0, pending=False, ends=Reason.CANCELLED)
        with self._alone("match"):
            request.must_be_open("match")
            return self._reader.match(request, computed)

    def load(self, request: Request, match: Match, target: Sequence[int], *, arriving: bool = True) -> Load:
        """See :meth:`Request.load`."""
        if self.broken:
            return Load(match.start, 0, {}, Reason.CANCELLED)
        with self._alone("load"):
            if self.books.counts_wishes:
                self._publisher.count(request, match.start + match.pages)
            return self._reader.load(request, match, target, arriving=arriving)

    def publish(self, request: Request, upto: int, source: Sequence[int]) -> int:
        """See :meth:`Request.publish`."""
        if self.broken:
            return 0
        with self._alone("publish"):
            request.must_be_open("publish")
            if upto > min(len(request.keys), len(source)):
                raise InvariantError(
                    "pages beyond the keys or the endpoint ids",
                    upto=upto,
                    keys=len(request.keys),
                    ids=len(source),
                )
            return self._publisher.publish(request, upto, source)

    def release_endpoint(self, request: Request) -> None:
        """See :meth:`Request.release_endpoint`."""
        if self.broken:
            return
        with self._alone("release_endpoint"):
            request.must_be_open("release_endpoint")
            self._settler.ignore_loads(request)
            self._settler.withdraw_all(request, frozenset({JobKind.LOAD, JobKind.FETCH}))
            self._settler.owe(request)

    def close(self, request: Request, *, abort: bool = False) -> None:
        """See :meth:`Request.close`. Closing twice does nothing."""
        if self.broken:
            return
        with self._alone("close"):
            if request.closed:
                return
            request.closed = True
            del self.books.open[request.id]
            request.release_hold()
            self._fetcher.forget(request)
            self._settler.ignore_loads(request)
            self._settler.withdraw_all(request, _ON_ABORT if abort else _ON_FINISH)
            self._settler.owe(request)

    # ---- the two doors

    def take_jobs(self) -> Batch:
        """Everything that is to be done since the last call, in an order in which it may be started."""
        if self.broken:
            return Batch()
        with self._alone("take_jobs"):
            if self.books.worth is not None:
                self.books.start_clocks()
            jobs, applied = self.books.ledger.take()
            touched = tuple(self.books.touched)
            self.books.touched.clear()
            return Batch(jobs, applied, touched)

    def apply(self, done: Sequence[Done] = ()) -> list[Event]:
        """Apply results, in any order; returns what adapters must know, including what earlier calls caused."""
        if self.broken:
            return []
        with self._alone("apply"):
            for one in done:
                self._settler.apply(one)
            self._fetcher.advance()
            events = self.books.events
            self.books.events = []
            return events

    @property
    def idle(self) -> bool:
        """True when no Job is live."""
        return bool(self.broken) or not self.books.ledger.live

    def computed(self, pages: float, seconds: float) -> None:
        """The engine computed so many pages of a prompt in so long: what loading is weighed against."""
        if self.books.worth is not None:
            self.books.worth.computed(pages, seconds)

    # ---- the operator's verbs

    def evict(self, where: Where, pages: int) -> int:
        """Free ``pages`` slots of a memory tier beyond those that are free; returns how many could be freed now."""
        if self.broken:
            return 0
        with self._alone("evict"):
            return self._below.evict(self.books.tiers[where], pages)

    def flush(self) -> int:
        """Start writing down all that lower tiers lack; returns how many pages are missing below."""
        if self.broken:
            return 0
        with self._alone("flush"):
            return self._below.flush()

    def invalidate(self, namespace: Namespace) -> int:
        """Take every page of a namespace out of memory, as when its weights are others now; returns how many. O(pages).

        What is on its way still comes, and is the first to fall. Records of a store stay: nobody asks for them again
        under a root that is no more, and they leave by eviction or ``gc``.
        """
        if self.broken:
            return 0
        with self._alone("invalidate"):
            index, number = self.books.index, self.books.space(namespace)
            keys = [key for key, row in index.pages() if index.spaces[row] == number and index.resident(row)]
            self._settler.drop(keys)
            return len(keys)

    def attach_store(self) -> None:
        """A store is there from now on. Pages in memory are written with their ancestors when a request passes."""
        with self._alone("attach_store"):
            self.books.store = True
            self.books.store_since = self.books.ledger.last

    def detach_store(self) -> None:
        """The store is gone: nothing is asked of it any more, and nothing counts as stored. Running Jobs still end."""
        with self._alone("detach_store"):
            self.books.store = False
            flags = self.books.index.flags
            for row in range(len(flags)):
                flags[row] &= ~STORED
            for request in self.books.open.values():
                request.stored = 0
                self._fetcher.forget(request)

    # ---- looking in

    def pools(self) -> dict[Where, dict[str, int]]:
        """Slots by state for each memory tier; free + filling + ready + doomed + quarantined = total."""
        return {
            tier.where: {**tier.slots.counts(), "total": tier.slots.total} for tier in self.books.tiers.all
        }

    @property
    def stats(self) -> Stats:
        """A copy of the counters; they only grow."""
        evicted = {tier.where: tier.evicted for tier in self.books.tiers.all}
        return deepcopy(replace(self.books.stats, evicted={**self.books.stats.evicted, **evicted}))

    def check(self) -> None:
        """Recount everything; InvariantError with a dump when the books do not agree. O(pages)."""
        audit.check(self.books)

    def snapshot(self) -> Hashable:
        """The state as a hashable value: equal for two histories that lead to the same future. O(pages)."""
        order = sorted(self.books.requests)
        return audit.snapshot(self.books), tuple(order.index(handle) for handle in self._fetcher.waiting())
