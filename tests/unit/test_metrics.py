"""Metrics show what the controller, the pools and the store say, and nothing of an earlier moment."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from hicache.metrics import Metrics
from hicache.records import Reason, Stats, Where


def samples(metrics):
    families = text_string_to_metric_families(metrics.text())
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_every_counter_is_shown_as_it_is_now():
    stats = Stats()
    usage = {"records": 3, "cap_bytes": 9}
    metrics = Metrics(
        stats=lambda: stats,
        pools=lambda: {Where.HOST: {"free": 4, "ready": 1, "total": 5}},
        usage=lambda: usage,
    )
    stats.requests, stats.saved, stats.duplicates, stats.not_saved = 1, 2, 3, 4
    stats.not_stored, stats.withdrawn_jobs, stats.stuck_jobs = 5, 6, 7
    stats.deferred, stats.expired = 8, 9
    for number, table in enumerate((stats.loaded, stats.stored, stats.evicted, stats.dropped), 10):
        table[Where.HOST] = number
    stats.bad[Reason.CORRUPT] = 20
    found = samples(metrics)
    expected = {
        ("hicache_requests_total",): 1,
        ("hicache_saved_total",): 2,
        ("hicache_duplicates_total",): 3,
        ("hicache_not_saved_total",): 4,
        ("hicache_not_stored_total",): 5,
        ("hicache_withdrawn_jobs_total",): 6,
        ("hicache_stuck_jobs_total",): 7,
        ("hicache_deferred_total",): 8,
        ("hicache_expired_total",): 9,
        ("hicache_loaded_pages_total", "host"): 10,
        ("hicache_stored_pages_total", "host"): 11,
        ("hicache_evicted_pages_total", "host"): 12,
        ("hicache_dropped_pages_total", "host"): 13,
        ("hicache_bad_pages_total", "corrupt"): 20,
        ("hicache_slots", "free", "host"): 4,
        ("hicache_slots", "host", "ready"): 1,
        ("hicache_pool_slots", "host"): 5,
        ("hicache_store", "records"): 3,
        ("hicache_store", "cap_bytes"): 9,
    }
    assert found.items() >= expected.items()
    fields = set(Stats.__dataclass_fields__)
    assert {
        name.removeprefix("hicache_").removesuffix("_total").removesuffix("_pages") for name, *_ in found
    } >= fields
    stats.requests = 100
    assert samples(metrics)["hicache_requests_total",] == 100


def test_without_a_store_there_is_no_store_family():
    assert not any(
        name.startswith("hicache_store") and "pages" not in name
        for name, *_ in samples(Metrics(stats=Stats, pools=dict))
    )
