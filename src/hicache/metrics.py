"""Metrics: a controller's counters, its pools and a store's gauges as Prometheus text.

    text = Metrics(stats=lambda: controller.stats, pools=controller.pools, usage=store.usage).text()

Everything is read when it is asked for; nothing is kept. A reader on another thread sees each number as it is at
some moment of the reading, not all at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache.records import Stats, Where

_TIERS: dict[Where, str] = {where: where.name.lower() for where in Where if where != Where.ENDPOINT}

_PLAIN = {
    "requests": "Requests opened.",
    "saved": "Pages copied from the engine's memory.",
    "duplicates": "Pages offered that were held already.",
    "not_saved": "Times that publishing stopped because no room could be made.",
    "not_stored": "Pages that the tier below did not take.",
    "deferred": "Prefetches that had to wait for their turn.",
    "expired": "Prefetches that waited too long and were given up.",
    "slower": "Pages left in the store because computing them is faster.",
    "withdrawn_jobs": "Jobs taken back before they were handed out.",
    "stuck_jobs": "Jobs given up while their call hung.",
}
_BY_TIER = {
    "loaded": "Pages loaded, by the tier that had them.",
    "stored": "Pages that became complete in a tier.",
    "evicted": "Pages that left a tier to make room.",
    "dropped": "Pages that left a tier because they were bad.",
}


@dataclass(frozen=True)
class Metrics(Collector):
    """What is to be shown, as functions that read it.

    ``usage`` is absent where there is no store; ``health`` says which tier is off although it was asked for, and why;
    ``estimates`` are the seconds by which it is decided whether to load or to compute.
    """

    stats: Callable[[], Stats]
    pools: Callable[[], Mapping[Where, Mapping[str, int]]]
    usage: Callable[[], Mapping[str, int]] | None = None
    health: Callable[[], Mapping[str, str]] | None = None
    estimates: Callable[[], Mapping[str, float]] | None = None

    def collect(self) -> Iterator[Metric]:
        """All families, read now."""
        yield from self._counters()
        slots = GaugeMetricFamily(
            "hicache_slots", "Slots of a memory tier, by state.", labels=["tier", "state"]
        )
        total = GaugeMetricFamily("hicache_pool_slots", "Slots of a memory tier, in all.", labels=["tier"])
        for where, counts in self.pools().items():
            for state, number in counts.items():
                if state == "total":
                    total.add_metric([_TIERS[where]], number)
                else:
                    slots.add_metric([_TIERS[where], state], number)
        yield slots
        yield total
        if self.usage is not None:
            store = GaugeMetricFamily("hicache_store", "What the store says of itself.", labels=["name"])
            for name, number in sorted(self.usage().items()):
                store.add_metric([name], number)
            yield store
        if self.health is not None:
            off = GaugeMetricFamily(
                "hicache_off", "1 for a tier that does not work.", labels=["tier", "reason"]
            )
            for tier, reason in self.health().items():
                off.add_metric([tier, reason], 1)
            yield off
        if self.estimates is not None:
            seconds = GaugeMetricFamily(
                "hicache_estimate_seconds", "What fetching and computing take, as learned.", labels=["of"]
            )
            for name, value in self.estimates().items():
                seconds.add_metric([name], value)
            yield seconds

    def _counters(self) -> Iterator[Metric]:
        stats = self.stats()
        for name, words in _PLAIN.items():
            yield CounterMetricFamily(f"hicache_{name}", words, value=getattr(stats, name))
        for name, words in _BY_TIER.items():
            family = CounterMetricFamily(f"hicache_{name}_pages", words, labels=["tier"])
            for where, tier in _TIERS.items():
                family.add_metric([tier], getattr(stats, name)[where])
            yield family
        bad = CounterMetricFamily(
            "hicache_bad_pages", "Pages that did not arrive, by reason.", labels=["reason"]
        )
        for reason, pages in stats.bad.items():
            bad.add_metric([reason.value], pages)
        yield bad

    def text(self) -> str:
        """The metrics in Prometheus' text format, from a registry of their own."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()
