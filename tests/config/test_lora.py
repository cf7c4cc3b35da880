"""The LoRA flags: defaults, contradictions, and the checkpoints and adapters that training resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, resolve
from slime.config.initial_weights import InitialWeights, adapter_base_weights, find_initial_weights
from slime.config.lora import reference_is_base
from slime.config.model_folder import LATEST
from slime.driver.plan.plan import make_plan
from slime.errors import UserError
from tests.config.conftest import TINY_QWEN3
from tests.model_files import add_weights, write_safetensors


def resolve_config(valid: dict[str, Any], **changes: Any) -> Config:
    return resolve(Config(**{**valid, **changes}))


def rejection(valid: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve_config(valid, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lora_row(valid: dict[str, Any], **changes: Any) -> str:
    config = resolve_config(valid, label_key="label", **changes)
    return dict(dict(make_plan(config, device="cpu", gpu_count=0).sections)["Model"])["LoRA"]


def checkpoint(folder: Path, lora: dict[str, Any] | None) -> Path:
    one = folder / "iter_0000003"
    one.mkdir(parents=True)
    meta: dict[str, Any] = {"format": 1, "next_rollout_id": 4, "model": {}}
    (one / "meta.json").write_text(json.dumps(meta if lora is None else meta | {"lora": lora}))
    write_safetensors(one / "model-00001.safetensors")
    (folder / LATEST).write_text("3")
    return folder


def adapter(folder: Path, **facts: Any) -> Path:
    folder.mkdir()
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"], **facts}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    write_safetensors(folder / "adapter_model.safetensors")
    return folder


def second_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    return add_weights(folder)


def test_alpha_defaults_to_twice_the_rank_and_targets_to_all_linear(valid: dict[str, Any]) -> None:
    config = resolve_config(valid, lora_rank=8)
    assert (config.lora_alpha, config.lora_target_modules, config.lora_sync) == (16.0, ["all-linear"], "merged")
    config = resolve_config(valid, lora_rank=8, lora_alpha=4, lora_target_modules=["q_proj"])
    assert (config.lora_alpha, config.lora_target_modules) == (4.0, ["q_proj"])
    config = resolve_config(valid)
    assert (config.lora_rank, config.lora_alpha, config.lora_target_modules) == (0, None, None)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"lora_alpha": 16.0}, "--lora-alpha"),
        ({"lora_target_modules": ["q_proj"]}, "--lora-target-modules"),
        ({"lora_sync": "adapter"}, "--lora-sync adapter"),
    ],
)
def test_lora_flags_without_a_rank_are_rejected(valid: dict[str, Any], changes: dict[str, Any], flag: str) -> None:
    assert rejection(valid, **changes) == f"{flag} needs LoRA: add --lora-rank, or drop it"


def test_rejects_reference_averaging_with_lora(valid: dict[str, Any]) -> None:
    average = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "ref_update_decay": 0.9}
    assert "averages whole weights" in rejection(valid, lora_rank=4, **average)


def test_plan_shows_lora_targets_and_number_of_trained_parameters(valid: dict[str, Any]) -> None:
    assert lora_row(valid, lora_rank=4, lora_target_modules=["self_attn.q_proj", "k_proj", "v_proj", "o_proj"]) == (
        "rank 4, alpha 8, on q_proj, k_proj, v_proj, o_proj: "
        f"{2 * 4 * (2 * (64 + 64) + 2 * (64 + 32)) / 1e3:.3g} K parameters are trained; engines get the merged weights"
    )


def test_unknown_target_modules_are_rejected_with_the_valid_ones(valid: dict[str, Any]) -> None:
    config = resolve_config(valid, label_key="label", lora_rank=4, lora_target_modules=["q_proj", "query_key_value"])
    with pytest.raises(UserError) as caught:
        make_plan(config, device="cpu", gpu_count=0)
    assert str(caught.value) == (
        f"--lora-target-modules query_key_value: the model in {valid['hf_checkpoint']} has no linear layer of that "
        "name; q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj can have an adapter (embedding, output "
        "layer, routers and experts have none), or give all-linear"
    )


def test_rejects_parameter_patterns_that_leave_no_target_module(valid: dict[str, Any]) -> None:
    config = resolve_config(
        valid, label_key="label", lora_rank=4, lora_target_modules=["q_proj"], only_train_params_name_list=["mlp"]
    )
    with pytest.raises(
        UserError, match=r"^--only-train-params-name-list leaves none of the layers that --lora-target-"
    ):
        make_plan(config, device="cpu", gpu_count=0)


def test_loaded_adapter_sets_rank_alpha_and_targets(valid: dict[str, Any], tmp_path: Path) -> None:
    folder = str(adapter(tmp_path / "adapter"))
    for given in ({}, {"lora_rank": 4}, {"lora_target_modules": ["q_proj", "v_proj"], "lora_alpha": 32.0}):
        config = resolve_config(valid, lora_load=folder, **given)
        assert (config.lora_rank, config.lora_alpha, config.lora_target_modules) == (4, 32.0, ["q_proj", "v_proj"])
    assert rejection(valid, lora_load=folder, lora_rank=8) == (
        f"--lora-rank 8 contradicts --lora-load {folder}, which has 4: drop --lora-rank"
    )
    assert rejection(valid, lora_load=folder, lora_target_modules=["q_proj"]) == (
        f"--lora-target-modules q_proj contradicts --lora-load {folder}, which has q_proj v_proj: drop "
        "--lora-target-modules"
    )


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"use_dora": True}, "has use_dora True: only plain LoRA matrices can be trained further"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3': only plain LoRA matrices can be trained further"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save \['lm_head'\]: only plain LoRA"),
        ({"r": 0}, "has r 0 and lora_alpha 32: both must be numbers above 0"),
        ({"target_modules": ".*_proj"}, r"has target_modules '\.\*_proj': a list of names, or all-linear, is needed"),
    ],
)
def test_unsupported_adapter_configs_are_rejected(
    valid: dict[str, Any], facts: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "adapter", **facts)
    with pytest.raises(UserError, match=f"^{folder}/adapter_config.json {sentence}"):
        resolve_config(valid, lora_load=str(folder))


def test_incomplete_adapter_folders_are_rejected(valid: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    assert rejection(valid, lora_load=str(folder)) == (
        f"--lora-load {folder} has no adapter_model.safetensors: save the adapter again"
    )
    assert rejection(valid, lora_load=str(tmp_path)) == (
        f"--lora-load {tmp_path} has no adapter_config.json: give an adapter folder as PEFT saves it"
    )


def base(config: Config) -> InitialWeights:
    return adapter_base_weights(config, find_initial_weights(config))


SAVED = {"rank": 8, "alpha": 16.0, "targets": ["all-linear"]}


def test_full_and_adapter_checkpoints_are_not_interchangeable(valid: dict[str, Any], tmp_path: Path) -> None:
    whole, part = checkpoint(tmp_path / "whole", None), checkpoint(tmp_path / "part", SAVED)
    assert rejection(valid, load=str(whole), lora_rank=8) == (
        f"--load {whole}/iter_0000003 holds all weights and no adapter: give it as --ref-load to train an adapter on "
        "them, or drop --lora-rank"
    )
    assert rejection(valid, load=str(part)) == (
        f"--load {part}/iter_0000003 holds an adapter, not all weights: add --lora-rank 8 --lora-alpha 16 "
        "--lora-target-modules all-linear, or convert it with slime convert"
    )
    assert rejection(valid, load=str(part), lora_rank=4) == (
        f"--load {part}/iter_0000003 holds another adapter than the flags describe: resume with --lora-rank 8 "
        "--lora-alpha 16 --lora-target-modules all-linear"
    )
    assert rejection(valid, ref_load=str(part), use_kl_loss=True) == (
        f"--ref-load {part}/iter_0000003 holds an adapter, not all weights: convert it with slime convert"
    )
    assert resolve_config(valid, load=str(part), lora_rank=8).lora_rank == 8


def test_resumed_run_keeps_the_base_model_of_its_adapter(valid: dict[str, Any], tmp_path: Path) -> None:
    other = second_model(tmp_path / "other")
    assert base(resolve_config(valid, lora_rank=8)) == InitialWeights()
    assert base(resolve_config(valid, lora_rank=8, ref_load=str(other))) == InitialWeights(
        hf_folder=other, flag="--ref-load"
    )
    own = checkpoint(tmp_path / "own", SAVED | {"base": str(Path(valid["hf_checkpoint"]).resolve())})
    assert base(resolve_config(valid, lora_rank=8, load=str(own))) == InitialWeights()
    elsewhere = checkpoint(tmp_path / "elsewhere", SAVED | {"base": str(other)})
    assert base(resolve_config(valid, lora_rank=8, load=str(elsewhere))).hf_folder == other
    moved = checkpoint(tmp_path / "moved", SAVED | {"base": str(tmp_path / "gone")})
    assert base(resolve_config(valid, lora_rank=8, load=str(moved), ref_load=str(other))).hf_folder == other


def test_reference_shares_the_base_model_unless_they_differ(valid: dict[str, Any], tmp_path: Path) -> None:
    other = second_model(tmp_path / "other")
    kl: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "lora_rank": 8}
    assert reference_is_base(resolve_config(valid, **kl))
    assert reference_is_base(resolve_config(valid, **kl, ref_load=str(other)))
    assert not reference_is_base(resolve_config(valid, **kl, load=str(other)))
    assert not reference_is_base(resolve_config(valid, use_kl_loss=True, kl_loss_coef=0.1))


def test_adapter_sync_needs_engines_with_the_base_of_the_adapter(valid: dict[str, Any], tmp_path: Path) -> None:
    other = second_model(tmp_path / "other")
    assert resolve_config(valid, lora_rank=8, lora_sync="adapter").lora_sync == "adapter"
    assert rejection(valid, lora_rank=8, lora_sync="adapter", ref_load=str(other)) == (
        f"--lora-sync adapter: the engines have the weights of --hf-checkpoint {valid['hf_checkpoint']}, but the adapter "
        f"is trained on those of --ref-load {other}: use --lora-sync merged, or one folder"
    )
