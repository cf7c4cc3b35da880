from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from slime.models.shape import ModelShape

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
SPARSE = {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA_NET |= {"linear_value_head_dim": 12, "num_hidden_layers": 5}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 24}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("phi3", {}),
    ("granite", {}),
    ("smollm3", {}),
    ("olmo2", {}),
    ("glm4", {"head_dim": 16, "attention_bias": True}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen3_moe", {"head_dim": 32, "num_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [0]}),
    ("qwen2_moe", {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}),
    (
        "deepseek_v3",
        {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
        | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        | LATENT,
    ),
    ("glm4_moe", {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, **SPARSE}),
    ("glm4_moe_lite", LATENT | SPARSE),
    ("glm_moe_dsa", LATENT | SPARSE | {"index_n_heads": 3, "index_head_dim": 16}),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("minimax_m2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_next", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, **DELTA_NET}),
    ("qwen3_5_text", {"head_dim": 16, **DELTA_NET}),
    ("qwen3_5_moe_text", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, **DELTA_NET}),
]


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_parameter_count_equals_transformers(family: str, extra: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**SIZES | extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(json.loads(config.to_json_string())).num_parameters == expected


def test_flops_equal_the_matrix_products_of_a_dense_model() -> None:
    config = CONFIG_MAPPING["llama"](**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    context = 50
    scores_and_values = 3 * 2 * 4 * 16 * context  # layers x two products x heads x head size
    shape = ModelShape.from_config(json.loads(config.to_json_string()))
    assert shape.flops_per_token(context) == 2 * (linear + scores_and_values)


def test_flops_count_only_the_selected_experts() -> None:
    config = {"model_type": "qwen3_moe", **SIZES, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 40}
    one, two = (ModelShape.from_config({**config, "num_experts_per_tok": k}).flops_per_token(0) for k in (1, 2))
    assert one is not None
    assert two is not None
    assert two - one == 2 * 3 * 3 * 64 * 40  # multiply-add x layers x matrices x hidden x expert


def test_kv_cache_counts_only_layers_with_attention() -> None:
    full = ModelShape.from_config({"model_type": "qwen3", **SIZES, "head_dim": 16})
    assert full.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 16 * 2
    hybrid = ModelShape.from_config(
        {
            "model_type": "qwen3_next",
            **SIZES,
            "head_dim": 16,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        }
    )
    assert hybrid.kv_bytes_per_token("float32") == 2 * 1 * 2 * 16 * 4


def test_unknown_architecture_is_counted_from_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new", "tie_word_embeddings": True}))
    save_file({"a": torch.zeros(3, 5), "lm_head.weight": torch.zeros(7)}, tmp_path / "model.safetensors")
    shape = ModelShape.from_folder(tmp_path)
    assert shape.num_parameters == 15
    assert shape.kv_bytes_per_token("float32") is None
    assert shape.flops_per_token(10) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3, "hidden_size": "x", "layer_types": 4}'])
def test_invalid_model_files_give_unknown_sizes(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    shape = ModelShape.from_folder(tmp_path)
    assert shape.num_parameters is None
    assert ModelShape.from_folder(tmp_path / "missing").num_layers is None


def test_multimodal_config_is_reduced_to_its_text_part() -> None:
    shape = ModelShape.from_config(
        {"model_type": "vlm", "text_config": {"model_type": "qwen3", **SIZES, "head_dim": 16}}
    )
    assert (shape.model_type, shape.num_layers) == ("qwen3", 3)
