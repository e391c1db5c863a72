"""Options under any name; nonsense of any kind is a ConfigError that names the key, the value and the nearest one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resolve_rig import machines, spec_of

from hicache.capability import COORDINATES, Capabilities, Declarations, Shards, StoreDeclaration
from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.resolve import Resolution, resolve
from hicache.resolve.aliases import NAMES, OPTIONS, canonical, from_flags
from hicache.resolve.request import Request, known_values, wishes

THERE = machines()["cpu"]
SPEC = spec_of("mha")


def ask(options):
    return resolve(wishes(options, SPEC, THERE, device_nbytes=1 << 20), THERE)


@pytest.mark.parametrize(
    "key,value,nearest",
    [
        ("layuot", "page_first", "layout"),
        ("hicache_mem_layuot", "page_first", "hicache_mem_layout"),
        ("--hicache-io-backnd", "kernel", "hicache_io_backend"),
        ("layout", "page_frist", "page_first"),
        ("hicache_mem_layout", "page_first_kv_split", "page_first_direct"),
        ("hicache_io_backend", "kernel_ascend", "kernel"),
        ("write_policy", "write_thru", "through"),
        ("hicache_storage_backend", "moncake", "mooncake"),
        ("hicache_storage_prefetch_policy", "wait_complet", "wait_complete"),
        ("host_mode", "bufer_only", "off"),
        ("layout", 3, None),
        ("strict", "perhaps", "true"),
        ("hicache_size", "ten", None),
        ("hicache_size", -1, None),
        ("hicache_ratio", "two", None),
        ("hicache_ratio", 0, None),
        ("host_fraction", 1.5, None),
        ("host_bytes", "ten", None),
        ("page_size", 7, None),
        ("enable_hierarchical_cache", False, "true"),
    ],
)
def test_a_wrong_word_is_an_error_that_names_the_nearest(key, value, nearest):
    with pytest.raises(ConfigError) as error:
        ask({key: value})
    assert "key=" in str(error.value)
    assert str(value) in str(error.value)
    if nearest is not None:
        assert f"nearest={nearest} " in f"{error.value} ".replace("]", " ")


def test_pasted_sizes_mean_what_they_mean_there():
    assert ask({"hicache_size": 3}).chosen.size.asked == 3 * 10**9
    assert ask({"hicache_size": "3", "hicache_ratio": 2.0}).chosen.size.asked == 3 * 10**9
    assert ask({"hicache_size": 0, "hicache_ratio": 2.0}).chosen.size.asked == 2 << 20
    with pytest.raises(ConfigError, match="twice"):
        ask({"host_bytes": 1 << 20, "host_ratio": 2.0})
    with pytest.raises(ConfigError, match="twice"):
        ask({"layout": "page_first", "hicache_mem_layout": "layer_first"})
    assert ask({"layout": "page_first", "hicache_mem_layout": "page_first"}).chosen.layout == "page_first"


@pytest.mark.parametrize("line", ["--hicache-mem-layout 'page", "page_first", "--layout a b", "--nonsense 1"])
def test_a_line_that_is_none_is_refused(line):
    with pytest.raises(ConfigError):
        canonical(from_flags(line))


names = st.one_of(
    st.sampled_from([*OPTIONS, *NAMES, "--hicache-mem-layout", "--strict"]),
    st.text(max_size=20),
    st.integers(),
)
values = st.one_of(
    st.sampled_from([v for row in known_values(THERE).values() for v in row]),
    st.sampled_from(["write_back", "file", "buffer_only", "1GiB", "2.0", "off"]),
    st.text(max_size=12),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.binary(max_size=4),
)


@settings(max_examples=1500)
@given(st.dictionaries(names, values, max_size=5))
def test_nonsense_is_resolved_or_refused_and_nothing_else(options):
    try:
        found = ask(options)
    except ConfigError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.context, "an error names values"
        return
    assert isinstance(found, Resolution)
    assert (found.chosen is None) == bool(found.refusals)


@settings(max_examples=300)
@given(st.text(max_size=20))
def test_nonsense_that_goes_round_the_edge_is_refused_too(word):
    for name in ("layout", "io", "store", "into_host", "into_store", "host_mode", "prefetch"):
        if word in known_values(THERE)[name]:
            continue
        with pytest.raises(ConfigError, match=f"unknown {name}"):
            resolve(Request(SPEC, **{name: word}), THERE)


# -- stores, shards and groups


@pytest.mark.parametrize("gone", sorted(COORDINATES))
def test_a_store_whose_names_lack_a_coordinate_is_refused_where_it_counts(gone):
    store = StoreDeclaration("plain", coordinates=COORDINATES - {gone})
    there = Declarations(THERE.platform, THERE.engines, THERE.layouts, (*THERE.stores, store))
    for shards in (Shards(), Shards(tensor=2), Shards(pipeline=2), Shards(tensor=2, pipeline=2)):
        for attention in ("mha", "draft"):
            spec = spec_of(attention, shards.count)
            counts = {
                "tensor rank": shards.tensor,
                "pipeline stage": shards.pipeline,
                "group": len(spec.groups),
            }
            found = resolve(Request(spec, store="plain", shards=shards), there)
            assert (found.chosen is None) == (counts[gone] > 1)
            if found.chosen is None:
                with pytest.raises(ConfigError, match=f"does not honour the {gone}: 2"):
                    found.require()


def test_shards_that_are_not_the_specs_are_refused():
    with pytest.raises(ConfigError, match="2 shards, the spec has 1"):
        resolve(Request(SPEC, shards=Shards(tensor=2)), THERE).require()


def test_a_name_that_is_declared_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        Declarations(Capabilities("cpu"), THERE.engines * 2, tuple(LAYOUTS.values()), ())


def test_an_outcome_is_plain_data():
    import json

    shown = ask({"layout": "page_first", "store": "memory"}).as_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["requested"]["layout"] == "page_first"
    assert shown["requested"]["io"] is None
    assert shown["chosen"]["layout"] == "page_first"
    assert shown["origins"] | {"layout": "user", "io": "default", "store": "user"} == shown["origins"]
    assert len(shown["candidates"]) == 2 * len(LAYOUTS)
