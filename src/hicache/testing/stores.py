"""The contract suite of stores.

A new store inherits :class:`StoreContract`, says how it is made, and has its tests::

    class TestMyStore(StoreContract):
        durable = True

        def make(self, tmp_path, cap_bytes):
            return MyStore(tmp_path / "store", cap_bytes)
"""
# ruff: noqa: D102  (a test's name is its sentence)

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.data.store.base import Corrupt, Delete, Hit, Miss, Record, Touch, Usage, WriteOutcome
from hicache.keys import Namespace, RecordKey
from hicache.testing.faulty_store import FaultyStore
from hicache.testing.store_kit import (
    PAGE_NBYTES,
    OpenStore,
    StoreHarness,
    buffers,
    chain_of,
    page_of,
    read_back,
)

__all__ = ["PAGE_NBYTES", "FaultyStore", "StoreContract", "buffers", "chain_of", "page_of", "read_back"]

STORED, EXISTS = WriteOutcome.STORED, WriteOutcome.EXISTS


class StoreContract(StoreHarness):
    """What every store must do, one sentence a test."""

    # -- round trips --------------------------------------------------------------------------------------------

    def test_what_was_written_is_read_back(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 5)
        assert store.write(namespace, records) == [STORED] * 5
        assert read_back(store, namespace, records) == [True] * 5

    def test_reading_again_gives_the_same(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 3)
        store.write(namespace, records)
        assert [read_back(store, namespace, records) for _ in range(3)] == [[True] * 3] * 3

    def test_a_payload_may_come_and_go_in_pieces(self, new: OpenStore, namespace: Namespace) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        whole = memoryview(page_of(record.key))
        cut = [whole[:1], whole[1:4096], whole[4096:4097], whole[4097:]]
        assert store.write(namespace, [Record(record.key, None, "page_first", cut)]) == [STORED]
        target = memoryview(bytearray(PAGE_NBYTES))
        pieces = [target[:3000], target[3000:3001], target[3001:]]
        assert store.read(namespace, [record.key], [pieces]) == [Hit("page_first", PAGE_NBYTES)]
        assert target == whole

    def test_a_payload_may_come_in_more_pieces_than_a_system_call_takes(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        whole = memoryview(page_of(record.key))
        cut = [whole[i : i + 2] for i in range(0, PAGE_NBYTES, 2)]
        assert store.write(namespace, [Record(record.key, None, "page_first", cut)]) == [STORED]
        target = memoryview(bytearray(PAGE_NBYTES))
        into = [target[i : i + 3] for i in range(0, PAGE_NBYTES, 3)]
        assert store.read(namespace, [record.key], [into]) == [Hit("page_first", PAGE_NBYTES)]
        assert target == whole

    def test_the_layout_comes_back_with_the_bytes(self, new: OpenStore, namespace: Namespace) -> None:
        store = new(16)
        records = [
            Record(r.key, None, layout, r.payload)
            for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
            for r in chain_of(layout, 1)
        ]
        store.write(namespace, records)
        assert read_back(store, namespace, records) == [True] * 4

    def test_payloads_of_odd_lengths_survive(self, new: OpenStore, namespace: Namespace) -> None:
        for nbytes in (1, 511, 4096, 4097):
            store, records = new(40), chain_of(f"odd{nbytes}", 1, nbytes)
            assert store.write(namespace, records) == [STORED]
            assert read_back(store, namespace, records) == [True]

    def test_a_larger_buffer_is_filled_at_its_beginning_only(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        store.write(namespace, [record])
        target = memoryview(bytearray(b"\xaa" * (PAGE_NBYTES + 100)))
        assert store.read(namespace, [record.key], [[target]]) == [Hit("page_first", PAGE_NBYTES)]
        assert bytes(target) == page_of(record.key) + b"\xaa" * 100

    def test_a_smaller_buffer_is_a_miss(self, new: OpenStore, namespace: Namespace) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        store.write(namespace, [record])
        assert store.read(namespace, [record.key], buffers(1, PAGE_NBYTES - 1)) == [Miss("length")]
        assert read_back(store, namespace, [record]) == [True]

    def test_an_unknown_key_is_a_miss_and_leaves_its_neighbours_alone(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(16), chain_of("a", 3)
        store.write(namespace, records)
        mixed = [records[0], *chain_of("b", 1), records[2]]
        assert read_back(store, namespace, mixed) == [True, False, True]
        outcome = store.read(namespace, [mixed[1].key], buffers(1))
        assert outcome == [Miss("absent")]

    def test_an_empty_batch_is_fine(self, new: OpenStore, namespace: Namespace) -> None:
        store = new(16)
        assert store.write(namespace, []) == []
        assert store.read(namespace, [], []) == []
        assert store.contains(namespace, []) == []

    def test_an_unknown_layout_or_an_empty_payload_fails_alone(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(16), chain_of("a", 1)
        bad = [
            Record(chain_of("b", 1)[0].key, None, "sideways", records[0].payload),
            Record(chain_of("c", 1)[0].key, None, "page_first", []),
        ]
        failed = WriteOutcome.FAILED
        assert store.write(namespace, [*bad, *records]) == [failed, failed, STORED]

    # -- chains -------------------------------------------------------------------------------------------------

    def test_writing_again_says_exists_and_keeps_the_first_bytes(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        store.write(namespace, [record])
        other = Record(record.key, None, "page_first", [memoryview(bytes(PAGE_NBYTES))])
        assert store.write(namespace, [other]) == [EXISTS]
        assert read_back(store, namespace, [record]) == [True]

    def test_a_batch_that_partly_exists_stores_the_rest(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(32), chain_of("a", 16)
        store.write(namespace, records[:4])
        assert store.write(namespace, records) == [EXISTS] * 4 + [STORED] * 12

    def test_a_key_twice_in_a_batch_is_stored_once(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 1)
        assert store.write(namespace, records * 2) == [STORED, EXISTS]

    def test_a_record_without_its_parent_is_refused(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 3)
        assert store.write(namespace, [records[1]]) == [WriteOutcome.PARENT_ABSENT]
        assert store.contains(namespace, [records[1].key]) == [False]
        assert store.write(namespace, [records[0], records[2]]) == [STORED, WriteOutcome.PARENT_ABSENT]

    def test_children_before_their_parents_are_refused(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 2)
        assert store.write(namespace, records[::-1]) == [WriteOutcome.PARENT_ABSENT, STORED]

    def test_groups_of_a_page_hang_below_its_group_0(self, new: OpenStore, namespace: Namespace) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        second = RecordKey(record.key.page, group=1)
        below = Record(second, record.key, "page_first", [memoryview(page_of(second))])
        assert store.write(namespace, [below]) == [WriteOutcome.PARENT_ABSENT]
        assert store.write(namespace, [record, below]) == [STORED, STORED]
        assert read_back(store, namespace, [record, below]) == [True, True]

    def test_shards_are_separate_records(self, new: OpenStore, namespace: Namespace) -> None:
        store, (record,) = new(16), chain_of("a", 1)
        keys = [RecordKey(record.key.page, shard=shard) for shard in range(4)]
        records = [Record(key, None, "page_first", [memoryview(page_of(key))]) for key in keys]
        store.write(namespace, records[:3])
        assert store.contains(namespace, keys) == [True, True, True, False]
        assert read_back(store, namespace, records) == [True, True, True, False]

    def test_contains_says_what_reads_will_find(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(16), chain_of("a", 4)
        store.write(namespace, records[:2])
        assert store.contains(namespace, [r.key for r in records]) == [True, True, False, False]

    # -- namespaces -----------------------------------------------------------------------------------------------

    def test_another_namespace_sees_nothing_even_under_the_same_key(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(16), chain_of("a", 2)
        store.write(namespace, records)
        other = namespace.derive(salt="tenant")
        assert read_back(store, other, records) == [False, False]
        assert store.contains(other, [r.key for r in records]) == [False, False]
        assert not any(outcome.ok for outcome in store.write(other, records))
        assert read_back(store, namespace, records) == [True, True]

    def test_a_namespace_that_must_not_last_stays_out_of_durable_stores(self, new: OpenStore) -> None:
        store, records = new(16), chain_of("a", 2)
        passing = Namespace.of({"epoch": "random"}, durable=False)
        outcomes = store.write(passing, records)
        if self.durable:
            assert outcomes == [WriteOutcome.FAILED] * 2
            assert store.read(passing, [records[0].key], buffers(1)) == [Miss("not_durable")]
        else:
            assert outcomes == [STORED] * 2

    # -- the cap ------------------------------------------------------------------------------------------------

    def test_exactly_the_stated_capacity_fits(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(24), chain_of("a", 24)
        assert store.write(namespace, records) == [STORED] * 24
        assert read_back(store, namespace, records) == [True] * 24

    def test_the_cap_holds_at_every_step(self, new: OpenStore, namespace: Namespace) -> None:
        store = new(24)
        for number in range(40):
            store.write(namespace, chain_of(f"c{number}", 1 + number % 5))
            if isinstance(store, Usage):
                gauges = store.usage()
                assert gauges["used_bytes"] <= gauges["cap_bytes"]
                assert gauges["records"] <= 24

    def test_leaves_go_before_their_parents_and_the_coldest_first(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        if not self.evicts:
            pytest.skip("does not evict by itself")
        store = new(24)
        old, young = chain_of("old", 12), chain_of("young", 12)
        store.write(namespace, old)
        store.write(namespace, young)
        assert store.write(namespace, chain_of("new", 4)) == [STORED] * 4
        assert read_back(store, namespace, old) == [True] * 8 + [False] * 4
        assert read_back(store, namespace, young) == [True] * 12

    def test_reading_the_end_of_a_chain_keeps_all_of_it(self, new: OpenStore, namespace: Namespace) -> None:
        if not self.evicts:
            pytest.skip("does not evict by itself")
        store = new(24)
        old, young = chain_of("old", 12), chain_of("young", 12)
        store.write(namespace, old)
        store.write(namespace, young)
        read_back(store, namespace, old)
        self.settle(store)
        store.write(namespace, chain_of("new", 6))
        assert read_back(store, namespace, old) == [True] * 12
        assert read_back(store, namespace, young) == [True] * 6 + [False] * 6

    def test_touching_counts_as_use(self, new: OpenStore, namespace: Namespace) -> None:
        store = new(24)
        if not isinstance(store, Touch) or not self.evicts:
            pytest.skip("has no recency to touch")
        singles = [chain_of(f"s{i}", 1)[0] for i in range(24)]
        store.write(namespace, singles)
        store.touch([singles[0].key, chain_of("unknown", 1)[0].key])
        self.settle(store)
        store.write(namespace, chain_of("new", 2))
        held = store.contains(namespace, [r.key for r in singles])
        assert held == [True, False, False] + [True] * 21

    def test_a_batch_never_evicts_its_own_ancestors(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(24), chain_of("a", 24)
        store.write(namespace, records[:12])
        store.write(namespace, chain_of("b", 12))
        for record in records[12:]:
            assert store.write(namespace, [record]) == [STORED]
        assert read_back(store, namespace, records) == [True] * 24

    def test_a_batch_larger_than_the_store_keeps_a_prefix(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(24), chain_of("a", 40)
        outcomes = store.write(namespace, records)
        assert outcomes[:24] == [STORED] * 24
        assert not any(outcome.ok for outcome in outcomes[24:])
        assert read_back(store, namespace, records) == [True] * 24 + [False] * 16

    # -- damage -------------------------------------------------------------------------------------------------

    def test_a_damaged_record_is_found_and_the_next_write_repairs_it(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(32), chain_of("a", 16)
        store.write(namespace, records)
        if not self.corrupt(store, records[5].key):
            pytest.skip("offers no way to damage a record")
        outcomes = store.read(namespace, [r.key for r in records], buffers(16))
        assert isinstance(outcomes[5], Corrupt)
        assert [isinstance(o, Hit) for o in outcomes] == [True] * 5 + [False] + [True] * 10
        assert store.contains(namespace, [records[5].key]) == [False]
        assert store.write(namespace, records) == [EXISTS] * 5 + [STORED] + [EXISTS] * 10
        assert read_back(store, namespace, records) == [True] * 16

    def test_nothing_is_written_below_a_damaged_record(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(32), chain_of("a", 4)
        store.write(namespace, records[:3])
        if not self.corrupt(store, records[1].key):
            pytest.skip("offers no way to damage a record")
        assert read_back(store, namespace, records[:3]) == [True, False, True]
        sibling = Record(chain_of("b", 1)[0].key, records[1].key, "page_first", records[3].payload)
        assert store.write(namespace, [sibling]) == [WriteOutcome.PARENT_ABSENT]

    def test_a_deleted_record_is_gone_and_its_children_wait_for_it(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(32), chain_of("a", 3)
        if not isinstance(store, Delete):
            pytest.skip("cannot forget on request")
        store.write(namespace, records)
        assert store.delete([records[1].key, chain_of("unknown", 1)[0].key]) == 1
        assert read_back(store, namespace, records) == [True, False, True]
        assert store.write(namespace, records) == [EXISTS, STORED, EXISTS]
        assert store.delete([r.key for r in records]) == 3
        assert read_back(store, namespace, records) == [False] * 3
        assert not isinstance(store, Usage) or store.usage()["records"] == 0

    # -- life ---------------------------------------------------------------------------------------------------

    def test_four_threads_at_once_see_only_whole_pages(self, new: OpenStore, namespace: Namespace) -> None:
        store = new(48)
        stop = threading.Event()

        def work(number: int) -> int:
            rng, hits = random.Random(number), 0  # noqa: S311  (repeatable, not secret)
            for _ in range(25):
                records = chain_of(f"t{rng.randrange(12)}", 1 + rng.randrange(6))
                outcomes = store.write(namespace, records)
                assert WriteOutcome.FAILED not in outcomes
                hits += sum(read_back(store, namespace, records))
                if stop.is_set():
                    break
            return hits

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, number) for number in range(4)]
            try:
                assert all(future.result() > 0 for future in futures)
            finally:
                stop.set()

    def test_the_same_chain_from_four_threads_is_stored_once(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(48), chain_of("a", 8)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: store.write(namespace, records), range(4)))
        assert all(outcome.ok for outcomes in results for outcome in outcomes)
        assert sum(outcomes.count(STORED) for outcomes in results) == 8

    def test_closing_twice_is_fine_and_a_closed_store_answers_politely(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(16), chain_of("a", 2)
        store.write(namespace, records)
        store.close()
        store.close()
        assert store.read(namespace, [r.key for r in records], buffers(2)) == [Miss("closed")] * 2
        assert store.write(namespace, records) == [WriteOutcome.FAILED] * 2
        assert store.contains(namespace, [r.key for r in records]) == [False, False]

    def test_records_are_there_after_reopening_if_and_only_if_durable(
        self, new: OpenStore, namespace: Namespace
    ) -> None:
        store, records = new(16), chain_of("a", 4)
        store.write(namespace, records)
        store.close()
        assert read_back(new(16), namespace, records) == [self.durable] * 4

    def test_usage_counts_what_happened(self, new: OpenStore, namespace: Namespace) -> None:
        store, records = new(24), chain_of("a", 3)
        if not isinstance(store, Usage):
            pytest.skip("does not know its size")
        store.write(namespace, records)
        store.write(namespace, records)
        read_back(store, namespace, [*records, *chain_of("b", 1)])
        gauges = store.usage()
        wanted = {"records": 3, "stored": 3, "exists": 3, "hits": 3, "misses": 1, "corrupt": 0}
        assert {name: gauges[name] for name in wanted} == wanted
        assert gauges["stored_bytes"] == gauges["hit_bytes"] == 3 * PAGE_NBYTES
