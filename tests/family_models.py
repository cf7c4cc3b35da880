"""A tiny random model of every family, divisible by 1, 2 and 4 tensor-parallel and 2 expert-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_SIGMOID: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
_LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4}),
    "qwen3_moe_mixed": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "mlp_only_layers": [0, 2]}),
    "llama": ("llama", {}),
    "llama_scaled": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_next": ("qwen3_next", {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**_SIGMOID, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_SIGMOID, **_LATENT}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_SIGMOID, **_LATENT, **_INDEXER, "first_k_dense_replace": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {**_SIGMOID, **_LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "moonlight": ("deepseek_v3", {**_SIGMOID, **_LATENT, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "kimi_k2": ("deepseek_v3", {**_SIGMOID, **_LATENT, "first_k_dense_replace": 1, "rope_parameters": _YARN}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "mimo": ("qwen2", {}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Case name -> (model_type, config fields in addition to BASE)."""

_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}
WINDOWED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_windows": ("qwen2", {**_WINDOWS, "max_window_layers": 2}),
    "qwen2_moe_windows": (
        "qwen2_moe",
        {**_WINDOWS, **_EXPERTS, "num_experts": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_windows": ("qwen3", {**_WINDOWS, "max_window_layers": 1}),
    "qwen3_moe_windows": ("qwen3_moe", {**_WINDOWS, **_EXPERTS, "num_experts": 4}),
}
"""The same for families whose config can enable sliding windows. Windows do not change the tensors."""

RENAMED = {"kimi_k2": "kimi_k2", "mimo": "mimo"}
"""Case -> model_type in config.json, for families that transformers lacks. They are built as another family."""


def make_family_folder(folder: Path, case: str, *, seed: int = 0, spread: float = 0.1, **overrides: Any) -> Path:
    """Writes a model folder as transformers does, with float32 weights that differ between all tensors.

    Rounding errors grow less in a model with a smaller `spread` of the weights.
    """
    model_type, own = {**FAMILY_MODELS, **WINDOWED_MODELS}[case]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**BASE, **own, **overrides}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            centre = parameter.mean() if parameter.dim() == 1 else 0.0  # norm weights are centred on one or on zero
            parameter.copy_(centre + spread * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    if case in RENAMED:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": RENAMED[case]}))
    return folder


def family_config(folder: Path) -> dict[str, Any]:
    """Returns config.json with its text_config merged in."""
    config = json.loads((folder / "config.json").read_text())
    return {**config, **config.get("text_config", {})}
