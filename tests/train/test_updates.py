"""Tests training updates: temperature, rates, recomputed losses, untrainable samples and non-finite steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.data.sample import Sample
from slime.train.actor import TrainedModel
from slime.train.backend import StepTotals
from slime.train.losses.objectives import supervised_loss
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import flatten_samples, make_train_batch
from slime.train.samples.dp_shards import rank_shares
from slime.train.topology import Ranks, Topology
from tests.peers import together
from tests.train import hooks
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


def test_sft_loss_ignores_rollout_temperature(model_folder: Folder, tmp_path: Path) -> None:
    def loss(**flags: Any) -> float:
        run = InProcess(config_for(model_folder("llama"), tmp_path, loss_type="sft_loss", **flags))
        return run.train(0, make_samples(3, 3))["metrics"][0]["train/loss"]

    assert loss(rollout_temperature=0.5) == loss()


def test_critic_only_steps_do_not_advance_the_policy_schedule(model_folder: Folder, tmp_path: Path) -> None:
    """Four of six rollouts update the policy: two of warm-up, then two of decay to the minimum rate."""
    flags: dict[str, Any] = {
        "advantage_estimator": "ppo", "num_critic_only_steps": 2, "num_rollout": 6, "lr": 1e-3, "lr_warmup_iters": 2,
        "lr_decay_style": "linear", "min_lr": 2e-4, "save": str(tmp_path / "c"), "load": str(tmp_path / "c"),
    }  # fmt: skip
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    steps = [run.train(rollout_id, make_samples(3, 3))["metrics"][0] for rollout_id in range(3)]
    assert [step.get("train/lr-pg_0") for step in steps] == [None, None, 0.0]
    assert [step["train/step"] for step in steps] == [0, 1, 2]
    run.trainer.save(2)
    again = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    steps = [again.train(rollout_id, make_samples(3, 3))["metrics"][0] for rollout_id in range(3, 6)]
    assert [step["train/lr-pg_0"] for step in steps] == pytest.approx([5e-4, 1e-3, 6e-4])
    assert [step["train/critic-lr-pg_0"] for step in steps] == pytest.approx([8e-4, 6e-4, 4e-4])


def test_recompute_loss_function_gives_equal_weights(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    loss = hooks.likelihood_by_metadata

    def counted(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
        calls.append(len(batch["tokens"]))
        return loss(args, batch, logits, sum_of_sample_mean)

    monkeypatch.setattr(hooks, "likelihood_by_metadata", counted)
    flags = {"loss_type": "custom_loss", "custom_loss_function_path": f"{hooks.__name__}.likelihood_by_metadata"}
    weights, times = [], []
    for again in (False, True):
        run = InProcess(config_for(model_folder("llama"), tmp_path, **flags, recompute_loss_function=again))
        groups = make_samples(3, 3)
        for sample in flatten_samples(groups):
            sample.train_metadata = {"weight": 1.0}
        calls.clear()
        run.train(0, groups)
        times.append(len(calls))
        weights.append(run.weights)
    assert times[1] == 2 * times[0]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


def test_non_finite_critic_step_is_skipped_and_training_continues(model_folder: Folder, tmp_path: Path) -> None:
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, advantage_estimator="ppo"))
    groups = make_samples(3, 3)
    groups[1][0].reward = 1e30  # its square overflows float32
    before = {name: tensor.clone() for name, tensor in run.trainer.critic.backend.full_parameters()}
    answer = run.train(3, groups)
    assert answer["metrics"][0]["train/critic-skipped_steps"] == 1.0
    assert re.match(
        r"the critic, rollout 3, step 0: no update, the loss is inf .* sample 3 has the largest advantage, 1e\+30",
        answer["warnings"][0],
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in run.trainer.critic.backend.full_parameters())
    answer = run.train(4, make_samples(3, 3))
    assert (answer["warnings"], answer["metrics"][0]["train/critic-skipped_steps"]) == ([], 0.0)
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.trainer.critic.backend.full_parameters())


def step_with_norm_of_rank(ranks: Ranks, norms: list[float]) -> str:
    """Run a step on one of several ranks, with the gradient norm of each rank given."""
    done: list[str] = []
    alone = Ranks(0, 1, ranks.device)
    backend = SimpleNamespace(
        topology=Topology(ranks, ranks, alone, alone),
        begin_step=lambda *_: None,
        forward=lambda _: [],
        forward_backward=lambda *_, **__: StepTotals({"loss": torch.tensor(0.5)}),
        clip_gradients=lambda: torch.tensor(norms[ranks.rank]),
        drop_gradients=lambda: done.append("dropped"),
        update=lambda _: done.append("updated"),
    )
    warnings: list[str] = []
    model = TrainedModel(Config(), backend, InitialWeights())
    if model.update(0, 0, {}, [], supervised_loss, warnings) is None:
        assert warnings == [
            f"rollout 0, step 0: no update, the loss is 1 and the gradient norm {norms[ranks.rank]:g}; check the "
            "tokens, log-probs and rewards, or lower --lr"
        ]
        done.append("skipped")
    assert model.state.updates == ("updated" in done)
    return " ".join(done)


@pytest.mark.parametrize(("second", "wanted"), [(1.0, "updated"), (float("nan"), "dropped skipped")])
def test_all_ranks_skip_a_step_that_is_non_finite_on_one_rank(second: float, wanted: str, tmp_path: Path) -> None:
    assert together(2, step_with_norm_of_rank, [1.0, second], folder=tmp_path) == [wanted] * 2


@pytest.mark.parametrize("flags", [{}, {"advantage_estimator": "ppo", "normalize_advantages": True}])
def test_untrainable_samples_are_skipped_without_changing_results(
    flags: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    groups = make_samples(3, 3)
    groups[0][0].status, groups[0][0].reward = Sample.Status.FAILED, None
    groups[1][1].remove_sample = True
    groups[2][2].loss_mask = [0] * groups[2][2].response_length
    flags = flags | {"micro_batch_size": 9, "adam_eps": 1.0, "lr": 0.1}
    outcomes = []
    for trainable in (True, False):
        run = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
        batch = make_train_batch(run.config, flatten_samples(groups))
        schedule = build_schedule(
            batch.total_lengths,
            batch.rollout_ids,
            num_ranks=1,
            global_batch_size=9,
            micro_batch_size=9,
            trainable=batch.trainable if trainable else None,
        )
        given = rank_shares(batch, schedule)[0]
        answer = run.trainer.train(0, given)
        outcomes.append((given, answer["metrics"][0], run.weights))
    (short, metrics, weights), (full, all_metrics, all_weights) = outcomes
    assert short["batch"]["sample_indices"] == [i for i in full["batch"]["sample_indices"] if i not in (0, 4, 8)]
    assert short["steps"][0]["num_rollouts"] == 9
    assert metrics == pytest.approx(all_metrics, rel=1e-5, abs=1e-7)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, all_weights[name], atol=1e-6, rtol=1e-5)


def test_rollout_without_trainable_tokens_changes_no_weight(model_folder: Folder, tmp_path: Path) -> None:
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, advantage_estimator="ppo"))
    groups = make_samples(3, 3)
    for sample in flatten_samples(groups):
        sample.remove_sample = True
    before = run.weights
    assert run.train(0, groups)["metrics"][0]["train/grad_norm"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights.items())
