"""The driver: requests of a trace, one at a time, through the production Controller's two doors.

Every request finds the copies of those before it ended: contention between requests is not modelled, only what the
tiers hold. What a copy costs is the cost model's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hicache.control import ControlConfig, Controller
from hicache.errors import ConfigError
from hicache.keys import Namespace, PageKey
from hicache.policy import EvictionPolicy, Lru, WritePolicy
from hicache.records import Batch, Done, Event, JobKind, Loaded, Where
from hicache.simulate.store import SimulatedStore
from hicache.simulate.trace import Arrival

Rules = Literal["engine", "reference"]
"""engine: full pages only, and the last token of a prompt is always computed. reference: as the public simulators
count: a partial tail page is a page, and a whole prompt may hit."""

_SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive ids differ in their first byte
_LOW = (1 << 64) - 1
_ID_NBYTES = 24
TIERS = (Where.DEVICE, Where.HOST, Where.STORE)


def page_key(page_id: int) -> PageKey:
    """A page key for an id of a trace: different ids have different keys, spread evenly by their first byte."""
    return (page_id * _SPREAD & _LOW).to_bytes(8, "big") + page_id.to_bytes(_ID_NBYTES, "big", signed=True)


@dataclass(frozen=True, slots=True)
class House:
    """What is simulated; sizes in pages, 0 = no such tier."""

    page_tokens: int
    device: int = 0
    host: int = 0
    store: int = 0
    rules: Rules = "engine"
    into_host: WritePolicy = WritePolicy.THROUGH
    into_store: WritePolicy = WritePolicy.THROUGH
    policy: Callable[[], EvictionPolicy] = Lru

    def __post_init__(self) -> None:
        if self.store and not self.host and not self.device:
            raise ConfigError(
                "pages of the store pass through a memory tier; name one",
                store_pages=self.store,
                host=0,
                device=0,
            )


@dataclass(slots=True)
class Outcome:
    """What became of each request, in order: prompt tokens, and tokens that came from each tier. 40 bytes a request."""

    at: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    hits: dict[Where, array[int]] = field(default_factory=lambda: {tier: array("q") for tier in TIERS})

    def add(self, arrival: Arrival, by_tier: dict[Where, int]) -> None:
        """One more request."""
        self.at.append(arrival.at)
        self.tokens.append(arrival.tokens)
        for tier in TIERS:
            self.hits[tier].append(by_tier.get(tier, 0))


class Simulator:
    """A controller, a store without bytes, and a clock that shows the time of the trace."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._now = 0.0
        config = ControlConfig(
            device_slots=house.device,
            host_slots=house.host,
            store=house.store > 0,
            into_host=house.into_host,
            into_store=house.into_store,
            eviction=house.policy(),
        )
        self.controller = Controller(config, lambda: self._now)
        self.store = SimulatedStore(house.store) if house.store else None
        self._space = Namespace.of({"trace": "simulated"})
        self._serial = 0
        self.pages_moved = dict.fromkeys(JobKind, 0)

    def run(self, arrivals: Iterable[Arrival], step: Callable[[Arrival], None] | None = None) -> Outcome:
        """Simulate every request; ``step`` is called after each, for progress."""
        outcome = Outcome()
        for arrival in arrivals:
            outcome.add(arrival, self.request(arrival))
            if step is not None:
                step(arrival)
        return outcome

    def request(self, arrival: Arrival) -> dict[Where, int]:
        """Serve one request: look up, load, publish, close. Returns the tokens that came from each tier."""
        house, size = self._house, self._house.page_tokens
        self._now = arrival.at
        self._serial += 1
        reference = house.rules == "reference"
        pages = len(arrival.ids) if reference else arrival.tokens // size
        keys = [page_key(one) for one in arrival.ids[:pages]]
        upto = pages if reference else min(pages, max(0, arrival.tokens - 1) // size)
        request = self.controller.open(self._serial, self._space, keys)
        if self.store is not None:
            self._settle()
        by_tier: dict[Where, int] = {}
        match = request.match()
        wanted = min(upto, match.pages)
        if wanted:
            load = request.load(match, range(wanted))
            good = load.pages
            for event in self._settle():
                if isinstance(event, Loaded):
                    good = event.good
            by_tier = self._tokens(load.by_tier, good, arrival.tokens)
        request.publish(pages, range(pages))
        self._settle()
        request.close()
        self._settle()
        return by_tier

    def _tokens(self, by_tier: Mapping[Where, int], good: int, tokens: int) -> dict[Where, int]:
        """Tokens from each tier: pages come from the highest tier first, and the last one may be partial."""
        size, done = self._house.page_tokens, 0
        result = {}
        for tier in TIERS:
            pages = min(by_tier.get(tier, 0), good - done)
            result[tier] = min(tokens, (done + pages) * size) - min(tokens, done * size)
            done += pages
        return result

    def _settle(self) -> list[Event]:
        """Let every Job end."""
        events: list[Event] = []
        controller = self.controller
        while True:
            batch = controller.take_jobs()
            if self.store is not None and batch.touched:
                self.store.touch(batch.touched)
            events += controller.apply(self._run(batch))
            if controller.idle:
                return events

    def _run(self, batch: Batch) -> list[Done]:
        done = []
        for job in batch.jobs:
            self.pages_moved[job.kind] += job.pages
            store = self.store
            if store is None or job.kind in (JobKind.LOAD, JobKind.SAVE, JobKind.DOWN):
                done.append(Done(job.id))
            elif job.kind is JobKind.LOOKUP:
                done.append(Done(job.id, found=store.found(job.keys)))
            elif job.kind is JobKind.FETCH:
                done.append(Done(job.id, bad=store.fetch([key for span in job.spans for key in span.keys])))
            else:
                keys = [key for span in job.spans for key in span.keys]
                done.append(Done(job.id, bad=store.write(keys, job.parents, self._space.root)))
        return done
