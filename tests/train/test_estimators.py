"""Tests every estimator in a real trainer: invariance to micro-batches and ranks, hooks, skipped steps."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.algorithms.advantages import EstimatorInputs
from slime.algorithms.estimators import ESTIMATORS as REGISTRY
from slime.algorithms.estimators import Estimator
from slime.algorithms.rewards import RewardGroups
from slime.config.algorithm import algorithm_contradictions, uses_group_baseline
from slime.data.sample import Sample
from slime.driver.recovery import RESTARTABLE_ERRORS
from slime.errors import UserError
from slime.train.losses.advantages import set_advantages
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import flatten_samples, make_custom_batch, make_train_batch
from slime.train.samples.dp_shards import rank_shares
from slime.train.samples.rollout_data import make_rollout_data
from slime.train.topology import ProcessRanks
from slime.train.trainer_group import TrainerGroup
from tests.rows import some
from tests.test_docs import documented_metrics
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import build_model, export_weights, make_samples

Folder = Callable[[str], Path]
HOOKS = "tests.train.hooks"

ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "gspo": {"advantage_estimator": "gspo", "use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "use_opsm": True},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        "kl_coef": 0.1,
    },
    "ppo": {"advantage_estimator": "ppo", "lambd": 0.95, "gamma": 0.99, "kl_coef": 0.05, "normalize_advantages": True},
    "rloo": {"advantage_estimator": "rloo"},
    "dr_grpo": {"advantage_estimator": "dr_grpo"},
    "dapo": {"advantage_estimator": "dapo", "use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0},
}


def test_estimator_is_defined_by_one_registry_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An entry determines flags, rewards and advantages; other modules neither list nor compare estimator names."""

    def best_alone(rewards: Any, groups: RewardGroups) -> list[float]:
        return [reward if reward == max(rewards) else 0.0 for reward in rewards]

    def halves(given: EstimatorInputs) -> Any:
        advantages = [0.5 * reward * mask for reward, mask in zip(given.rewards, given.masks, strict=True)]
        return advantages, advantages

    presets = {"loss_aggregation": "constant"}
    toy = Estimator("toy", "response", halves, best_alone, policy_loss="cispo", needs_whitening=True, presets=presets)
    monkeypatch.setitem(REGISTRY, "toy", toy)
    config = config_for(tmp_path, tmp_path, advantage_estimator="toy")
    assert (config.loss_aggregation, config.policy_loss, uses_group_baseline(config)) == ("constant", "cispo", True)
    assert any("--advantage-estimator toy needs whitened" in sentence for sentence in algorithm_contradictions(config))
    batch = make_train_batch(
        config, [Sample(tokens=[1, 2], response_length=1, reward=r, group_index=0) for r in (1.0, 3.0)]
    )
    assert batch.rewards == [0.0, 3.0]
    data = make_rollout_data(batch)
    set_advantages(config, data, ProcessRanks())
    assert [values.tolist() for values in data["advantages"]] == [[0.0], [1.5]]

    for path in (Path(__file__).parents[2] / "slime").rglob("*.py"):
        if path.name == "estimators.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            words = {one.value for one in ast.iter_child_nodes(node) if isinstance(one, ast.Constant)} & set(REGISTRY)
            assert not isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict) or len(words) < 2, f"{path}: {words}"
            asked = isinstance(node, ast.Compare | ast.Match) and "estimator" in ast.unparse(node).partition("\n")[0]
            assert not (asked and words), f"{path}: {ast.unparse(node)}"


SMOOTH = {"lr": 0.1, "adam_eps": 1.0}
"""Makes updates proportional to the gradient; with the usual epsilon, Adam turns rounding errors into full updates."""


