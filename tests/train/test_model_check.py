"""Tests the start-up check that packed rows match transformers' eager forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slime.errors import UserError
from slime.models.small import LENGTHS, WINDOW, small_model
from slime.models.windows import window_fields
from slime.train.backends.fsdp import attention
from slime.train.backends.fsdp.builder import check_packed
from tests.tiny_models import SMALL, make_model_folder
from tests.train.in_process import InProcess, config_for

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}


def meta_model(model_type: str, **more: Any) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2} if model_type == "minicpm3" else SMALL  # its default sizes are consistent
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **more}))


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen2_moe", {**WINDOWS, **EXPERTS, "shared_expert_intermediate_size": 32}),
        ("phimoe", {**EXPERTS, "sliding_window": 100}),
        ("qwen3", WINDOWS),
        ("minicpm3", {}),
        ("gemma4_text", {"head_dim": 16, "num_hidden_layers": 6}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_check_accepts_models_that_match_transformers(model_type: str, more: dict[str, Any]) -> None:
    check_packed(meta_model(model_type, **more))


@pytest.mark.parametrize(
    ("model_type", "more"), [("doge", {}), ("modernbert-decoder", {"bos_token_id": 1, "cls_token_id": 3}), ("bert", {})]
)
def test_check_rejects_models_with_different_log_probs(model_type: str, more: dict[str, Any]) -> None:
    wrong = rf"--train-backend fsdp computes {model_type} models wrongly \(a log-prob of a small one differs by [0-9.]+"
    with pytest.raises(UserError, match=wrong):
        check_packed(meta_model(model_type, **more))


def test_check_rejects_model_that_fails_on_packed_rows() -> None:
    with pytest.raises(UserError, match="cannot compute packed rows of electra models"):
        check_packed(meta_model("electra", embedding_size=32))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_check_detects_ignored_mask_windows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "window_of", lambda mask, argument: argument)
    model = meta_model(model_type, **WINDOWS, **EXPERTS)
    with pytest.raises(UserError, match=f"computes {model_type} models wrongly"):
        check_packed(model)


def test_training_does_not_start_with_a_rejected_model(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "doge", "doge")
    with pytest.raises(UserError, match="computes doge models wrongly"):
        InProcess(config_for(folder, tmp_path))


def test_small_model_keeps_layer_types_and_narrows_windows() -> None:
    published = {"hidden_size": 2880, "vocab_size": 201088, "num_hidden_layers": 24, "num_local_experts": 128}
    small = small_model(type(meta_model("gpt_oss")), AutoConfig.for_model("gpt_oss", **published))
    config = small.config
    assert sum(parameter.numel() for parameter in small.parameters()) < 1_000_000
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert (config.head_dim, config.num_experts_per_tok, config.rope_parameters["rope_type"]) == (64, 4, "yarn")
    assert max(window_fields(config.to_dict()).values()) == WINDOW < min(LENGTHS[1:])


def test_rejects_model_that_cannot_be_built_small() -> None:
    broken = AutoConfig.for_model("dots1")  # without a number of experts
    with pytest.raises(UserError, match="transformers cannot compute a small dots1 model"):
        small_model(type(meta_model("llama")), broken)
