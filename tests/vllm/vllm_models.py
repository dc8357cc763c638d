"""Tiny models with random weights, made offline: enough layers, heads and windows to make a wrong byte visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 512
WINDOW = 128
MODELS = ("llama", "qwen3", "mistral", "gemma3", "gpt-oss")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Wide enough that logits differ clearly from token to token: the default is close to uniform.
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _config(name: str) -> Any:
    import transformers

    if name == "llama":  # one full-attention group
        return transformers.LlamaConfig(**_COMMON, num_hidden_layers=4)
    if name == "mqa":  # one KV head, so that two ranks have the same
        return transformers.LlamaConfig(**{**_COMMON, "num_key_value_heads": 1}, num_hidden_layers=4)
    if name == "qwen3":  # one group, with norms of queries and keys
        return transformers.Qwen3Config(**_COMMON, num_hidden_layers=4)
    if name == "deepseek":  # one group of latents
        return transformers.DeepseekV2Config(
            **{**_COMMON, "num_key_value_heads": 4},
            num_hidden_layers=3,
            moe_intermediate_size=64,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
        )
    mamba2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
    if name == "granite":  # states of Mamba2 in every other layer
        return transformers.GraniteMoeHybridConfig(
            **{k: v for k, v in _COMMON.items() if k != "head_dim"},
            **mamba2,
            num_hidden_layers=4,
            layer_types=["mamba", "attention"] * 2,
            mamba_chunk_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=128,
            position_embedding_type="rope",
        )
    if name == "falcon-h1":  # states and attention side by side in each layer
        return transformers.FalconH1Config(
            **_COMMON, **mamba2, num_hidden_layers=3, mamba_d_ssm=256, mamba_chunk_size=64
        )
    if name == "nemotron-h":  # states, attention and perceptrons in layers of their own
        return transformers.NemotronHConfig(
            **_COMMON,
            hybrid_override_pattern="M*-M*",
            num_hidden_layers=5,
            mamba_num_heads=8,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
            expand=2,
            chunk_size=64,
        )
    if name == "qwen3-next":  # three layers of gated delta nets to one of attention
        return transformers.Qwen3NextConfig(
            **_COMMON,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    if name == "mistral":  # one group, every layer with a sliding window
        return transformers.MistralConfig(**_COMMON, num_hidden_layers=4, sliding_window=WINDOW)
    if name == "gemma3":  # five layers with a window to one without
        return transformers.Gemma3TextConfig(
            **_COMMON, num_hidden_layers=12, sliding_window=WINDOW, query_pre_attn_scalar=32
        )
    if name == "gpt-oss":  # alternating, with attention sinks and experts
        return transformers.GptOssConfig(
            **{**_COMMON, "intermediate_size": 128},
            num_hidden_layers=4,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")


def make_model(name: str, folder: str) -> None:
    """Write the model into ``folder``, with a tokenizer of one word a token, for the server.

    ``llama@1`` is ``llama`` with other weights.
    """
    import torch
    import transformers

    architecture, _, seed = name.partition("@")
    torch.manual_seed(int(seed or 0))
    model = transformers.AutoModelForCausalLM.from_config(_config(architecture)).to(torch.float32)
    # What architectures start at zero (biases, attention sinks) would hide mistakes: move all parameters.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    Path(folder).mkdir(parents=True, exist_ok=True)
    _tokenizer().save_pretrained(folder)
    model.save_pretrained(folder, safe_serialization=True)


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
