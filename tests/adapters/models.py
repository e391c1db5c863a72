"""Small random models of several architectures, and a tokenizer for them."""

from __future__ import annotations

import tokenizers
import torch
import transformers

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def made(config):
    """Random weights, always the same."""
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def latent(**more):
    """A random DeepSeek-V2: two tensors of unequal width a layer."""
    config = transformers.DeepseekV2Config(
        **{**SMALL, "num_key_value_heads": 4, **more},
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
    )
    return made(config)


def qwen(**more):
    """A random Qwen2: biased projections, and fewer KV heads than heads."""
    return made(transformers.Qwen2Config(**{**SMALL, **more}))


def words():
    """A real tokenizer whose token 7 is the word w7 and a space; the last six are letters."""
    vocabulary = {f"w{number} ": number for number in range(506)} | {
        letter: 506 + place for place, letter in enumerate("abcdef")
    }
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0 ")
