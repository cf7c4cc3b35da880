"""Tests LoRA in a trainer: trained parameters, checkpoints, export and saved folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slime.cli import main
from slime.errors import UserError
from slime.models.safetensors_io import open_weights
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


def lora_run(model: Path, out: Path, **changes: Any) -> InProcess:
    return InProcess(config_for(model, out, **{"lora_rank": 4, "lr": 1e-2, **changes}))


def exported_weights(run: InProcess) -> dict[str, torch.Tensor]:
    export = run.trainer.actor.backend.export
    buckets = export.buckets(export.plan(torch.float32, 2**20))
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(9)[None]).logits.detach()


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_trains_only_adapters_and_exports_merged_weights(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder(kind), tmp_path)
    original = dict(open_weights(model_folder(kind)))
    before = exported_weights(run)
    assert before.keys() == original.keys()
    assert all(torch.equal(before[name], original[name]) for name in original)
    run.train(0, make_samples(3, 3))
    after = exported_weights(run)
    changed = {name for name in original if not torch.equal(after[name], original[name])}
    targets = {"q_proj", "k_proj", "v_proj", "o_proj"} | (
        {"gate_proj", "up_proj", "down_proj"} if kind == "qwen3" else set()
    )
    assert changed == {name for name in original if name.split(".")[-2] in targets and ".experts." not in name}
    backend = run.trainer.actor.backend
    trained = [name for name, p in backend.module.model.named_parameters() if p.requires_grad]
    assert run.weights.keys() == set(trained)
    assert all(".lora_" in name for name in trained)
    assert {p.shape for state in backend.optimizer.state.values() for p in [state["exp_avg"]]} <= {
        parameter.shape for name, parameter in backend.module.model.named_parameters() if ".lora_" in name
    }


def test_trainer_log_probs_match_exported_weights(model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder("qwen3"), tmp_path / "run", ci_test=True)
    run.train(0, make_samples(3, 3))
    run.trainer.save_hf(str(tmp_path / "hf"))
    plain = InProcess(config_for(tmp_path / "hf", tmp_path / "plain", ci_test=True))
    metrics = [one.train(1, make_samples(3, 3, seed=1))["rollout_metrics"] for one in (run, plain)]
    assert metrics[0]["rollout/log_probs"] == pytest.approx(metrics[1]["rollout/log_probs"], abs=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_saved_adapter_in_peft_matches_merged_folder_logits(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder(kind), tmp_path / "run", save=str(tmp_path / "ckpt"))
    run.train(0, make_samples(3, 3))
    run.trainer.save_hf(str(tmp_path / "hf"))
    run.trainer.save_hf(str(tmp_path / "hf"))  # replaces the whole folder
    merged = logits(load(tmp_path / "hf"))
    assert (merged - logits(load(model_folder(kind)))).abs().max() > 1e-3
    peft = PeftModel.from_pretrained(load(model_folder(kind)), tmp_path / "hf" / "adapter")
    torch.testing.assert_close(logits(peft), merged, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == str(model_folder(kind).resolve())


def test_reference_log_probs_use_the_base_without_a_copy(model_folder: Folder, tmp_path: Path) -> None:
    """There is no second copy, and the log-probs equal those of a separate reference model."""
    samples = make_samples(3, 3)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    run = lora_run(model_folder("qwen3"), tmp_path / "run", **kl)
    assert run.trainer.actor.backend.frozen._resident == {}
    alone = InProcess(config_for(model_folder("qwen3"), tmp_path / "alone", **kl))
    found = [one.train(0, samples) for one in (run, alone)]
    found[0] = run.train(1, samples)
    reference = [one["rollout_metrics"]["rollout/ref_log_probs"] for one in found]
    assert reference[0] == pytest.approx(reference[1], abs=1e-6)
    assert abs(found[0]["metrics"][0]["train/kl_loss"]) > 1e-3


def test_separate_reference_is_loaded_when_load_differs(model_folder: Folder, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = load(model_folder("qwen3"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    start = lora_run(
        model_folder("qwen3"), tmp_path / "a", use_kl_loss=True, kl_loss_coef=0.1, load=str(tmp_path / "other")
    )
    assert list(start.trainer.actor.backend.frozen._resident) == ["ref"]
    answer = start.train(0, make_samples(3, 3))
    assert abs(answer["metrics"][0]["train/kl_loss"]) > 1e-4


def test_moving_reference_and_old_actor_are_stored_as_adapters(model_folder: Folder, tmp_path: Path) -> None:
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "keep_old_actor": True}
    run = lora_run(model_folder("qwen3"), tmp_path / "run", save=str(tmp_path / "ckpt"), **flags)
    backend = run.trainer.actor.backend
    first = run.train(0, make_samples(3, 3))
    assert abs(first["metrics"][0]["train/kl_loss"]) < 1e-8
    before = run.weights
    second = run.train(1, make_samples(3, 3, seed=1))
    assert abs(second["metrics"][0]["train/kl_loss"]) < 1e-8  # the reference was updated to the policy
    assert backend.frozen._resident == {}
    assert backend.frozen._stage is None
    backend.frozen.snapshot("kept", on_host=True)
    now = run.weights
    with backend.using("old_actor"):
        inside = run.weights
    assert all(torch.equal(run.weights[name], now[name]) for name in now)
    assert any(not torch.equal(inside[name], now[name]) for name in now)
    assert not all(torch.equal(before[name], now[name]) for name in now)
    run.trainer.save(1)
    again = lora_run(model_folder("qwen3"), tmp_path / "again", load=str(tmp_path / "ckpt"), **flags)
    saved = dict(run.trainer.actor.backend.full_parameters("ref"))
    assert all(torch.equal(t, saved[n]) for n, t in again.trainer.actor.backend.full_parameters("ref"))


def test_checkpoint_holds_only_the_adapter_and_resumes_exactly(model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder("qwen3"), tmp_path / "run", save=str(tmp_path / "ckpt"))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    checkpoint = tmp_path / "ckpt" / "iter_0000000"
    saved = {name for file in checkpoint.glob("model-*.safetensors") for name in load_file(file)}
    assert saved == run.weights.keys()
    meta = json.loads((checkpoint / "meta.json").read_text())["lora"]
    assert meta == {
        "rank": 4,
        "alpha": 8.0,
        "targets": ["all-linear"],
        "base": str(model_folder("qwen3").resolve()),
        "base_dtype": "float32",
    }
    first = run.train(1, make_samples(3, 3, seed=1))
    again = lora_run(model_folder("qwen3"), tmp_path / "again", load=str(tmp_path / "ckpt"), seed=99)
    assert again.train(1, make_samples(3, 3, seed=1))["metrics"] == first["metrics"]
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in run.weights.items())


def test_resumed_run_keeps_its_initial_base(model_folder: Folder, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = load(model_folder("qwen3"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    run = lora_run(model_folder("qwen3"), tmp_path / "run", load=str(tmp_path / "other"), save=str(tmp_path / "ckpt"))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    again = lora_run(model_folder("qwen3"), tmp_path / "again", load=str(tmp_path / "ckpt"))
    expected = exported_weights(run)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported_weights(again).items())


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_slime_convert_matches_the_folder_saved_by_the_trainer(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder(kind), tmp_path / "run", save=str(tmp_path / "ckpt"))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    run.trainer.save_hf(str(tmp_path / "hf"))
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    expected = dict(open_weights(tmp_path / "hf"))
    found = dict(open_weights(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_convert_rejects_base_of_another_shape(
    model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lora_run(model_folder("qwen3"), tmp_path / "run", save=str(tmp_path / "ckpt"))
    run.trainer.save(0)
    other = str(model_folder("phi3_longrope"))
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--hf-checkpoint", other]) == 2
    assert f"which {other} lacks: give the folder of the same model with --hf-checkpoint" in capsys.readouterr().err


def test_lora_load_continues_from_saved_adapter(model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder("qwen3"), tmp_path / "run")
    run.train(0, make_samples(3, 3))
    run.trainer.save_hf(str(tmp_path / "hf"))
    adapter = str(tmp_path / "hf" / "adapter")
    again = lora_run(model_folder("qwen3"), tmp_path / "again", lora_load=adapter)
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in run.weights.items())
    with pytest.raises(UserError, match=r"--lora-load .* has model\.layers\.\d\..*, which none of the targets name"):
        lora_run(model_folder("qwen3"), tmp_path / "other", lora_load=adapter, lora_target_modules=["q_proj"])
    tensors = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: tensors[name][:, 1:].clone()}, tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"is for model\..*q_proj of \(64, 63\), which is \(64, 64\) here"):
        lora_run(model_folder("qwen3"), tmp_path / "other", lora_load=adapter)


def test_ppo_critic_has_its_own_adapter_and_head(model_folder: Folder, tmp_path: Path) -> None:
    flags = {"advantage_estimator": "ppo"}
    run = lora_run(model_folder("qwen3"), tmp_path / "run", save=str(tmp_path / "ckpt"), **flags)
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    critic = dict(run.trainer.critic.backend.full_parameters())
    assert critic["lm_head.weight"].abs().max() > 0
    assert {name.split(".")[-2] for name in critic} == {"lora_A", "lora_B", "lm_head"}
    first = run.train(1, make_samples(3, 3, seed=1))["metrics"]
    again = lora_run(model_folder("qwen3"), tmp_path / "again", load=str(tmp_path / "ckpt"), **flags)
    assert again.train(1, make_samples(3, 3, seed=1))["metrics"] == first


def test_bfloat16_base_with_float32_adapter_and_moments(model_folder: Folder, tmp_path: Path) -> None:
    run = lora_run(model_folder("qwen3"), tmp_path, dtype="bfloat16", recompute_activations=True, lr=1e-4)
    run.train(0, make_samples(3, 3))
    kinds = {(".lora_" in name, p.dtype) for name, p in run.trainer.actor.backend.module.model.named_parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    assert {state["exp_avg"].dtype for state in run.trainer.actor.backend.optimizer.state.values()} == {torch.float32}


def test_layers_are_sharded_between_forward_and_backward(model_folder: Folder, tmp_path: Path) -> None:
    """A layer's weights are gathered only while it runs, not between forward and backward."""
    run = lora_run(model_folder("qwen3"), tmp_path)
    backend, seen = run.trainer.actor.backend, []
    own = backend.forward_backward

    def looking(micro_batches: Any, objective: Any, **how: Any) -> Any:
        def look(*arguments: Any) -> Any:
            layers = backend.module.model.model.layers
            seen.append([isinstance(parameter, DTensor) for parameter in layers.parameters()])
            return objective(*arguments)

        return own(micro_batches, look, **how)

    backend.forward_backward = looking
    run.train(0, make_samples(3, 3))
    assert seen
    assert all(all(one) for one in seen)


def test_rejects_unknown_lora_target_modules(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--lora-target-modules qkv: Qwen3ForCausalLM has no linear layer of that name"):
        lora_run(model_folder("qwen3"), tmp_path, lora_target_modules=["qkv"])
