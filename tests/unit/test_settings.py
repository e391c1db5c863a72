"""Every key survives every way in; nonsense is refused with the key, the value and the nearest valid name."""

from __future__ import annotations

import json
import math
import string
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.layout import LAYOUTS
from hicache.settings import (
    Deadlines,
    HostSettings,
    MemoryStoreSettings,
    OtherStoreSettings,
    SegmentStoreSettings,
    Settings,
    TierSettings,
    load,
    read,
    variable_names,
)
from hicache.tables import as_table, from_table, parse_bytes

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
sizes = st.one_of(
    st.integers(1, 2**63 - 1),
    st.builds(
        "{}{}{}".format, st.integers(1, 4096), st.sampled_from(["", " "]), st.sampled_from(list(UNITS))
    ),
    st.builds("{}.5{}".format, st.integers(1, 4096), st.sampled_from(["KiB", "MiB", "GiB", "TiB"])),
)
seconds = st.floats(0.001, 86_400)
names = st.text(string.ascii_lowercase, min_size=1, max_size=12)
tiers = st.builds(TierSettings, bytes=sizes)
hosts = st.one_of(
    st.builds(HostSettings, bytes=sizes, mode=st.sampled_from(["cache", "staging"])),
    st.builds(HostSettings, ratio=st.floats(0.01, 100)),
    st.builds(HostSettings, fraction=st.floats(0.01, 1)),
)
stores = st.one_of(
    st.builds(MemoryStoreSettings, cap=sizes),
    st.builds(SegmentStoreSettings, path=names, cap=st.none() | sizes),
    st.builds(
        OtherStoreSettings,
        type=names.filter(lambda name: name not in ("memory", "segment")),
        table=st.dictionaries(names, st.integers() | names, max_size=3),
    ),
)
policies = st.sampled_from(["through", "selective", "back"])
all_settings = st.builds(
    Settings,
    page_tokens=st.integers(1, 10**6),
    layout=st.sampled_from(list(LAYOUTS)),
    into_host=policies,
    into_store=policies,
    fetch_at=st.sampled_from(["load", "lookup"]),
    device=st.none() | tiers,
    host=hosts,
    store=st.none() | stores,
    deadlines=st.builds(Deadlines, lookup_s=seconds, fetch_s=seconds, write_s=seconds, close_s=seconds),
)


