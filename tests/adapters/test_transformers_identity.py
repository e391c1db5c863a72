"""Two namespaces are equal exactly when the KV bytes are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from hits import PAGE

from hicache.adapters.transformers.identity import LEFT_OUT, config_text, namespace, weights_digest
from hicache.adapters.transformers.probe import probe
from hicache.errors import ConfigError
from hicache.testing.model import tiny_model


def space(model, *, page_tokens=PAGE, **more):
    geometry = probe(model)
    return namespace(model, geometry.spec(page_tokens), geometry.dtypes, **more)


@pytest.fixture
def model():
    return tiny_model()


def test_the_same_model_built_again_has_the_same_root(tiny, model):
    assert space(model) == space(tiny)


def test_another_process_finds_the_same_root(tiny):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_transformers_identity import space\n"
        "from hicache.testing.model import tiny_model\n"
        "print(space(tiny_model()).root.hex())"
    )
    folder = __file__.rsplit("/", 1)[0]
    child = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=110, check=False
    )
    assert child.stdout.strip() == space(tiny).root.hex(), child.stderr


def test_one_changed_weight_changes_the_root(tiny, model):
    for name, tensor in model.state_dict().items():
        flat = tensor.view(-1)
        for at in (0, flat.numel() - 1):
            before = flat[at].clone()
            flat[at] = torch.nextafter(before, torch.tensor(9.0))
            assert weights_digest(model) != weights_digest(tiny), name
            flat[at] = before
    assert weights_digest(model) == weights_digest(tiny)


def test_moving_a_tensor_to_another_name_changes_the_root(tiny, model):
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.gate_proj, second.gate_proj = second.gate_proj, first.gate_proj
    assert weights_digest(model) != weights_digest(tiny)


def test_a_persistent_buffer_counts_and_another_does_not(tiny, model):
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    assert space(model) == space(tiny)
    model.register_buffer("scale", torch.ones(3))
    assert space(model) != space(tiny)


def test_dtype_page_size_adapter_and_salt_count(tiny, model):
    roots = {
        space(tiny).root,
        space(model.to(torch.bfloat16)).root,
        space(model.to(torch.float16)).root,
        space(tiny, page_tokens=8).root,
        space(tiny, adapter=b"x").root,
        space(tiny, salt=b"x").root,
        space(tiny, salt=b"y").root,
    }
    assert len(roots) == 7


CHANGES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "hidden_act": "gelu",
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_of_the_configuration_changes_the_root(tiny, model, field):
    before = space(tiny)
    text = config_text(model)
    setattr(model.config, field, CHANGES[field])
    assert field not in LEFT_OUT
    assert config_text(model) != text
    geometry = probe(tiny)
    assert namespace(model, geometry.spec(PAGE), geometry.dtypes) != before


def test_a_field_that_nobody_here_has_heard_of_counts(tiny, model):
    model.config.made_up_yesterday = 2
    assert config_text(model) != config_text(tiny)


APART = [
    ("GPT2", {}, {"activation_function": "relu"}),
    ("GPT2", {}, {"scale_attn_weights": False}),
    ("GPT2", {}, {"scale_attn_by_inverse_layer_idx": True}),
    ("GPTNeoX", {}, {"use_parallel_residual": False}),
    ("GPTJ", {"rotary_dim": 8}, {"rotary_dim": 4}),
    ("Bloom", {"n_layer": 2}, {"apply_residual_connection_post_layernorm": True}),
    ("Olmo", {}, {"clip_qkv": 0.1}),
    ("BioGpt", {}, {"scale_embedding": False}),
    ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, {"attn_config": {"alibi_bias_max": 2}}),
]


@pytest.mark.parametrize("kind, base, change", APART, ids=lambda value: str(value)[:40])
def test_models_of_equal_weights_that_compute_otherwise_are_kept_apart(kind, base, change):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    configure = getattr(transformers, f"{kind}Config")
    first, second = (
        transformers.AutoModelForCausalLM.from_config(configure(**{**sizes, **base, **more})).eval()
        for more in ({}, change)
    )
    second.load_state_dict(first.state_dict())
    assert weights_digest(first) == weights_digest(second)
    assert space(first) != space(second)


def test_names_paths_and_generation_settings_do_not_count(tiny, model):
    before = space(model)
    model.config._name_or_path = "elsewhere"
    model.config.use_cache = False
    model.config.eos_token_id = 3
    model.generation_config.max_length = 7
    model.config.use_cache = True
    assert space(model) == before == space(tiny)


def test_attention_implementations_are_kept_apart(tiny, model):
    model.set_attn_implementation("eager")
    assert space(model) != space(tiny)


def test_progress_is_shown_and_ends_at_the_whole(tiny):
    seen = []
    weights_digest(tiny, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in tiny.state_dict().values())


def test_an_adapter_without_its_digest_is_refused(tiny, model):
    model._hf_peft_config_loaded = True
    with pytest.raises(ConfigError, match="adapter is loaded"):
        space(model)
    assert space(model, adapter=b"digest") == space(tiny, adapter=b"digest")


def test_weights_that_are_not_there_are_refused(model):
    model.to("meta")
    with pytest.raises(ConfigError, match="cannot be read"):
        weights_digest(model)
