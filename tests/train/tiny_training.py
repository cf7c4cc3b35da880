"""Builds tiny models and random samples for the training tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from slime.data.sample import Sample
from slime.train.trainer_group import TrainerGroup

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "mistral_window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    ),
    "llama_dynamic": lambda: LlamaConfig(
        **{**SIZES, "max_position_embeddings": 8},
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
    ),
    "phi3_longrope": lambda: Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 8,
            "long_factor": [8.0] * 8,
        },
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES,
        **DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        pad_token_id=0,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **DELTA, pad_token_id=0),
    "deepseek_v3": lambda: DeepseekV3Config(**{**SIZES, **LATENT}),
}
WINDOWED_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES,
        use_sliding_window=True,
        sliding_window=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "phimoe": lambda: PhimoeConfig(
        **SIZES, sliding_window=6, num_local_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2
    ),
}
"""Models that define their sliding windows only in the attention mask."""
SPARSE_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **{**SIZES, **LATENT, "num_hidden_layers": 3},
        index_topk=6,
        index_head_dim=16,
        index_n_heads=4,
        indexer_types=["full", "shared", "full"],
    ),
}
"""Models with sparse attention, which context parallelism does not support."""


def build_model(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = {**CONFIGS, **SPARSE_CONFIGS, **WINDOWED_CONFIGS}[kind]()
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def make_samples(num_groups: int, per_group: int, *, seed: int = 0, with_log_probs: bool = True) -> list[list[Sample]]:
    """Make groups of samples with random tokens, uneven lengths, partly masked responses and random rewards."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    groups = []
    for group in range(num_groups):
        members = []
        for member in range(per_group):
            prompt, response = integer(2, 7), integer(1, 12)
            mask = [1] * response
            if response > 4:
                mask[1] = 0
            log_probs = (-5 * torch.rand(response, generator=generator)).tolist()
            members.append(
                Sample(
                    group_index=group,
                    index=group * per_group + member,
                    tokens=torch.randint(0, 128, (prompt + response,), generator=generator).tolist(),
                    response_length=response,
                    loss_mask=mask,
                    reward=float(integer(0, 3)),
                    rollout_log_probs=log_probs if with_log_probs else None,
                    status=Sample.Status.COMPLETED,
                )
            )
        groups.append(members)
    return groups


def export_weights(group: TrainerGroup, folder: Path, version: int) -> list[Path]:
    """Write all weights as safetensors files."""
    written = group.call("export_weights", out_dir=str(folder), version=version)
    return sorted(Path(path) for paths in written for path in paths)


def weight_checksums(group: TrainerGroup) -> dict[str, str]:
    """Return the checksum of every tensor in the rollout's dtype."""
    return {name: one for owned in group.call("weight_checksums") for name, one in owned.items()}