def toml(table, path=()):
    """A table as TOML text: enough for settings."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for key, inner in table.items():
        if isinstance(inner, dict):
            lines += [f"[{'.'.join((*path, key))}]", *toml(inner, (*path, key)).splitlines()]
    return "\n".join(lines)


@given(all_settings)
def test_every_key_survives_a_table_a_file_and_keywords(tmp_path_factory, settings):
    table = as_table(settings)
    assert from_table(Settings, table) == settings
    assert tomllib.loads(toml(table)) == table
    file = tmp_path_factory.mktemp("settings") / "hicache.toml"
    file.write_text(toml(table))
    assert load(file, environ={}) == settings
    assert load(environ={"HICACHE_CONFIG": str(file)}) == settings
    assert load(environ={}, **table) == settings
    assert load(environ={}, **{name: getattr(settings, name) for name in table}) == settings


def leaves(table, path=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@given(all_settings.filter(lambda s: not isinstance(s.store, OtherStoreSettings)))
def test_every_key_can_be_set_by_its_variable(settings):
    variables = variable_names()
    environ = {variables[key]: str(value) for key, value in leaves(as_table(settings))}
    reading = read(environ=environ)
    assert reading.settings.page_tokens == settings.page_tokens
    assert reading.settings.deadlines == settings.deadlines
    for tier in ("device", "host"):
        mine, theirs = getattr(settings, tier), getattr(reading.settings, tier)
        assert (mine and mine.nbytes) == (theirs and theirs.nbytes)
    assert (settings.store and settings.store.options()) == (
        reading.settings.store and reading.settings.store.options()
    )
    assert set(reading.origins.values()) == {"environment"}
    assert set(reading.origins) == set(dict(leaves(as_table(settings))))


def test_keywords_before_environment_before_file_before_defaults(tmp_path):
    file = tmp_path / "hicache.toml"
    file.write_text('page_tokens = 2\nlayout = "page_head"\ninto_store = "back"\n[host]\nbytes = "1MiB"\n')
    environ = {"HICACHE_PAGE_TOKENS": "3", "HICACHE_LAYOUT": "layer_first"}
    reading = read(file, environ=environ, page_tokens=4)
    assert reading.settings == Settings(
        page_tokens=4, layout="layer_first", into_store="back", host=HostSettings(bytes="1MiB")
    )
    assert reading.origins == {
        "page_tokens": "keyword",
        "layout": "environment",
        "into_store": f"file {file}",
        "host.bytes": f"file {file}",
    }


def test_tables_are_merged_key_by_key_unless_switched_off_or_of_another_type():
    environ = {"HICACHE_STORE_TYPE": "segment", "HICACHE_STORE_PATH": "/a", "HICACHE_STORE_CAP": "1GiB"}
    assert load(environ=environ, store={"path": "/b"}).store == SegmentStoreSettings(path="/b", cap="1GiB")
    assert load(environ=environ, store="off").store is None
    assert load(environ=environ, store=None).store is None
    memory = load(environ=environ, store={"type": "memory", "cap": 5}).store
    assert memory == MemoryStoreSettings(cap=5)
    assert load(environ={"HICACHE_HOST": "off", "HICACHE_DEVICE_BYTES": "1MiB"}).host is None
    with pytest.raises(ConfigError, match="given twice"):
        load(environ={"HICACHE_HOST": "off", "HICACHE_HOST_BYTES": "1MiB"})


@pytest.mark.parametrize(
    "given_,key,more",
    [
        ({"page_token": 3}, "page_token", {"nearest": "page_tokens"}),
        ({"host": {"byte": 3}}, "host.byte", {"nearest": "host.bytes"}),
        ({"hosts": {"bytes": 3}}, "hosts", {"nearest": "host"}),
        ({"page_tokens": "16"}, "page_tokens", {"value": "'16'", "expected": "int"}),
        ({"page_tokens": True}, "page_tokens", {"expected": "int"}),
        ({"page_tokens": 1.0}, "page_tokens", {"expected": "int"}),
        ({"page_tokens": 0}, "page_tokens", {"value": 0}),
        ({"layout": "page-first"}, "layout", {"expected": "one of " + ",".join(LAYOUTS)}),
        ({"into_host": "write_through"}, "into_host", {"expected": "one of through,selective,back"}),
        ({"host": "64MiB"}, "host", {"expected": "a table, or 'off'"}),
        ({"deadlines": "off"}, "deadlines", {"expected": "a table"}),
        ({"device": {}}, "device.bytes", {}),
        ({"host": {"bytes": 1, "ratio": 2.0}}, "host.ratio", {"also": "bytes"}),
        ({"host": {"ratio": 0.0}}, "host.ratio", {}),
        ({"host": {"fraction": 1.5}}, "host.fraction", {"expected": "more than 0, at most 1"}),
        ({"io": "kernle"}, "io", {"nearest": "kernel"}),
        ({"host": None}, "host", {"device": "off"}),
        ({"store": {"type": "segment"}}, "store.path", {"expected": "str"}),
        ({"store": {"cap": "1GiB"}}, "store.type", {"known": "memory,segment"}),
        ({"store": {"type": "theirs", "table": None}}, "store.table", {"expected": "a table"}),
        ({"bytes": 3}, "bytes", {"nearest": "device.bytes or host.bytes"}),
        ({"path": "/a"}, "path", {"nearest": "store.path"}),
        ({"strict": None}, "strict", {"value": "None"}),
        ({"store": {"type": "segmnt", "path": "/a"}}, "store.type", {"nearest": "segment"}),
        ({"store": {"type": "memory", "cap": 1, "path": "/a"}}, "store.path", {}),
        ({"store": {"type": "segment", "path": ""}}, "store.path", {}),
        ({"store": {"type": "segment", "path": "a", "cap": "10%"}}, "store.cap", {"value": "'10%'"}),
        ({"deadlines": {"lookup_s": 0}}, "deadlines.lookup_s", {"value": 0.0}),
        ({"deadlines": {"lookup_s": math.inf}}, "deadlines.lookup_s", {}),
        ({"deadlines": {"lookup_s": math.nan}}, "deadlines.lookup_s", {}),
        ({"deadlines": {"lookup": 1}}, "deadlines.lookup", {"nearest": "deadlines.lookup_s"}),
    ],
)
def test_what_does_not_fit_is_named(given_, key, more):
    with pytest.raises(ConfigError) as refusal:
        load(environ={}, **given_)
    assert refusal.value.context["key"] == key
    assert refusal.value.context.items() >= more.items()


def test_a_type_may_be_left_out_where_the_keys_fit_only_one():
    assert load(environ={"HICACHE_STORE_PATH": "/a"}).store == SegmentStoreSettings(path="/a")
    assert load(environ={}, store={"path": "/a", "cap": "1GiB"}).store == SegmentStoreSettings(
        path="/a", cap="1GiB"
    )


def test_none_asks_for_nothing_whatever_lies_below():
    assert load(environ={"HICACHE_LAYOUT": "page_head"}, layout=None).layout is None


@pytest.mark.parametrize(
    "size",
    ["64MB", "64mib", "-1", "1.1B", "0", "0.3KiB", "", " 1", "1 ", "1e3", "٣", "1KiB\n", "9" * 400 + ".5GiB"],
)
def test_what_is_not_exactly_a_size_is_refused(size):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, 2**63])
def test_what_is_not_exactly_a_number_of_bytes_is_refused(size):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(size)


@given(st.integers(1, 2**20), st.sampled_from(list(UNITS)))
def test_a_size_is_its_number_times_its_unit(number, unit):
    assert parse_bytes(f"{number}{unit}") == parse_bytes(f"{number} {unit}") == number * UNITS[unit]
    if unit != "B":
        assert parse_bytes(f"{number}.25{unit}") == number * UNITS[unit] + UNITS[unit] // 4


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({part for key in variable_names() for part in key.split(".")} | {"table", "x"})


@given(st.dictionaries(st.sampled_from(KEYS), st.dictionaries(st.sampled_from(KEYS), anything) | anything))
def test_nonsense_is_refused_or_means_itself(table):
    settings, refusal = None, None
    try:
        settings = load(environ={}, **table)
    except ConfigError as error:
        refusal = error
    if settings is None:
        assert "key" in refusal.context
    else:
        assert from_table(Settings, as_table(settings)) == settings


@pytest.mark.parametrize(
    "name,nearest",
    [
        ("HICACHE_PAGETOKENS", "HICACHE_PAGE_TOKENS"),
        ("HICACH_PAGE_TOKENS", "HICACHE_PAGE_TOKENS"),
        ("HICAHCE_STORE_PATH", "HICACHE_STORE_PATH"),
        ("HI_CACHE_LAYOUT", "HICACHE_LAYOUT"),
        ("hicache_layout", "HICACHE_LAYOUT"),
        ("HICACHE_", "HICACHE_IO"),
    ],
)
def test_a_variable_that_was_meant_for_us_and_is_read_by_nobody_is_an_error(name, nearest):
    with pytest.raises(ConfigError) as refusal:
        load(environ={name: "1"})
    assert refusal.value.context["key"] == name
    assert refusal.value.context["nearest"] == nearest
    assert set(refusal.value.context["known"].split(",")) == {"HICACHE_CONFIG", *variable_names().values()}


def test_other_peoples_variables_are_left_alone():
    environ = {"CACHE_DIR": "", "CCACHE_DIR": "", "SCCACHE_X": "", "SGLANG_HICACHE_X": "", "HOME": "", "": ""}
    assert load(environ=environ) == Settings()


@pytest.mark.parametrize("text", [" 3", "3 ", "3.0", "", "0x3", "1_0", "three", "null"])
def test_a_variable_is_parsed_as_strictly_as_a_file(text):
    with pytest.raises(ConfigError) as refusal:
        load(environ={"HICACHE_PAGE_TOKENS": text})
    assert refusal.value.context["key"] == "page_tokens"


def test_a_file_that_is_named_must_be_there_and_be_toml(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(environ={"HICACHE_CONFIG": str(tmp_path / "absent.toml")})
    for text in (b"page_tokens = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / "bad.toml", environ={})


def test_settings_are_frozen_and_checked_however_they_are_made():
    settings = Settings()
    with pytest.raises(AttributeError):
        settings.page_tokens = 3
    with pytest.raises(ConfigError):
        Settings(layout="nonsense")
    with pytest.raises(ConfigError):
        Settings(host="64MiB")
    with pytest.raises(ConfigError):
        TierSettings(bytes="64MB")
