"""Images have no identity here yet: a prompt with one is refused by name, computed as ever, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import SMALL

from hicache.adapters.transformers.engine import attach
from hicache.errors import ConfigError
from hicache.settings import load

PAGE = 64
IMAGE = 500
PATCHES = 576
TEXT = {**SMALL, "head_dim": 8, "max_position_embeddings": 4096}
BEFORE = [place % 97 + 1 for place in range(100)]
AFTER = [place % 89 + 1 for place in range(348)]
ONE = [*BEFORE, *[IMAGE] * PATCHES, *AFTER]
TWO = [*ONE, *[IMAGE] * PATCHES, *AFTER[:50]]


@pytest.fixture(scope="module")
def model():
    """A language model that sees: text, and an image at its placeholders."""
    sight = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=96,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=sight,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    )
    torch.manual_seed(7)
    return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.fixture
def cached(model):
    settings = load(
        environ={}, page_tokens=PAGE, host={"bytes": "8MiB"}, store={"type": "memory", "cap": "8MiB"}
    )
    with attach(model, settings) as one:
        yield one
        assert one.errors == {}
        one.cache.controller.check()


def images(*seeds: int) -> torch.Tensor:
    return torch.cat([torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(s)) for s in seeds])


def ask(model, prompt, pictures=None, **more):
    if pictures is not None:
        more["pixel_values"] = pictures
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, **more)[0].tolist()


def nothing_is_kept(cached) -> bool:
    cached.flush(30.0)
    stats = cached.cache.controller.stats
    return (stats.requests, stats.saved, sum(stats.loaded.values())) == (0, 0, 0)


def test_different_images_the_same_image_and_several_are_answered_as_without_a_cache(model, cached):
    asked = [
        (ONE, images(1)),
        (ONE, images(2)),  # the same tokens, another image
        (ONE, images(1)),  # the same image again
        (TWO, images(1, 2)),  # the same beginning, and a second image
    ]
    said = [ask(model, prompt, pictures) for prompt, pictures in asked]
    assert cached.uncacheable == {"pixel_values": 4}
    assert nothing_is_kept(cached)
    cached.close()
    assert said == [ask(model, prompt, pictures) for prompt, pictures in asked]
    assert said[0] != said[1], "this model looks at its images"


def test_a_place_for_an_image_without_its_image_is_refused_by_name(model, cached):
    said = ask(model, ONE)
    assert cached.uncacheable == {"image_token_index": 1}
    for call in (lambda: cached.generate(ONE, 2), lambda: cached.sequences(ONE).begin()):
        with pytest.raises(ConfigError, match="only text can be cached") as refusal:
            call()
        assert refusal.value.context["token"] == "image_token_index"
    assert nothing_is_kept(cached)
    cached.close()
    assert said == ask(model, ONE)


def test_an_image_that_does_not_fit_its_place_fails_in_the_words_of_transformers(model, cached):
    short = [*BEFORE, *[IMAGE] * (PATCHES - 1), *AFTER]
    with pytest.raises(ValueError, match="do not match") as served:
        ask(model, short, images(1))
    assert cached.uncacheable == {"pixel_values": 1}
    assert nothing_is_kept(cached)
    cached.close()
    with pytest.raises(ValueError, match="do not match") as plain:
        ask(model, short, images(1))
    assert str(served.value) == str(plain.value)


def test_text_of_the_same_model_is_served_and_never_with_pages_of_an_image(model, cached):
    plain = ask(model, ONE, images(1))
    text = [*BEFORE, *AFTER]
    first = ask(model, text)
    assert cached.last.hit_tokens == 0
    cached.flush(30.0)
    assert ask(model, text) == first
    assert cached.last.hit_tokens == (len(text) - 1) // PAGE * PAGE
    assert ask(model, ONE, images(1)) == plain
    assert cached.last is None
    assert cached.uncacheable == {"pixel_values": 2}


def test_a_model_whose_positions_images_move_is_refused_at_the_start():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    sight = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=sight)
    torch.manual_seed(7)
    moved = transformers.Qwen2VLForConditionalGeneration(config).eval()
    with pytest.raises(ConfigError, match="makes positions of its own"):
        attach(moved, load(environ={}, page_tokens=PAGE, host={"bytes": "8MiB"}))
    assert "generate" not in vars(moved)
