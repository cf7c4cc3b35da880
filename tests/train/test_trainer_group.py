"""Tests real trainer processes: invariance to work partitioning, exact resume, and error messages."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.config import Config, derive
from slime.errors import UserError
from slime.train.checkpoints.errors import NotWritten
from slime.train.checkpoints.reader import SavedTensors
from slime.train.processes import TrainerDied
from slime.train.trainer_group import TrainerGroup, TrainResult
from tests.small_disk import small_disk
from tests.train.tiny_training import export_weights, make_samples

Folder = Callable[[str], Path]


def config(model: Path, **changes) -> Config:
    values = {
        "hf_checkpoint": str(model),
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 3,
        "global_batch_size": 9,
        "num_steps_per_rollout": 1,
        "num_rollout": 3,
        "lr": 1e-3,
        "micro_batch_size": 2,
        "dtype": "float32",
        "distributed_timeout_minutes": 2,
    }
    return derive(Config(**(values | changes)))


def train(config: Config, run_dir: Path, *, rollouts: range = range(3), save: bool = False):
    """Return the results of each rollout and the exported weights after the last one."""
    results: list[TrainResult] = []
    with TrainerGroup(config, device="cpu", run_dir=run_dir) as group:
        assert group.start() == rollouts.start
        for rollout_id in rollouts:
            results.append(group.train(rollout_id, make_samples(3, 3, seed=rollout_id)))
            if save:
                group.save(rollout_id)
        weights: dict[str, torch.Tensor] = {}
        for path in export_weights(group, run_dir / "export", version=1):
            weights |= load_file(path)
    return results, weights


def numbers(results: list[TrainResult]) -> list[dict[str, float]]:
    steps = [step for result in results for step in result.metrics]
    rollouts = [{k: v for k, v in r.rollout_metrics.items() if not k.startswith("perf/")} for r in results]
    return steps + rollouts


def assert_close(first, second, tolerance: float) -> None:
    for one, other in zip(numbers(first[0]), numbers(second[0]), strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, abs=tolerance)
    assert first[1].keys() == second[1].keys()
    for name, tensor in first[1].items():
        torch.testing.assert_close(tensor, second[1][name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def one_process(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory):
    save = tmp_path_factory.mktemp("one")
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coef": 0.01, "lr": 1e-4}
    changes["ci_test"] = True  # otherwise ppo_kl would compare a pass with itself
    base = config(model_folder("qwen3"), **changes, save=str(save / "ckpt"))
    return base, train(base, save / "run", save=True)


def test_two_ranks_with_dynamic_batches_match_one_process(one_process, tmp_path: Path) -> None:
    base, expected = one_process
    # 9 uneven samples over 2 ranks with a token budget: unequal micro-batches, some of them empty
    two = base.replace(actor_num_gpus_per_node=2, use_dynamic_batch_size=True, max_tokens_per_gpu=200, save=None)
    assert_close(train(two, tmp_path), expected, 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_advantages": True, "use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coef": 0.01},
        {"advantage_estimator": "ppo", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "balance_data": True},
    ],
)
def test_ranks_without_samples_do_not_change_results(
    model_folder: Folder, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Two processes of one tensor-parallel replica with one rollout per step: one process never has a sample."""
    model, each = model_folder("qwen3"), {"global_batch_size": 1, "num_steps_per_rollout": 9, "lr": 1e-4, **changes}
    expected = train(config(model, **each), tmp_path / "one", rollouts=range(1))
    halves = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
    assert_close(train(config(model, **each, **halves), tmp_path / "two", rollouts=range(1)), expected, 1e-5)


def test_resume_is_bitwise_equal_to_uninterrupted_run(one_process, tmp_path: Path) -> None:
    base, (results, weights) = one_process
    resumed = base.replace(load=str(Path(base.save) / "iter_0000001"), save=None)
    again, again_weights = train(resumed, tmp_path, rollouts=range(2, 3))
    assert numbers(again) == numbers(results[2:])
    assert all(torch.equal(tensor, again_weights[name]) for name, tensor in weights.items())


def test_resume_on_two_ranks_with_recompute_matches_one_process(one_process, tmp_path: Path) -> None:
    base, (results, weights) = one_process
    cut = {"actor_num_gpus_per_node": 2, "micro_batch_size": 1, "recompute_activations": True}
    resumed = base.replace(load=str(Path(base.save) / "iter_0000001"), save=None, **cut)
    assert_close(train(resumed, tmp_path, rollouts=range(2, 3)), (results[2:], weights), 1e-5)


def test_first_steps_report_expected_metrics(one_process, model_folder: Folder) -> None:
    _, (results, weights) = one_process
    first = results[0].metrics[0]
    assert abs(first["train/ppo_kl"]) < 1e-8
    assert results[0].rollout_metrics["perf/log_probs_time"] > 0
    assert abs(first["train/kl_loss"]) < 1e-8
    assert first["train/global_batch_size"] == 9
    assert [r.metrics[0]["train/step"] for r in results] == [0, 1, 2]
    assert results[0].rollout_metrics["rollout/log_probs"] == results[0].rollout_metrics["rollout/ref_log_probs"]
    assert results[0].rollout_metrics["perf/actor_train_tok_per_s"] > 0
    assert "lm_head.weight" not in weights  # tied: stored once
    fresh = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), dtype=torch.float32).state_dict()
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in weights.items())