def with_policy_log_probs(groups: list[list[Sample]], folder: Path, noise: float = 0.05) -> list[list[Sample]]:
    """Set rollout log-probs to those of the model plus noise, like those of an engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for sample in flatten_samples(groups):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
        n = sample.response_length
        own = log_p[-n - 1 : -1].gather(1, tokens[-n:, None])[:, 0]
        sample.rollout_log_probs = (own + noise * torch.randn(n, generator=generator)).tolist()
    return groups


@pytest.mark.parametrize("estimator", some(["gspo", "reinforce_plus_plus_baseline", "ppo"], of=ESTIMATORS))
def test_micro_batch_size_does_not_change_results(estimator: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    groups = with_policy_log_probs(make_samples(3, 3), folder)
    outcomes = []
    for size in (1, 4, 9):
        run = InProcess(
            config_for(
                folder, tmp_path, micro_batch_size=size, num_steps_per_rollout=3, **SMOOTH, **ESTIMATORS[estimator]
            )
        )
        answer = run.train(0, groups)
        numbers = [step[name] for step in answer["metrics"] for name in sorted(step)]
        rollout = [v for k, v in sorted(answer["rollout_metrics"].items()) if not k.startswith("perf/")]
        names = {name for step in answer["metrics"] for name in step} | set(answer["rollout_metrics"])
        assert names <= documented_metrics(), "docs/metrics.md lacks some"
        outcomes.append((torch.tensor(numbers + rollout), run.weights))
    assert len(outcomes[0][0]) > 30
    for numbers, weights in outcomes[1:]:
        torch.testing.assert_close(numbers, outcomes[0][0], atol=1e-6, rtol=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, outcomes[0][1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("estimator", some(["ppo"], of=ESTIMATORS))
def test_two_ranks_match_one_rank(estimator: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    groups = with_policy_log_probs(make_samples(3, 3), folder)
    outcomes = []
    for ranks in (1, 2):
        flags = ESTIMATORS[estimator] | SMOOTH | {"actor_num_gpus_per_node": ranks, "global_batch_size": 3}
        config = config_for(folder, tmp_path / str(ranks), num_steps_per_rollout=3, **flags)
        with TrainerGroup(config, device="cpu", run_dir=tmp_path / str(ranks)) as group:
            group.start()
            result = group.train(0, groups)
            weights: dict[str, torch.Tensor] = {}
            for path in export_weights(group, tmp_path / str(ranks) / "export", version=1):
                weights |= load_file(path)
        outcomes.append((result, weights))
    (one, one_weights), (two, two_weights) = outcomes
    for first, second in zip(one.metrics, two.metrics, strict=True):
        assert first == pytest.approx(second, rel=1e-5, abs=1e-6)
    for name, tensor in one_weights.items():
        torch.testing.assert_close(two_weights[name], tensor, atol=1e-6, rtol=1e-5)


def test_reward_statistics_are_per_group_for_uneven_groups(model_folder: Folder, tmp_path: Path) -> None:
    config = config_for(model_folder("qwen3"), tmp_path)
    sizes, rewards = (1, 3, 8), [5.0, 1.0, 2.0, 6.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 4.0, 1.0]
    samples = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            samples.append(
                Sample(group_index=group, index=len(samples), tokens=[1, 2, 3], response_length=2,
                       reward=rewards[len(samples)], status=Sample.Status.COMPLETED)
            )  # fmt: skip
    batch = make_train_batch(config, samples)
    expected, begin = [], 0
    for size in sizes:
        own = rewards[begin : begin + size]
        mean = sum(own) / size
        deviation = math.sqrt(sum((r - mean) ** 2 for r in own) / max(size - 1, 1))
        expected += [(r - mean) / (deviation + 1e-6) if size > 1 else 0.0 for r in own]
        begin += size
    assert batch.rewards == pytest.approx(expected, abs=1e-9)
    alone = make_train_batch(config.replace(advantage_estimator="rloo"), samples).rewards
    assert alone[0] == 0.0
    assert alone[1] == pytest.approx(1.0 - (2.0 + 6.0) / 2)


def test_critic_loss_falls_and_critic_resumes_with_policy(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    flags: dict[str, Any] = {
        "advantage_estimator": "ppo", "num_critic_only_steps": 2, "critic_lr": 3e-3, "num_rollout": 6,
        "save": str(tmp_path / "ckpt"), "load": str(tmp_path / "ckpt"), "value_clip": 10.0,
    }  # fmt: skip
    run = InProcess(config_for(folder, tmp_path, **flags))
    before = run.weights
    groups = make_samples(3, 3)
    losses = []
    for rollout_id in range(2):
        answer = run.train(rollout_id, groups)
        losses.append(answer["metrics"][0]["train/critic-value_loss"])
        assert "train/pg_loss" not in answer["metrics"][0]
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights.items())
    for rollout_id in range(2, 4):
        losses.append(run.train(rollout_id, groups)["metrics"][0]["train/critic-value_loss"])
    assert losses[-1] < 0.7 * losses[0]
    assert not all(torch.equal(before[name], tensor) for name, tensor in run.weights.items())
    run.trainer.save(3)
    ahead = run.train(4, groups)
    again = InProcess(config_for(folder, tmp_path, **flags))
    assert again.start == 4
    resumed = again.train(4, groups)
    assert resumed["metrics"] == ahead["metrics"]
    assert (tmp_path / "ckpt/critic/iter_0000003/meta.json").is_file()


def test_ref_update_interval_copies_policy_and_survives_resume(model_folder: Folder, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "use_kl_loss": True, "kl_loss_type": "k2", "ref_update_interval": 2, "save": str(tmp_path / "c"),
        "load": str(tmp_path / "c"), "lr": 1e-2,
    }  # fmt: skip
    run = InProcess(config_for(model_folder("llama"), tmp_path, **flags))
    groups = make_samples(3, 3)
    kl = [run.train(i, groups)["metrics"][0]["train/kl_loss"] for i in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[1] > 1e-4
    assert kl[2] == pytest.approx(0.0, abs=1e-9)
    run.trainer.save(2)
    ahead = run.train(3, groups)["metrics"][0]
    assert ahead["train/kl_loss"] > 1e-4
    again = InProcess(config_for(model_folder("llama"), tmp_path, **flags))
    assert again.train(3, groups)["metrics"][0] == ahead


def test_old_actor_is_the_last_exported_policy(model_folder: Folder, tmp_path: Path) -> None:
    run = InProcess(config_for(model_folder("llama"), tmp_path, keep_old_actor=True, lr=1e-2))
    groups = make_samples(3, 3)
    run.trainer.sender.export_weights(str(tmp_path / "w"), 0)
    first = run.train(0, groups)
    second = run.train(1, groups)  # no export in between: the old policy is still the first one
    assert second["rollout_metrics"]["rollout/log_probs"] == first["rollout_metrics"]["rollout/log_probs"]
    assert abs(second["metrics"][0]["train/ppo_kl"]) > 1e-5
    run.trainer.sender.export_weights(str(tmp_path / "w"), 2)
    assert run.train(2, groups)["metrics"][0]["train/ppo_kl"] == pytest.approx(0.0, abs=1e-7)


def log_probs_of(weights: dict[str, torch.Tensor], kind: str, sample: Sample) -> torch.Tensor:
    """Return the log-probs of the response from a plain forward pass of the model."""
    model = build_model(kind)
    model.load_state_dict(weights, strict=False)
    tokens = torch.tensor([sample.tokens])
    with torch.no_grad():
        every = torch.log_softmax(model(tokens).logits[0, :-1], dim=-1)
    return every.gather(1, tokens[0, 1:, None])[-sample.response_length :, 0]


def test_one_step_async_uses_old_log_probs_of_sampling_version(model_folder: Folder, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"keep_old_actor": True, "async_mode": "one-step", "use_tis": False, "lr": 1e-2}
    dump = str(tmp_path / "{rollout_id}.jsonl")
    run = InProcess(config_for(model_folder("llama"), tmp_path, save_debug_train_data=dump, **flags))
    weights = []
    for version in range(2):
        weights.append(run.weights)
        run.trainer.sender.export_weights(str(tmp_path / "w"), version)
        groups = make_samples(3, 3)
        for sample in flatten_samples(groups):
            sample.version_spans = [["0", sample.response_length]]
        answer = run.train(version, groups)
    assert abs(answer["metrics"][0]["train/ppo_kl"]) > 1e-5  # sampled by version 0, trained on by version 1
    run.trainer.sender.export_weights(str(tmp_path / "w"), 2)
    samples = flatten_samples(groups)
    for sample in samples:  # the weights changed during generation, and version 0 is discarded
        sample.version_spans = [["0", 1], ["1", sample.response_length - 1]]
    samples[0].version_spans = []
    newest = run.weights
    rows = run.train(2, groups)["dump"]
    for sample, row in zip(samples, sorted(rows, key=lambda row: row["sample_indices"]), strict=True):
        expected = log_probs_of(newest if sample is samples[0] else weights[1], "llama", sample)
        torch.testing.assert_close(torch.tensor(row["log_probs"]), expected, atol=1e-4, rtol=1e-4)


def test_trainer_opd_advantages_equal_scaled_reverse_kl(model_folder: Folder, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    build_model("llama", seed=3).save_pretrained(teacher)
    flags: dict[str, Any] = {
        "use_opd": True, "opd_type": "trainer", "opd_teacher_load": str(teacher), "opd_kl_coef": 0.5,
    }  # fmt: skip
    run = InProcess(config_for(model_folder("llama"), tmp_path, **flags))
    groups = make_samples(3, 3)
    for sample in flatten_samples(groups):
        sample.reward = None
    found = run.train(0, groups)["rollout_metrics"]
    gap = found["rollout/log_probs"] - found["rollout/teacher_log_probs"]
    assert found["rollout/opd_reverse_kl"] == pytest.approx(gap, abs=1e-5)
    assert found["rollout/advantages"] == pytest.approx(-0.5 * gap, abs=1e-5)


def train_once(folder: Path, out: Path, groups: list[list[Sample]] | None = None, **flags: Any) -> dict[str, Any]:
    return InProcess(config_for(folder, out, **flags)).train(0, groups or make_samples(3, 3))


@pytest.mark.parametrize("lacking", [9, 1])
@pytest.mark.parametrize("normalize", [False, True])
def test_default_tis_is_skipped_when_log_probs_are_missing(
    model_folder: Folder, tmp_path: Path, lacking: int, normalize: bool
) -> None:
    """If a sample lacks log-probs, the default correction is skipped for the rollout; with --use-tis it is an error."""
    folder, flags = model_folder("llama"), {"async_mode": "one-step", "tis_batch_normalize": normalize}
    groups = make_samples(3, 3)
    for sample in flatten_samples(groups)[:lacking]:
        sample.rollout_log_probs = None
    found = train_once(folder, tmp_path, groups, **flags)["metrics"][0]
    without = train_once(folder, tmp_path, groups, **flags, use_tis=False)["metrics"][0]
    assert found == without
    with_all = train_once(folder, tmp_path, make_samples(3, 3), **flags)["metrics"][0]
    assert with_all["train/tis"] != 1.0
    with pytest.raises(UserError, match="--use-tis: a sample has no rollout log-probs; its generate function must"):
        train_once(folder, tmp_path, groups, **flags, use_tis=True)


def test_opsm_masks_sequences_with_one_update_per_rollout(model_folder: Folder, tmp_path: Path) -> None:
    """The engine's log-probs are higher than the trainer's: stale samples or numerical differences."""
    folder = model_folder("qwen3")
    groups = with_policy_log_probs(make_samples(3, 3), folder, noise=0.0)
    for sample in flatten_samples(groups):
        sample.rollout_log_probs = torch.tensor(sample.rollout_log_probs).bfloat16().tolist()  # fresh, from bf16 logits
    flags = {"use_opsm": True, "num_steps_per_rollout": 1}
    assert train_once(folder, tmp_path, groups, **flags)["metrics"][0]["train/opsm_clipfrac"] == 0.0
    for sample in flatten_samples(groups):
        sample.rollout_log_probs = [value + 1.0 for value in sample.rollout_log_probs or ()]
    batch = make_train_batch(config_for(folder, tmp_path, **flags), flatten_samples(groups))
    below = [reward < 0 and mask.any() for reward, mask in zip(batch.rewards, batch.loss_masks, strict=True)]
    masked = train_once(folder, tmp_path, groups, **flags)["metrics"][0]["train/opsm_clipfrac"]
    assert masked == pytest.approx(sum(below) / len(below))
    flatten_samples(groups)[0].rollout_log_probs = None
    with pytest.raises(UserError, match="--use-opsm: a sample has no rollout log-probs; its generate function must"):
        train_once(folder, tmp_path, groups, **flags)


def test_custom_loss_hooks_take_effect(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    groups = with_policy_log_probs(make_samples(3, 3), folder)

    def loss(**flags: Any) -> float:
        return train_once(folder, tmp_path, groups, num_steps_per_rollout=1, **flags)["metrics"][0]["train/pg_loss"]

    plain = loss(disable_rewards_normalization=True)
    assert plain != 0
    doubled = loss(disable_rewards_normalization=True, rollout_data_postprocess_path=f"{HOOKS}.double_advantages")
    assert doubled == pytest.approx(2 * plain, rel=1e-5)
    assert loss(custom_advantage_function_path=f"{HOOKS}.zero_advantages") == 0.0
    halved = train_once(
        folder, tmp_path, groups, use_tis=True, disable_rewards_normalization=True,
        custom_tis_function_path=f"{HOOKS}.half_weights",
    )["metrics"][0]  # fmt: skip
    assert halved["train/pg_loss"] == pytest.approx(0.5 * plain, rel=1e-5)
    trained_on = [abs(sample.reward) for sample in flatten_samples(groups) if any(sample.loss_mask or [1])]
    assert halved["train/advantages_abs_max"] == pytest.approx(max(trained_on))
    assert abs(halved["train/my_gap"]) < 0.1
    by_constant = loss(
        disable_rewards_normalization=True, custom_pg_loss_reducer_function_path=f"{HOOKS}.constant_reducer"
    )
    constant = loss(disable_rewards_normalization=True, loss_aggregation="constant")
    assert by_constant == pytest.approx(constant, rel=1e-5)
    with pytest.raises(UserError, match="must set rollout_data\\['advantages'\\]"):
        loss(custom_advantage_function_path=f"{HOOKS}.advantages_of_the_wrong_length")


def test_hooks_share_values_through_args(model_folder: Folder, tmp_path: Path) -> None:
    """Covers reward post-processing in the driver, and advantages, post-processing and correction in the trainer."""
    flags = {
        "custom_reward_post_process_path": f"{HOOKS}.remembered_rewards",
        "custom_advantage_function_path": f"{HOOKS}.remembered_advantages",
        "rollout_data_postprocess_path": f"{HOOKS}.what_is_remembered",
        "custom_tis_function_path": f"{HOOKS}.remembered_weights",
        "use_tis": True,
    }
    found = train_once(model_folder("llama"), tmp_path, make_samples(3, 3), **flags)["metrics"][0]
    assert found["train/seen"] == pytest.approx(3.0)  # incremented by each of the trainer's three functions


def test_custom_loss_reads_train_metadata_and_scales_like_sft_loss(model_folder: Folder, tmp_path: Path) -> None:
    folder, groups = model_folder("llama"), make_samples(3, 3)
    for sample in flatten_samples(groups):
        sample.train_metadata = {"weight": 1.0}
    flags = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HOOKS}.likelihood_by_metadata"}
    own = train_once(folder, tmp_path, groups, **flags)["metrics"][0]
    supervised = train_once(folder, tmp_path, groups, loss_type="sft_loss")["metrics"][0]
    assert own["train/loss"] == pytest.approx(supervised["train/loss"], rel=1e-5)
    assert own["train/grad_norm"] == pytest.approx(supervised["train/grad_norm"], rel=1e-4)
    assert own["train/samples"] == pytest.approx(1.0)
    for sample in flatten_samples(groups):
        sample.train_metadata = {"weight": 3.0}
    assert train_once(folder, tmp_path, groups, **flags)["metrics"][0]["train/loss"] == pytest.approx(
        3 * own["train/loss"], rel=1e-5
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_non_finite_step_is_skipped_and_samples_are_dumped(steps: int, model_folder: Folder, tmp_path: Path) -> None:
    """With several updates per rollout, the log-prob pass before them detects it and all updates are skipped."""
    run = InProcess(config_for(model_folder("llama"), tmp_path, num_steps_per_rollout=steps))
    groups, healthy = make_samples(3, 3), InProcess(config_for(model_folder("llama"), tmp_path / "healthy"))
    before = run.weights
    head = run.trainer.actor.backend.module.model.lm_head.weight.to_local()
    column = head[:, 0].clone()
    with torch.no_grad():
        head[:, 0] = float("inf")
    answer = run.train(5, groups)
    with torch.no_grad():
        head[:, 0] = column
    assert [step["train/skipped_steps"] for step in answer["metrics"]] == [1.0] * steps
    assert not any(math.isnan(value) for step in answer["metrics"] for value in step.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights.items())
    (warning,) = answer["warnings"]
    dumps = sorted((tmp_path / "not_finite").iterdir())
    assert len(dumps) == 4
    assert all(str(dump) in warning for dump in dumps)
    assert re.search(r"sample \d has log[-_]probs that are not finite", warning)
    assert "and 5 more" in warning
    facts = json.loads(dumps[0].read_text())
    assert facts["rollout_id"] == 5
    if steps == 1:
        assert len(facts["advantages"]) == facts["response_lengths"]
        goes_on, fresh = run.train(6, groups)["metrics"][0], healthy.train(6, groups)["metrics"][0]
        assert goes_on | {"train/step": 0.0} == fresh  # moments and schedule are as they were


def test_run_ends_after_max_skipped_steps_in_a_row(model_folder: Folder, tmp_path: Path) -> None:
    group = TrainerGroup(
        config_for(model_folder("llama"), tmp_path, max_skipped_steps=3), device="cpu", run_dir=tmp_path
    )
    skipped, done = {"train/skipped_steps": 1.0}, {"train/skipped_steps": 0.0}
    group._count_skipped([skipped, skipped, done, skipped], ["a"])
    group._count_skipped([{"train/critic-skipped_steps": 1.0}], ["b"])
    with pytest.raises(RESTARTABLE_ERRORS, match="--max-skipped-steps: no update 3 times in a row; the last reason: c"):
        group._count_skipped([skipped], ["c"])


def test_rollout_without_updates_counts_as_one_skipped_step(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for any number of steps, because all are skipped for the same log-probs."""
    flags = {"num_steps_per_rollout": 3, "max_skipped_steps": 2}
    run = InProcess(config_for(model_folder("llama"), tmp_path, **flags))
    group = TrainerGroup(run.config, device="cpu", run_dir=tmp_path)
    monkeypatch.setattr(group.processes, "call", lambda _, params: [run.trainer.train(**params[0])])
    head = run.trainer.actor.backend.module.model.lm_head.weight.to_local()
    column = head[:, 0].clone()

    def skipped_steps(rollout_id: int, of_the_column: torch.Tensor | float) -> list[float]:
        with torch.no_grad():
            head[:, 0] = of_the_column
        metrics = group.train(rollout_id, make_samples(3, 3)).metrics
        return [step["train/skipped_steps"] for step in metrics]

    assert skipped_steps(0, math.inf) == [1.0] * 3
    assert skipped_steps(1, column) == [0.0] * 3
    assert skipped_steps(2, math.inf) == [1.0] * 3
    with pytest.raises(
        RESTARTABLE_ERRORS, match="--max-skipped-steps: no update 2 times in a row; the last reason: rollout 3: "
    ):
        group.train(3, make_samples(3, 3))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_non_finite_reward_error_names_and_dumps_the_sample(
    reward: float, model_folder: Folder, tmp_path: Path
) -> None:
    groups = make_samples(3, 3)
    groups[1][2].reward = reward
    with pytest.raises(UserError, match=r"sample 5 has reward (nan|inf)"):
        make_train_batch(config_for(model_folder("llama"), tmp_path), flatten_samples(groups))
    kept = json.loads((tmp_path / "not_finite" / "sample_5.json").read_text())
    assert (kept["index"], kept["tokens"]) == (5, groups[1][2].tokens)


