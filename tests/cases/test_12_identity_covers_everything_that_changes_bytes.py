"""Whatever changes the bytes of a page changes where it is stored: one change at a time, and a control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hicache.adapters.transformers.engine import attach
from hicache.data.store import record
from hicache.data.store.segment import SegmentStore
from hicache.keys import Namespace
from hicache.records import Where
from hicache.settings import load
from hicache.spec import CacheSpec, Group, Plane
from hicache.testing.house import House
from hicache.testing.model import tiny_model

TOKENS = [token % 500 for token in range(2048)]
PAGE = 64
PAGES = 31  # of 32: the last token of a prompt is always computed


def edited(change: Callable[[object], None]):
    """A model that differs from the first one by ``change`` only; its name and class stay."""
    model = tiny_model(seed=1)
    with torch.no_grad():
        change(model)
    return model


def one_weight(model) -> None:
    model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.001


def rope(model) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 20_000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


@dataclass
class Used:
    hits: int
    records: int
    read: int


def serve(
    path: Path, model, *, page_tokens: int = PAGE, layout: str = "page_first", salt: bytes | None = None
) -> Used:
    settings = load(
        page_tokens=page_tokens,
        layout=layout,
        host={"bytes": "16MiB"},
        store={"type": "segment", "path": str(path), "cap": "64MiB"},
    )
    with attach(model, settings, salt=salt) as cached:
        result = cached.generate(TOKENS, 1)
        cached.flush(30.0)
        assert not cached.errors
        return Used(
            result.sources["store"] // page_tokens,
            cached.cache.data.store.usage()["records"],
            cached.cache.controller.stats.loaded[Where.STORE],
        )


@pytest.fixture
def filled(tmp_path):
    """A directory that instance A has filled."""
    assert serve(tmp_path / "s", tiny_model(seed=1)).records == 32
    return tmp_path / "s"


def test_the_control_hits(filled):
    assert serve(filled, tiny_model(seed=1)).hits == PAGES


OTHERS = {
    "other weights": lambda: (tiny_model(seed=2), {}),
    "a fine-tuned copy under the same name": lambda: (edited(one_weight), {}),
    "another dtype": lambda: (tiny_model(seed=1).to(torch.bfloat16), {}),
    "other rope": lambda: (edited(rope), {}),
    "other head size": lambda: (tiny_model(seed=1, head_dim=32), {}),
    "other KV heads": lambda: (tiny_model(seed=1, kv_heads=4), {}),
    "other depth": lambda: (tiny_model(seed=1, layers=3), {}),
    "page size 32": lambda: (tiny_model(seed=1), {"page_tokens": 32}),
    "a tenant's salt": lambda: (tiny_model(seed=1), {"salt": b"tenant"}),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_anything_else_hits_nothing_reads_nothing_and_leaves_the_first_pages_alone(filled, name):
    model, options = OTHERS[name]()
    used = serve(filled, model, **options)
    assert (used.hits, used.read) == (0, 0)
    again = serve(filled, model, **options)
    assert again.hits == (2048 - 1) // options.get("page_tokens", PAGE), "its own pages are there now"
    assert serve(filled, tiny_model(seed=1)).hits == PAGES, "and the first instance's still are"


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_the_host_layout_does_not_matter_because_a_record_says_its_own(filled, layout):
    assert serve(filled, tiny_model(seed=1), layout=layout).hits == PAGES


def planes(layers: int = 2, item: int = 16) -> tuple[Group, ...]:
    return (Group("kv", (Plane("k", layers, PAGE, 2, item), Plane("v", layers, PAGE, 2, item))),)


BASE = {"weights": "w", "dtype": "fp8_e4m3fn", "rank": "0/2", "stage": "0/1", "name": "the served name"}
CHANGES = {
    "fp8 FN to FNUZ": {"dtype": "fp8_e4m3fnuz"},
    "tensor parallel 2 to 4": {"rank": "0/4"},
    "another pipeline stage": {"stage": "0/2"},
    "another revision": {"weights": "w, revision 2"},
}


def hits(path: Path, fields: dict[str, str], spec: CacheSpec) -> tuple[int, int]:
    """(pages hit, pages read) of a fresh instance, which then stores its own."""
    space = Namespace.of({**fields, "planes": spec.describe()})
    store = SegmentStore(path, 64 << 20, spec.fingerprint())
    one = House(host_slots=64, store=store, spec=spec)
    served = one.serve("b", one.keys(TOKENS, space), space)
    one.close()
    read = store.usage().get("hits", 0)
    store.close()
    return served.loaded, read


@pytest.mark.parametrize("name", list(CHANGES))
def test_fields_that_only_an_engine_knows_separate_as_well(tmp_path, name):
    spec = CacheSpec(planes(), PAGE)
    assert hits(tmp_path / "s", BASE, spec)[0] == 0
    assert hits(tmp_path / "s", {**BASE, **CHANGES[name]}, spec) == (0, 0)
    assert hits(tmp_path / "s", {**BASE, **CHANGES[name]}, spec)[0] == 32
    assert hits(tmp_path / "s", BASE, spec)[0] == 32


def test_another_plane_table_hits_nothing_even_if_the_namespace_forgot_it(tmp_path):
    spec, other = CacheSpec(planes(), PAGE), CacheSpec(planes(layers=3), PAGE)
    space = Namespace.of(BASE)
    for one_spec, want in ((spec, 0), (other, 0), (spec, 32)):
        store = SegmentStore(tmp_path / "s", 64 << 20, one_spec.fingerprint())
        one = House(host_slots=64, store=store, spec=one_spec)
        assert one.serve("r", one.keys(TOKENS, space), space).loaded == want
        one.close()
        store.close()


def test_another_format_version_is_a_miss(tmp_path, monkeypatch):
    spec = CacheSpec(planes(), PAGE)
    monkeypatch.setattr(record, "VERSION", record.VERSION + 1)
    assert hits(tmp_path / "s", BASE, spec)[0] == 0
    monkeypatch.undo()
    assert hits(tmp_path / "s", BASE, spec)[0] == 0


def test_without_a_weights_digest_nothing_goes_to_storage(tmp_path):
    spec = CacheSpec(planes(), PAGE)
    space = Namespace.of({"weights": None, "epoch": "8c1f"}, durable=False)
    store = SegmentStore(tmp_path / "s", 64 << 20, spec.fingerprint())
    one = House(host_slots=64, store=store, spec=spec)
    for _ in range(2):
        one.serve(_, one.keys(TOKENS, space), space)
    assert one.serve("host", one.keys(TOKENS, space), space).by_tier[Where.HOST] == 32
    assert store.usage()["records"] == 0
    one.empty()
    assert one.serve("again", one.keys(TOKENS, space), space).loaded == 0
    one.close()
    store.close()
