"""Parallel layouts that do not fit the model are rejected with the arithmetic; valid layouts are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.parallelism import parse_pipeline_layout
from slime.driver.plan.megatron import stage_layers
from slime.driver.plan.plan import make_plan
from slime.errors import UserError
from tests.model_files import add_weights

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 99,
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "norm_topk_prob": True,
}
WINDOWS = {
    **EXPERTS,
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "attention_bias": True,
}

DELTA = {
    **DENSE,
    "model_type": "qwen3_5",
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    return {
        "hf_checkpoint": str(tmp_path),
        "prompt_data": str(tmp_path / "prompts.jsonl"),
        "input_key": "prompt",
        "label_key": "label",
        "rollout_batch_size": 16,
        "num_rollout": 1,
        "rollout_max_response_len": 32,
        "rm_type": "math",
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
        "train_backend": "megatron",
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 1,
    }


def plan(flags: dict[str, Any], model: dict[str, Any], **changes: Any) -> str:
    folder = Path(flags["hf_checkpoint"])
    (folder / "config.json").write_text(json.dumps(model))
    add_weights(folder)
    return make_plan(resolve(Config(**{**flags, **changes})), device="cpu", gpu_count=0).render()


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        (
            {**DENSE, "num_attention_heads": 12},
            {TP: 8},
            "--tensor-model-parallel-size 8 does not divide the 12 attention heads of {folder} (12 / 8 leaves 4): use one "
            "of 1, 2, 3, 4, 6, 12",
        ),
        (
            {**DENSE, "num_key_value_heads": 6, "num_attention_heads": 24},
            {TP: 4},
            "--tensor-model-parallel-size 4 and the 6 key and value heads of {folder}: one must divide the other",
        ),
        (
            {**DENSE, "intermediate_size": 98},
            {TP: 4},
            "--tensor-model-parallel-size 4 does not divide the 98 columns of the feed-forward layers of {folder} (98 / 4 "
            "leaves 2)",
        ),
        (
            DENSE,
            {PP: 8},
            "--pipeline-model-parallel-size 8: 12 layers = 12 cannot be shared evenly by 8 processes (12 / 8): choose a "
            "divisor, or give --decoder-first-pipeline-num-layers",
        ),
        (
            DENSE,
            {PP: 4, "decoder_first_pipeline_num_layers": 2},
            "--pipeline-model-parallel-size 4: 12 layers - 2 = 10 cannot be shared evenly by 3 processes (10 / 3): choose",
        ),
        (
            DENSE,
            {PP: 2, "num_virtual_stages_per_pipeline_rank": 4},
            "--num-virtual-stages-per-pipeline-rank 4 does not divide the 6 layers of a process (6 / 4 leaves 2)",
        ),
        (
            DENSE,
            {PP: 2, "num_layers_per_virtual_pipeline_stage": 4},
            "--num-layers-per-virtual-pipeline-stage 4 does not divide the 6 layers that a process of "
            "--pipeline-model-parallel-size 2 has (6 / 4 leaves 2)",
        ),
        (
            DENSE,
            {PP: 2, "pipeline_model_parallel_layout": "Et*5|t*5L"},
            "--pipeline-model-parallel-layout Et*5|t*5L has 10 layers, but the model has 12",
        ),
        (
            DENSE,
            {PP: 2, "pipeline_model_parallel_layout": "Et*4|t*4|t*4L"},
            "--pipeline-model-parallel-layout Et*4|t*4|t*4L has 3 stages, which --pipeline-model-parallel-size 2 does not",
        ),
        (DENSE, {EP: 2}, "--expert-model-parallel-size 2: {folder} has no experts, set it to 1"),
        (
            {**EXPERTS, "num_experts": 6},
            {EP: 4},
            "--expert-model-parallel-size 4 does not divide the 6 experts of {folder} (6 / 4 leaves 2)",
        ),
        (
            {**EXPERTS, "num_experts": 4},
            {EP: 8},
            "--expert-model-parallel-size 8 does not divide the 4 experts of {folder} (4 / 8 leaves 4)",
        ),
        (
            EXPERTS,
            {TP: 8, "sequence_parallel": True, ETP: 8},
            "--expert-tensor-parallel-size 8 does not divide the 36 columns of an expert of {folder} (36 / 8 leaves 4)",
        ),
        (
            EXPERTS,
            {TP: 2},
            "--tensor-model-parallel-size 2 with the experts of {folder} needs --sequence-parallel",
        ),
        (
            WINDOWS,
            {TP: 2, "sequence_parallel": True},
            "--expert-tensor-parallel-size 2: the experts of {folder} have biases, with which Megatron cannot cut an expert: "
            "set it to 1",
        ),
        (
            WINDOWS,
            {CP: 2},
            "--context-parallel-size 2 needs full attention, and {folder} has sliding windows or attention sinks",
        ),
        (
            {**DELTA, "linear_num_key_heads": 4},
            {TP: 2, CP: 4},
            "--tensor-model-parallel-size 2 x --context-parallel-size 4 = 8 does not divide the 4 key heads of the gated "
            "delta nets of {folder}: lower one of them",
        ),
        (
            {**DENSE, "model_type": "gpt2"},
            {},
            "model_type gpt2 of config.json is not a supported family: ",
        ),
        ({**EXPERTS, "model_type": "minimax_m2"}, {}, "--train-backend megatron cannot train {folder}: MiniMax M2"),
        (EXPERTS, {"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex needs GPUs"),
    ],
)
def test_rejects_layouts_that_do_not_fit_the_model(
    flags: dict[str, Any], model: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(flags, model, **changes)
    assert str(caught.value).startswith(sentence.format(folder=flags["hf_checkpoint"]))


def test_plan_shows_the_layout(flags: dict[str, Any]) -> None:
    text = plan(flags, EXPERTS, **{TP: 2, PP: 2, EP: 2, ETP: 1, "sequence_parallel": True})
    assert "TP 2 with sequence parallelism x PP 2 x CP 1 x DP 2 = 8 trainers" in text
    assert "6 + 6 layers" in text
    assert "EP 2 x expert TP 1 x DP 2, 4 a trainer and layer" in text
    assert "per 4 trainers" in text
    shown = plan(flags, DENSE, **{PP: 2, CP: 2, "num_virtual_stages_per_pipeline_rank": 3})
    assert "TP 1 x PP 2 x CP 2 x DP 2 = 8 trainers" in shown
    assert "6 + 6 layers, in 3 interleaved stages each" in shown


def test_fsdp_ignores_megatron_layout_flags(flags: dict[str, Any]) -> None:
    text = plan(flags, {**DENSE, "num_attention_heads": 12}, train_backend="fsdp", **{TP: 8, PP: 8})
    assert "PP 8" not in text


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({PP: 4}, [3, 3, 3, 3]),
        ({PP: 3, "decoder_first_pipeline_num_layers": 2}, [2, 5, 5]),
        ({PP: 3, "decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 2}, [4, 6, 2]),
        ({PP: 2, "decoder_first_pipeline_num_layers": 7, "decoder_last_pipeline_num_layers": 5}, [7, 5]),
        (
            {PP: 2, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [6, 6],
        ),
        ({PP: 2, "pipeline_model_parallel_layout": "Et*3|(tt|)*2t*5L"}, [5, 7]),
    ],
)
def test_layers_per_pipeline_stage(changes: dict[str, Any], layers: list[int]) -> None:
    assert stage_layers(Config(**changes), 12) == layers


def test_pipeline_layout_string_is_parsed_like_megatron() -> None:
    assert parse_pipeline_layout("E t*3 | (t|t)*2 | , tL") == [3, 1, 2, 1, 1]
    with pytest.raises(UserError, match="is not written as Megatron reads it"):
        parse_pipeline_layout("Ex|L")
