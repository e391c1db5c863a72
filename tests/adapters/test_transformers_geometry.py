"""Geometry comes from real tensors; models whose cache is anything else are refused by name; MLA and bf16 work."""

from __future__ import annotations

import pytest
import torch
import transformers
from hits import AGAIN, FIRST, LOADABLE, PAGE, complaints, settings, work
from models import SMALL, latent, made

from hicache.adapters.transformers import attach
from hicache.adapters.transformers.probe import probe
from hicache.adapters.transformers.rows import Rows
from hicache.errors import ConfigError, InvariantError
from hicache.layout import LAYOUTS
from hicache.settings import load
from hicache.testing.model import tiny_model
from hicache.testing.replay import Recorder


def test_what_a_page_is_made_of(tiny):
    assert probe(tiny).spec(PAGE).describe() == "page_tokens=4;shards=1;kv/full[k:2x4x2x64,v:2x4x2x64]"
    assert probe(tiny).dtypes == "k:torch.float32,v:torch.float32"
    planes = probe(latent()).spec(PAGE).groups[0].planes
    assert [(plane.heads, plane.item_nbytes) for plane in planes] == [(1, 64), (1, 32)]


def test_layers_of_unequal_shape_are_planes_of_their_own(tiny):
    geometry = probe(tiny)
    k, v = geometry.layers[1]
    wide = type(k)("k1", k.heads * 2, k.dim, k.dtype)
    spec = type(geometry)((geometry.layers[0], (wide, v))).spec(PAGE)
    assert [(plane.name, plane.layers, plane.heads) for plane in spec.groups[0].planes] == [
        ("k", 1, 2),
        ("v", 2, 2),
        ("k1", 1, 4),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["latent", "bfloat16", "odd"])
def test_other_geometries_hit_too(tmp_path, layout, kind):
    if kind == "latent":
        model = latent()
    elif kind == "bfloat16":
        model = tiny_model(3).to(torch.bfloat16)
    else:
        model = tiny_model(4, layers=3, heads=3, kv_heads=1, head_dim=10)
    recorder = Recorder()
    chosen = settings(device=3, host=8, store=tmp_path / "store", layout=layout)
    with attach(model, chosen, witness=recorder) as cached:
        assert work(cached, FIRST)[2].hit_tokens >= 8
    with attach(model, chosen, witness=recorder) as cached:
        assert work(cached, AGAIN)[0].sources["store"] == LOADABLE
    assert complaints(model, recorder) == []


@pytest.mark.parametrize(
    "config,named",
    [
        (transformers.MistralConfig(**SMALL, head_dim=8, sliding_window=8), "DynamicSlidingWindowLayer"),
        (
            transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], conv_L_cache=3),
            "LinearAttentionLayer",
        ),
    ],
    ids=["window", "state"],
)
def test_layers_that_pages_cannot_hold_are_refused_by_name(config, named):
    with pytest.raises(ConfigError, match="cannot be cached by pages yet") as refusal:
        attach(made(config), settings(host=4))
    assert refusal.value.context["kind"] == named
    assert refusal.value.context["layer"] in (0, 1)


def test_a_model_in_training_is_refused():
    model = tiny_model(1)
    model.train()
    with pytest.raises(ConfigError, match="training mode"):
        attach(model, settings(host=4))


def test_keys_that_depend_on_the_sequence_length_are_refused():
    config = transformers.LlamaConfig(
        **SMALL, head_dim=8, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    with pytest.raises(ConfigError, match="depend on the sequence's length"):
        attach(made(config), settings(host=4))


def test_a_layout_or_budget_that_cannot_hold_the_pages_is_refused(tiny):
    with pytest.raises(
        ConfigError, match=r"4095 bytes of host memory .as asked. do not hold one page of 4096"
    ):
        attach(tiny, load(environ={}, page_tokens=PAGE, host={"bytes": 4095}))


def test_rows_refuse_strangers(tiny):
    geometry = probe(tiny)
    rows = Rows(geometry, geometry.spec(PAGE))
    with pytest.raises(InvariantError, match="no rows are bound"):
        rows.surface(1, 0)
    rows.reserve(9)
    assert rows.capacity == 12
    cache = rows.cache(0)
    states = torch.ones((2, 2, 13, 16))
    with pytest.raises(ConfigError, match="do not fit"):
        cache.update(states, states, 0)
    states = states[:1]
    for tokens in (5, 2):
        cache.update(states[:, :, :tokens], states[:, :, :tokens], 0)
    layer = cache.layers[0]
    assert layer.get_seq_length() == 7
    assert layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(3)) == (10, 0)
    assert layer.keys.shape == (1, 2, 7, 16)
    layer.crop(-3)  # these versions: how many to forget
    layer.crop(0)
    assert layer.get_seq_length() == 4
    layer.crop(3)  # older ones: how many to keep
    assert layer.get_seq_length() == 3
    assert layer.keys.data_ptr() == rows.page(0)[0].ctypes.data  # zero copy, all the way
