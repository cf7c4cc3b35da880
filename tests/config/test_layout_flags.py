"""Parallel layouts: impossible sizes are rejected with the arithmetic, and FSDP rejects Megatron's hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_flags, resolve
from slime.config.batch import data_parallel_size
from slime.config.fields import flag_name
from slime.config.flags.megatron import HOOKS
from slime.config.parallelism import virtual_stages
from slime.config.plugins.view import upstream_view
from slime.errors import UserError

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def megatron(valid: dict[str, Any], **changes: Any) -> Config:
    return resolve(Config(**{**valid, "train_backend": "megatron", "actor_num_gpus_per_node": 8, **changes}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {TP: 3, PP: 2, CP: 2},
            "--tensor-model-parallel-size 3 x --pipeline-model-parallel-size 2 x --context-parallel-size 2 = 12, which "
            "does not divide the 8 training processes (--actor-num-nodes 1 x --actor-num-gpus-per-node 8): every copy "
            "of the model needs that many",
        ),
        (
            {TP: 2, EP: 8, PP: 1},
            "--expert-tensor-parallel-size 2 x --expert-model-parallel-size 8 x --pipeline-model-parallel-size 1 = 16, "
            "which does not divide the 8 training processes",
        ),
        ({"fsdp_shard_size": 4}, "--fsdp-shard-size 4 works only with FSDP, but Megatron trains"),
        ({"fsdp_cpu_offload": True}, "--fsdp-cpu-offload works only with FSDP"),
        (
            {"lora_rank": 8},
            "--lora-rank 8 works only with FSDP, but Megatron trains: drop it, or use --train-backend",
        ),
        ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype bf16 works only with FSDP"),
        ({"share_prompts": True}, "--share-prompts works only with FSDP"),
        ({"log_probs_keep_gib": 1.0}, "--log-probs-keep-gib 1.0 works only with FSDP"),
        ({"use_stateless_adam": True}, "--use-stateless-adam works only with FSDP"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload works only with FSDP"),
        (
            {PP: 2, "num_layers_per_virtual_pipeline_stage": 1, "num_virtual_stages_per_pipeline_rank": 2},
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both set the stages",
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            "--num-virtual-stages-per-pipeline-rank splits the stages of a pipeline: add --pipeline-model-parallel-size",
        ),
        (
            {PP: 2, "microbatch_group_size_per_virtual_pipeline_stage": 2},
            "--microbatch-group-size-per-virtual-pipeline-stage applies to interleaved stages",
        ),
        ({"decoder_first_pipeline_num_layers": 1}, "--decoder-first-pipeline-num-layers applies to the stages"),
        (
            {PP: 2, "pipeline_model_parallel_layout": "Et|(t|)*1tL"},
            "--pipeline-model-parallel-layout Et|(t|)*1tL has 3 stages, which --pipeline-model-parallel-size 2",
        ),
        (
            {PP: 2, "pipeline_model_parallel_layout": "Et|tL", "account_for_loss_in_pipeline_split": True},
            "--pipeline-model-parallel-layout already includes --account-for-loss-in-pipeline-split",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "norm"]},
            "--recompute-modules norm is none of core_attn, moe_act",
        ),
        ({"recompute_method": "block"}, "--recompute-method block needs --recompute-granularity full"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "--recompute-method block needs --recompute-num-layers",
        ),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            "--recompute-modules needs --recompute-granularity selective",
        ),
    ],
)
def test_invalid_layouts_are_rejected(valid: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        megatron(valid, **changes)
    assert str(caught.value).startswith(sentence)


def test_plugins_see_the_parallel_sizes_of_the_backend(valid: dict[str, Any]) -> None:
    config = megatron(valid, **{TP: 2, PP: 2, EP: 2, ETP: 1, "num_layers_per_virtual_pipeline_stage": 1})
    assert data_parallel_size(config) == 2
    seen = upstream_view(config)
    sizes = ("tensor", "pipeline", "expert")
    assert [seen[f"{kind}_model_parallel_size"] for kind in sizes] == [2, 2, 2]
    assert (seen["data_parallel_size"], seen[ETP], seen["world_size"]) == (2, 1, 8)
    fsdp = upstream_view(resolve(Config(**valid, actor_num_gpus_per_node=8, **{TP: 2, PP: 2})))
    assert [fsdp[f"{kind}_model_parallel_size"] for kind in sizes] == [1, 1, 1]
    assert (fsdp["data_parallel_size"], fsdp[ETP]) == (8, 1)


def test_recompute_activations_sets_full_granularity_with_megatron(valid: dict[str, Any]) -> None:
    asked = megatron(valid, recompute_activations=True)
    assert (asked.recompute_granularity, asked.recompute_method, asked.recompute_num_layers) == ("full", "uniform", 1)
    assert resolve(asked) == asked
    assert megatron(valid, recompute_granularity="selective").recompute_method is None
    assert resolve(Config(**valid, recompute_activations=True)).recompute_granularity is None
    assert megatron(valid, moe_token_dispatcher_type="allgather").moe_token_dispatcher_type == "alltoall"


@pytest.mark.parametrize("name", HOOKS)
def test_megatron_hooks_are_rejected_with_fsdp(valid: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(Config(**valid, **{name: "mine.function"}))
    assert str(caught.value).startswith(f"{flag_name(name)} is not supported: ")
    assert "--train-backend megatron" in str(caught.value)


def test_megatron_backend_needs_megatron_core(valid: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "megatron" else found(name))
    with pytest.raises(
        UserError, match=r"--train-backend megatron needs Megatron-Core, .*pip install 'slime\[megatron\]'"
    ):
        megatron(valid)


def test_carried_entry_of_a_saved_config_sets_the_field_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("carried: {tensor_model_parallel_size: 2, swiglu: true, transformer_impl: null}\n")
    config = parse_flags(["--config", str(file)])
    assert (config.tensor_model_parallel_size, config.transformer_impl, config.carried) == (2, None, {"swiglu": True})


def test_nested_repetitions_of_a_written_layout_are_counted(valid: dict[str, Any]) -> None:
    layout = "E((t|)*2t|)*2tL"  # t | t | t | t | t | t | t
    config = megatron(valid, **{PP: 7, "actor_num_gpus_per_node": 7, "pipeline_model_parallel_layout": layout})
    assert virtual_stages(config, num_layers=7) == 1
    with pytest.raises(UserError, match="has 7 stages, which --pipeline-model-parallel-size 2 does not divide"):
        megatron(valid, **{PP: 2, "pipeline_model_parallel_layout": layout})