def test_sft_loss_is_token_nll_and_frozen_parameters_stay(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    sft = config(
        folder, loss_type="sft_loss", calculate_per_token_loss=True, only_train_params_name_list=["mlp", "lm_head"]
    )
    groups = make_samples(3, 3, with_log_probs=False)
    with TrainerGroup(sft, device="cpu", run_dir=tmp_path) as group:
        group.start()
        result = group.train(0, groups)
        weights = load_file(export_weights(group, tmp_path / "export", version=1)[0])
    for name, before in load_file(folder / "model.safetensors").items():
        assert torch.equal(weights[name], before) == ("mlp" not in name and "lm_head" not in name), name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for sample in (s for g in groups for s in g):
        tokens = torch.tensor(sample.tokens)
        log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0].double(), -1)
        for offset, kept in enumerate(sample.loss_mask):
            position = len(tokens) - sample.response_length + offset
            total -= kept * log_p[position - 1, tokens[position]].item()
            count += kept
    assert result.metrics[0]["train/loss"] == pytest.approx(total / count, abs=1e-5)


def test_several_steps_use_old_log_probs_and_saved_hf_folder_loads(model_folder: Folder, tmp_path: Path) -> None:
    several = config(
        model_folder("qwen3_moe"), global_batch_size=3, num_steps_per_rollout=3, dtype="bfloat16",
        actor_num_gpus_per_node=2,
    )  # fmt: skip
    with TrainerGroup(several, device="cpu", run_dir=tmp_path / "run") as group:
        group.start()
        result = group.train(0, make_samples(3, 3))
        assert [step["train/step"] for step in result.metrics] == [0, 1, 2]
        assert result.metrics[0]["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        assert result.metrics[2]["train/ppo_kl"] != 0.0
        assert result.rollout_metrics["perf/log_probs_time"] > 0
        (tmp_path / "file").touch()
        with pytest.raises(NotWritten, match=r"cannot write the Hugging Face folder .*/file/hf: "):
            group.save_hf(tmp_path / "file" / "hf")
        with pytest.raises(NotWritten, match=r"cannot write the checkpoint of rollout 0 to .*/file: .*Not a directory"):
            group.save(0, folder=str(tmp_path / "file"))
        (tmp_path / "taken" / "iter_0000000" / "mp_rank_00").mkdir(parents=True)
        with pytest.raises(NotWritten, match=r"rollout 0 to .*/taken/iter_0000000: .* is not a checkpoint of a run"):
            group.save(0, folder=str(tmp_path / "taken"))
        with pytest.raises(NotWritten, match=r"cannot write version 1 of the weights to .*/file/export .*: "):
            export_weights(group, tmp_path / "file" / "export", version=1)
        assert group.is_usable
        group.save_hf(tmp_path / "hf")
        assert group.save(0, folder=str(tmp_path / "ckpt")) == tmp_path / "ckpt" / "iter_0000000"
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    original = set(load_file(next(model_folder("qwen3_moe").glob("*.safetensors"))))
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == original
    assert model.dtype == torch.bfloat16


def test_async_save_writes_checkpoint_during_training(model_folder: Folder, tmp_path: Path) -> None:
    both = config(model_folder("qwen3"), actor_num_gpus_per_node=2, async_save=True, save=str(tmp_path / "ckpt"))
    latest = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    with TrainerGroup(both, device="cpu", run_dir=tmp_path / "run") as group:
        group.start()
        assert group.finish_save() is None
        group.train(0, make_samples(3, 3))
        group.save(0, folder=str(tmp_path / "waited_for"))
        assert not group.is_saving
        assert group.save(0) == tmp_path / "ckpt" / "iter_0000000"
        group.train(1, make_samples(3, 3, seed=1))
        while (saved := group.finish_save(patient=False)) is None:
            time.sleep(0.05)
        assert saved == 0
        assert group.finish_save() is None
        for kind in ("model", "optim"):
            expected = dict(SavedTensors(tmp_path / "waited_for" / "iter_0000000", kind))
            found = dict(SavedTensors(tmp_path / "ckpt" / "iter_0000000", kind))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        with small_disk(tmp_path / "disk", size="128k") as disk:
            group.config = both.replace(save=str(disk))
            group.save(1)
            group.train(2, make_samples(3, 3, seed=2))
            with pytest.raises(NotWritten, match=r"cannot write the checkpoint of rollout 1 to .*No space left"):
                group.finish_save()
            assert group.is_usable
            assert group.finish_save() is None
            assert [path.name for path in disk.iterdir()] == []
        group.config = both
        group.save(2)
    assert latest.read_text() == "2\n"  # stop() waits for the save


def test_rejects_checkpoint_of_another_model(one_process, model_folder: Folder, tmp_path: Path) -> None:
    base, _ = one_process
    other = config(model_folder("llama"), load=base.save)
    group = TrainerGroup(other, device="cpu", run_dir=tmp_path)
    with group, pytest.raises(UserError, match=r"holds a qwen3 model .* is a llama model"):
        group.start()


def test_killed_rank_raises_trainer_died(model_folder: Folder, tmp_path: Path) -> None:
    with TrainerGroup(config(model_folder("qwen3")), device="cpu", run_dir=tmp_path) as group:
        group.start()
        for pid in group.processes.ranks[0].process.pids():
            with contextlib.suppress(ProcessLookupError):  # a process ends those below it when it is killed
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match=r"trainer-0 ended during train"):
            group.train(0, make_samples(3, 3))
    group.stop()
