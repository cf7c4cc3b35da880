"""A tiny random model of every family, in the sizes that 1, 2 and 4 tensor-parallel and 2 expert-parallel ranks share."""

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

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
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
}
"""model_type and what its config has besides BASE, by a name of the case."""


def make_family_folder(folder: Path, case: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A model folder as transformers writes it, with numbers that no two tensors share; weights in float32."""
    model_type, own = FAMILY_MODELS[case]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**BASE, **own, **overrides}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def family_config(folder: Path) -> dict[str, Any]:
    """config.json with the part about text folded in."""
    config = json.loads((folder / "config.json").read_text())
    return {**config, **config.get("text_config", {})}
