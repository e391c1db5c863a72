"""The books of the control plane: everything it knows, shared by the files that read, write and settle."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hicache.control.ledger import Ledger
from hicache.control.request import Request
from hicache.control.tiers import Tiers
from hicache.errors import ConfigError
from hicache.keys import Namespace, PageKey
from hicache.policy import EvictionPolicy, Lru, Worth, WritePolicy
from hicache.policy.base import NO_HINT
from hicache.records import Event, JobKind, Stats, Where
from hicache.spec import positive


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """What the control plane is to manage; sizes in pages, times in seconds on the controller's clock.

    device_slots and host_slots: 0 = no such tier; at least one must exist. store: whether there is one.
    into_host and into_store: the write policy of each leg. fetch_at: whether store pages are fetched when the
    look-up answers (ready sooner, but they hold slots) or when ``load`` asks (host slots only for what is used).
    fetch_pages_max: pages that prefetches may have in flight together (0: as many as there is room for).
    fetch_pages_min: fewer are not worth a prefetch. fetch_wait_s: how long a prefetch may wait for its turn.
    weighs: pages of the store are loaded only where that is faster than computing them.
    best_effort: ``load`` takes what is READY and waits for nothing that is on its way.
    deadlines: per kind; a kind not named is waited for. fetch_page_s: a fetch has so much more for each page, up to
    fetch_s_max in all. ghosts: how many absent pages ``selective`` remembers
    having seen (default: as many as memory slots).
    """

    device_slots: int = 0
    host_slots: int = 0
    store: bool = False
    shards: int = 1
    into_host: WritePolicy = WritePolicy.THROUGH
    into_store: WritePolicy = WritePolicy.THROUGH
    fetch_at: Literal["load", "lookup"] = "load"
    fetch_pages_max: int = 0
    fetch_pages_min: int = 0
    fetch_wait_s: float | None = None
    weighs: bool = False
    best_effort: bool = False
    deadlines: dict[JobKind, float] = field(default_factory=dict)
    fetch_page_s: float = 0.0
    fetch_s_max: float = float("inf")
    ghosts: int | None = None
    kv_events: bool = False
    eviction: EvictionPolicy = field(default_factory=Lru)

    def __post_init__(self) -> None:
        positive("device_slots", self.device_slots, minimum=0)
        positive("host_slots", self.host_slots, minimum=0)
        positive("shards", self.shards)
        positive("fetch_pages_max", self.fetch_pages_max, minimum=0)
        positive("fetch_pages_min", self.fetch_pages_min, minimum=0)
        if not self.device_slots and not self.host_slots:
            raise ConfigError("at least one memory tier is needed", device_slots=0, host_slots=0)
        if self.into_host is WritePolicy.BACK and not self.device_slots:
            raise ConfigError(
                "write policy back into host needs a device tier of our own: an engine does not say when it evicts",
                into_host="back",
                device_slots=0,
                nearest="through",
            )
        if self.best_effort and self.fetch_at == "load":
            raise ConfigError(
                "with best effort nothing is fetched as it is loaded, so nothing ever would be",
                fetch_at="load",
                nearest="lookup",
            )


class Ghosts:
    """How many requests have wanted a page, for pages anywhere or nowhere; the least recently wanted are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.hits: OrderedDict[PageKey, int] = OrderedDict()

    def count(self, key: PageKey) -> None:
        """One more request wants the page."""
        self.hits[key] = self.hits.pop(key, 0) + 1
        if len(self.hits) > self._limit:
            self.hits.popitem(last=False)

    def wanted(self, key: PageKey, policy: WritePolicy) -> bool:
        """True when enough requests have wanted the page for ``policy`` to write it on their way."""
        return policy.hits == 1 or (policy.hits > 1 and self.hits.get(key, 0) >= policy.hits)


class Books:
    """Tiers, Jobs, requests and counters of one controller."""

    def __init__(self, config: ControlConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        sizes = [(Where.DEVICE, config.device_slots), (Where.HOST, config.host_slots)]
        self.tiers = Tiers([(where, slots) for where, slots in sizes if slots])
        self.index = self.tiers.index
        self.ledger = Ledger(self.tiers, config.shards)
        self.store = config.store
        self.store_since = 0  # Jobs up to this id spoke with an earlier store
        self.open: dict[object, Request] = {}  # by request id
        self.requests: dict[int, Request] = {}  # by handle, including closing ones
        self.storing: dict[PageKey, int] = {}  # page -> the WRITE Job that carries it
        default_ghosts = config.device_slots + config.host_slots
        self.ghosts = Ghosts(default_ghosts if config.ghosts is None else config.ghosts)
        self.spaces: list[Namespace] = []
        self._space_of: dict[PageKey, int] = {}
        self.tick = 0
        self.touched: list[PageKey] = []
        self.events: list[Event] = []
        self.stats = Stats()
        self.worth = Worth() if config.weighs else None
        self.last_handle = 0

    @property
    def counts_wishes(self) -> bool:
        """True when some leg needs to know how many requests wanted a page."""
        return WritePolicy.SELECTIVE in (self.config.into_host, self.config.into_store)

    def start_clocks(self) -> None:
        """Fetches are about to be handed out: how long they take is counted from now."""
        for live in self.ledger.outbox.values():
            if live.job.kind is JobKind.FETCH:
                live.began = self.clock()

    def slower(self, pages: int) -> bool:
        """True when so many pages of the store are sooner computed than loaded."""
        return self.worth is not None and not self.worth.loading(pages)

    def space(self, namespace: Namespace) -> int:
        """The number of a namespace."""
        number = self._space_of.get(namespace.root)
        if number is None:
            number = len(self.spaces)
            self.spaces.append(namespace)
            self._space_of[namespace.root] = number
        return number

    def rank(self) -> int:
        """The order key of a page used now."""
        return self.config.eviction.rank(self.tick, NO_HINT)

    def touch(self, request: Request, page: int) -> None:
        """A request was served up to ``page``: it counts as used, in every tier."""
        key = request.keys[page]
        row = self.index.find(key)
        rank = self.rank()
        if row >= 0:
            for tier in self.tiers.all:
                slot = tier.at[row]
                if slot >= 0 and tier.rank[slot] < rank:
                    tier.rank[slot] = rank
        if self.store and request.namespace.durable:
            self.touched.append(key)

    def deadline(self, kind: JobKind, pages: int = 0) -> float | None:
        """When a Job of that kind that is emitted now is given up; a fetch has more time the more ``pages`` it brings."""
        seconds = self.config.deadlines.get(kind)
        if seconds is None:
            return None
        if kind is JobKind.FETCH:
            seconds = min(seconds + pages * self.config.fetch_page_s, self.config.fetch_s_max)
        return self.clock() + seconds