def test_non_finite_rollout_log_prob_error_names_and_dumps_the_sample(model_folder: Folder, tmp_path: Path) -> None:
    groups = make_samples(3, 3)
    assert groups[0][1].rollout_log_probs is not None
    groups[0][1].rollout_log_probs[0] = -math.inf
    with pytest.raises(UserError, match=r"sample 1 has rollout_log_probs\[0\] = -inf"):
        make_train_batch(config_for(model_folder("llama"), tmp_path), flatten_samples(groups))
    assert (tmp_path / "not_finite" / "sample_1.json").is_file()


def test_non_finite_log_prob_of_a_custom_conversion_skips_the_rollout(model_folder: Folder, tmp_path: Path) -> None:
    """The driver does not check these numbers, also if the trainers make no forward pass before the update."""
    flags = {"custom_convert_samples_to_train_data_path": f"{HOOKS}.convert"}
    run = InProcess(config_for(model_folder("llama"), tmp_path, **flags))
    samples = flatten_samples(make_samples(3, 3))
    samples[1].rollout_log_probs = [-math.inf] * samples[1].response_length
    batch = make_custom_batch(run.config, samples)
    schedule = build_schedule(batch.total_lengths, batch.rollout_ids, num_ranks=1, global_batch_size=9)
    answer = run.trainer.train(0, rank_shares(batch, schedule)[0])
    assert answer["metrics"] == [{"train/step": 0.0, "train/skipped_steps": 1.0}]
    (warning,) = answer["warnings"]
    assert re.match(r"rollout 0: no update: sample 1 has rollout_log_probs that are not finite", warning)


def test_custom_sample_conversion_and_debug_train_data_dump(model_folder: Folder, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "custom_convert_samples_to_train_data_path": f"{HOOKS}.convert", "global_batch_size": 9,
        "save_debug_train_data": str(tmp_path / "train_{rollout_id}.jsonl"),
    }  # fmt: skip
    config = config_for(model_folder("llama"), tmp_path, **flags)
    groups = make_samples(3, 3)
    with TrainerGroup(config, device="cpu", run_dir=tmp_path) as group:
        group.start()
        group.train(0, groups)
    header, *rows = [json.loads(line) for line in (tmp_path / "train_0.jsonl").read_text().splitlines()]
    assert header == {"format": "slime-train-dump", "format_version": 2, "rollout_id": 0}
    for row, sample in zip(rows, flatten_samples(groups), strict=True):
        assert row["tokens"] == sample.tokens
        assert row["advantages"] == pytest.approx([sample.reward] * sample.response_length)
