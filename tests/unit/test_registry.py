"""Stores by name: lazily loaded, clashes refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from hicache import registry
from hicache.errors import ConfigError
from hicache.spec import CacheSpec, Group, Plane

SPEC = CacheSpec((Group("kv", (Plane("k", 1, 4, 1, 64),)),), 4)


def offer(monkeypatch, *entries):
    points = [EntryPoint(name, value, registry.GROUP) for name, value in entries]

    def entry_points(*, group, name=None):
        assert group == registry.GROUP
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_the_built_in_stores(tmp_path):
    memory = registry.store_factory("memory")({"cap_bytes": 1 << 20}, SPEC)
    assert memory.usage()["cap_bytes"] == 1 << 20
    segment = registry.store_factory("segment")({"path": str(tmp_path / "a" / "b"), "cap_bytes": None}, SPEC)
    try:
        assert segment.usage()["cap_bytes"] > 1 << 20  # a tenth of what is free
    finally:
        segment.close()


def test_a_store_of_another_package_is_imported_when_it_is_asked_for(monkeypatch):
    offer(monkeypatch, ("other", "collections:OrderedDict"), ("broken", "no.such.module:Store"))
    assert registry.store_factory("other").__name__ == "OrderedDict"
    with pytest.raises(ConfigError, match="cannot be imported"):
        registry.store_factory("broken")


def test_an_unknown_store_is_named_with_the_nearest(monkeypatch):
    offer(monkeypatch, ("mooncake", "a:b"))
    with pytest.raises(ConfigError) as refusal:
        registry.store_factory("mooncaek")
    assert refusal.value.context["nearest"] == "mooncake"
    assert refusal.value.context["known"] == "memory,segment,mooncake"


@pytest.mark.parametrize("entries", [[("memory", "a:b")], [("x", "a:b"), ("x", "c:d")]])
def test_two_stores_of_one_name_are_refused(monkeypatch, entries):
    offer(monkeypatch, *entries)
    with pytest.raises(ConfigError, match="two stores of one name"):
        registry.store_factory(entries[0][0])


def test_the_same_offer_found_twice_is_one(monkeypatch):
    offer(monkeypatch, ("x", "collections:OrderedDict"), ("x", "collections:OrderedDict"))
    assert registry.store_factory("x").__name__ == "OrderedDict"
