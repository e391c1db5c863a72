"""Misspelt and misplaced settings are errors; what was read is what holds, and where it came from can be printed."""

from __future__ import annotations

import pytest

from hicache.build import _control
from hicache.errors import ConfigError
from hicache.records import Where
from hicache.resolve.choose import choose
from hicache.settings import load, read
from hicache.spec import CacheSpec, Group, Plane
from hicache.tables import as_table


def refusal(*args, **keywords):
    with pytest.raises(ConfigError) as error:
        load(*args, environ=keywords.pop("environ", {}), **keywords)
    return error.value


@pytest.mark.parametrize("key,nearest", [("host_memry_gb", "host"), ("hicache_storage_bakend", None)])
def test_an_unknown_key_is_an_error_with_the_nearest(tmp_path, key, nearest):
    file = tmp_path / "hicache.toml"
    file.write_text(f"{key} = 4\n")
    for error in (refusal(**{key: 4}), refusal(file)):
        assert error.context["key"] == key
        assert error.context["nearest"].startswith(nearest or "")


def test_a_wrong_type_is_an_error_with_key_value_and_what_is_expected(tmp_path):
    file = tmp_path / "hicache.toml"
    file.write_text('page_tokens = "ten"\n')
    for error in (refusal(page_tokens="ten"), refusal(file), refusal(environ={"HICACHE_PAGE_TOKENS": "ten"})):
        assert error.context == {"key": "page_tokens", "value": "'ten'", "expected": "int"}


@pytest.mark.parametrize(
    "name",
    [
        "HICACH_PAGE_TOKENS",
        "HICACHEE_PAGE_TOKENS",
        "HICACHE_PAGE_TOKEN",
        "GICACHE_PAGE_TOKENS",
        "ICACHE_PAGE_TOKENS",
        "XHICACHE_PAGE_TOKENS",
        "IHCACHE_PAGE_TOKENS",
        "HICACHEPAGE_TOKENS",
    ],
)
def test_a_variable_that_nearly_is_ours_is_an_error_that_lists_ours(name):
    error = refusal(environ={name: "32"})
    assert error.context["key"] == name
    assert error.context["nearest"] == "HICACHE_PAGE_TOKENS"
    assert "HICACHE_STORE_PATH" in error.context["known"]


def test_a_file_that_is_named_must_exist(tmp_path):
    gone = str(tmp_path / "none.toml")
    assert gone in str(refusal(gone))
    assert gone in str(refusal(environ={"HICACHE_CONFIG": gone}))


def test_precedence_is_as_documented_and_the_dump_shows_value_and_origin(tmp_path):
    file = tmp_path / "hicache.toml"
    file.write_text('page_tokens = 32\nlayout = "page_head"\n')
    reading = read(file, environ={"HICACHE_LAYOUT": "layer_first"}, page_tokens=64)
    assert (reading.settings.page_tokens, reading.settings.layout) == (64, "layer_first")
    assert reading.origins == {"page_tokens": "keyword", "layout": "environment"}


@pytest.mark.parametrize("seconds", [0.25, 8192.0])
def test_a_threshold_is_what_was_said(seconds):
    assert load(environ={}, deadlines={"fetch_s": seconds}).deadlines.fetch_s == seconds


@pytest.mark.parametrize("tokens", [1, 10, 64, 8192])
def test_a_page_size_is_what_was_said(tokens):
    assert load(environ={}, page_tokens=tokens).page_tokens == tokens


def test_the_dump_fed_back_in_is_itself(tmp_path):
    once = load(
        environ={},
        page_size=64,
        hicache_mem_layout="page_first",
        hicache_ratio="2.0",
        hicache_write_policy="write_back",
        device={"bytes": "1GiB"},
        store={"type": "segment", "path": "/x"},
    )
    assert (once.layout, once.into_host, once.host.ratio) == ("page_first", "back", 2.0)
    twice = load(environ={}, **as_table(once))
    assert twice == once
    assert as_table(twice) == as_table(once)


@pytest.mark.parametrize("tokens, pages", [(8192, 128), (10, 1), (0, 0), (65, 2)])
def test_a_threshold_is_kept_to_the_token(tokens, pages):
    settings = load(page_tokens=64, prefetch_min_tokens=tokens)
    assert settings.prefetch_min_tokens == tokens
    spec = CacheSpec((Group("kv", (Plane("k", 1, 64, 1, 16),)),), 64)
    sizes = {Where.HOST: 4}
    chosen = choose(settings, spec).require()
    assert _control(settings, chosen, sizes).fetch_pages_min == pages, "the pages that hold so many tokens"


def test_a_limit_below_one_page_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"prefetch_max_tokens value=10 page_tokens=64 nearest=64"):
        load(page_tokens=64, prefetch_max_tokens=10)


@pytest.mark.parametrize("name", ["HCACHE_DIR", "CACHE_BYTES", "HICACHEX", "PAGE_TOKENS", "H"])
def test_a_variable_of_somebody_else_is_left_alone(name):
    assert load(environ={name: "nonsense"}).page_tokens == 16
