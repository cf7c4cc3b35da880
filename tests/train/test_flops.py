"""Tests FLOPs computed from configs against manual counts and torch's FLOP counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config

from slime.errors import UserError
from slime.train.flops import FlopsModel, causal_pairs

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = 16 * 100
LENGTH = 10
PAIRS = 55  # 1 + 2 + ... + 10


def flops(family: str, **changes: Any) -> FlopsModel:
    return FlopsModel.from_config(CONFIG_MAPPING[family](**{**SIZES, **changes}))


def training_flops(weights: int, scores: int) -> int:
    """FLOPs of forward and backward (twice forward): `weights` multiply-adds per token plus `scores` in total."""
    return 3 * 2 * (LENGTH * weights + scores)


def test_flops_of_dense_model_with_grouped_queries() -> None:
    attention = 16 * (32 + 16 + 16) + 32 * 16  # heads of 8: 4 for queries, 2 for keys, 2 for values
    mlp = 3 * 16 * 24
    scores = 4 * PAIRS * 4 * (8 + 8)  # layers x pairs x heads x (scores + values)
    assert flops("qwen3", head_dim=8).sequence(LENGTH) == training_flops(4 * (attention + mlp) + HEAD, scores)


def test_flops_of_latent_attention_with_dense_and_sparse_layers() -> None:
    model = flops(
        "deepseek_v3",
        **{"q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10},
        **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 7},
        **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    )
    attention = 16 * 6 + 6 * 4 * 12 + 16 * (5 + 4) + 5 * 4 * (8 + 10) + 4 * 10 * 16
    dense, sparse = 3 * 16 * 24, 3 * 16 * 7 * (3 + 2) + 16 * 8  # chosen and shared experts, router
    scores = 4 * PAIRS * 4 * (12 + 10)
    assert model.sequence(LENGTH) == training_flops(4 * attention + dense + 3 * sparse + HEAD, scores)


def test_flops_of_experts_on_some_layers() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    model = flops("qwen3_moe", head_dim=4, **experts, decoder_sparse_step=1, mlp_only_layers=[0, 2])
    attention = 16 * (16 + 8 + 8) + 16 * 16
    dense, sparse = 3 * 16 * 24, 2 * 3 * 16 * 12 + 16 * 8
    scores = 4 * PAIRS * 4 * (4 + 4)
    assert model.sequence(LENGTH) == training_flops(4 * attention + 2 * dense + 2 * sparse + HEAD, scores)
    every_second = flops("qwen3_moe", head_dim=4, **experts, decoder_sparse_step=2)
    assert every_second.sequence(LENGTH) == model.sequence(LENGTH)


def test_flops_of_alternating_sliding_windows() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = flops("gemma2", head_dim=4, sliding_window=3, layer_types=kinds)
    attention, mlp = 16 * (16 + 8 + 8) + 16 * 16, 3 * 16 * 24
    pairs = 2 * PAIRS + 2 * (1 + 2 + 8 * 3)
    assert model.sequence(LENGTH) == training_flops(4 * (attention + mlp) + HEAD, pairs * 4 * (4 + 4))


def test_window_without_layer_types_applies_to_all_layers() -> None:
    assert flops("mistral", sliding_window=3).layers_by_window == {3: 4}
    assert flops("mistral", sliding_window=None).layers_by_window == {None: 4}


def test_linear_attention_is_linear_in_length() -> None:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3}
    delta |= {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    experts |= {"shared_expert_intermediate_size": 9, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model = flops("qwen3_next", head_dim=4, layer_types=kinds, **delta, **experts)
    keys, values = 2 * 3, 4 * 5
    linear = 16 * (2 * keys + 2 * values + 2 * 4) + values * 16  # q, k, v, z, b, a; output
    linear += 4 * (2 * keys + values) + 3 * 4 * 3 * 5  # convolution; the state of each head three times
    attention = 16 * (2 * 16 + 8 + 8) + 16 * 16  # queries and their gate
    sparse = 3 * 16 * (2 * 12 + 9) + 16 * 8
    scores = PAIRS * 4 * (4 + 4)
    assert model.sequence(LENGTH) == training_flops(3 * linear + attention + 4 * sparse + HEAD, scores)
    without = flops("qwen3_next", head_dim=4, layer_types=["linear_attention"] * 4, **delta, **experts)
    assert without.sequence(1000) == 1000 * without.sequence(1)
    lightning = flops("minimax", head_dim=4, layer_types=kinds, num_local_experts=8, num_experts_per_tok=2)
    plain = flops("minimax", head_dim=4, layer_types=["full_attention"] * 4, num_local_experts=8, num_experts_per_tok=2)
    assert lightning.per_token - plain.per_token == 3 * 2 * (2 * 4 * 4 * 4)  # a state written and read
    assert lightning.layers_by_window == {None: 1}


def test_packed_flops_equal_sum_over_sequences() -> None:
    model = flops("llama")
    assert model.packed([3, 10, 4]) == model.sequence(3) + model.sequence(10) + model.sequence(4)
    assert model.packed([10, 10]) < model.sequence(20)
    assert model.packed([]) == 0


@pytest.mark.parametrize(
    ("length", "window", "pairs"), [(0, None, 0), (1, 4, 1), (4, 4, 10), (6, 4, 18), (6, None, 21)]
)
def test_causal_pairs(length: int, window: int | None, pairs: int) -> None:
    assert causal_pairs(length, window) == pairs
    seen = [(q, k) for q in range(length) for k in range(length) if k <= q and (window is None or q - k < window)]
    assert len(seen) == pairs


def test_rejects_config_without_known_flops() -> None:
    with pytest.raises(UserError, match=r"--balance-data, .*: the config of a gpt2 model does not determine its FLOPs"):
        FlopsModel.from_config(GPT2Config())


@pytest.mark.parametrize("length", [1, 7, 48])
def test_flops_match_torch_flop_counter_on_llama(length: int) -> None:
    config = CONFIG_MAPPING["llama"](**SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    tokens = torch.arange(length)[None] % 100
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    linear, attention = 0, 0
    for operator, count in counter.get_flop_counts()["Global"].items():
        if operator is torch.ops.aten.bmm:
            attention += count
        else:
            linear += count
    rotary = sum(
        count
        for name, ops in counter.get_flop_counts().items()
        if name.endswith("rotary_emb")
        for count in ops.values()
    )
    square = attention - rotary  # an eager matrix of scores has both triangles
    model_of = FlopsModel.from_config(config)
    assert linear == 3 * model_of.per_token * length
    assert linear + square * (length + 1) / (2 * length) == model_of.sequence(length)
