"""Flags that the algorithm sets, and combinations of flags that are rejected with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config import Config, derive
from slime.config.algorithm import algorithm_contradictions
from slime.config.critic import critic_flags, role_overrides
from slime.errors import UserError


def derive_config(**flags: Any) -> Config:
    base = {"hf_checkpoint": "m", "rollout_batch_size": 2, "n_samples_per_prompt": 4, "num_rollout": 1}
    return derive(Config(**(base | {"rollout_max_response_len": 8} | flags)))


def test_presets_set_only_flags_that_were_not_given() -> None:
    dapo = derive_config(advantage_estimator="dapo")
    assert (dapo.eps_clip, dapo.eps_clip_high) == (0.2, 0.28)
    assert dapo.loss_aggregation == "token_mean"
    assert dapo.calculate_per_token_loss
    assert dapo.dynamic_sampling_filter_path == NONZERO_STD_FILTER
    assert derive_config(advantage_estimator="dapo", eps_clip_high=0.4).eps_clip_high == 0.4
    assert derive_config(advantage_estimator="dapo", loss_aggregation="rollout_mean").loss_aggregation == "rollout_mean"
    dr_grpo = derive_config(advantage_estimator="dr_grpo")
    assert dr_grpo.disable_grpo_std_normalization
    assert dr_grpo.loss_aggregation == "constant"
    grpo = derive_config()
    assert (grpo.loss_aggregation, grpo.eps_clip_high) == ("rollout_mean", 0.2)
    assert derive_config(calculate_per_token_loss=True).loss_aggregation == "token_mean"
    for config in (dapo, dr_grpo, grpo):
        assert derive(config) == config


def test_rollout_routing_replay_implies_routing_replay() -> None:
    assert derive_config(use_rollout_routing_replay=True).use_routing_replay
    assert not derive_config(use_routing_replay=True).use_rollout_routing_replay


def test_rs_level_defaults_to_tis_level_and_opd_type_megatron_to_trainer() -> None:
    config = derive_config(tis_level="sequence", tis_clip=3.0, rs_upper_bound=5.0)
    assert (config.rs_level, config.rs_lower_bound, config.rs_upper_bound) == ("sequence", 0.0, 5.0)
    assert derive_config(use_opd=True, opd_type="megatron").opd_type == "trainer"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"use_rollout_routing_replay": True, "loss_type": "sft_loss"},
            "--use-rollout-routing-replay repeats how sampled tokens were routed",
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_coef": 0.1, "advantage_estimator": "ppo"},
            "charge the KL twice",
        ),
        ({"kl_coef": 0.1}, "has no effect with --advantage-estimator grpo"),
        ({"kl_coef": 0.1, "advantage_estimator": "cispo"}, "has no effect with --advantage-estimator cispo"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "add --normalize-advantages"),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "add --normalize-advantages"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "assumes is zero: keep one"),
        ({"use_rs": True, "use_rollout_logprobs": True}, "assumes is zero: keep one"),
        ({"advantage_estimator": "gspo", "calculate_per_token_loss": True}, "has one ratio per sequence"),
        ({"policy_loss": "gspo", "calculate_per_token_loss": True}, "--policy-loss gspo has one ratio per sequence"),
        ({"policy_loss": "cispo", "eps_clip_c": 3.0}, "cispo does not have"),
        ({"policy_loss": "gspo", "loss_type": "sft_loss"}, "not what --loss-type sft_loss minimises"),
        ({"calculate_per_token_loss": True, "loss_aggregation": "constant"}, "contradicts --loss-aggregation constant"),
        ({"advantage_estimator": "ppo", "advantage_population": "samples"}, "compared within their group"),
        ({"disable_rewards_normalization": True, "advantage_population": "rollouts"}, "compared within their group"),
        ({"advantage_estimator": "rloo", "n_samples_per_prompt": 1}, "must be 2 or more"),
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "cispo does not have"),
        ({"kl_loss_coef": 0.1}, "needs --use-kl-loss"),
        ({"use_unbiased_kl": True}, "add --use-kl-loss"),
        ({"ref_update_interval": 3}, "no reference model to update"),
        ({"use_kl_loss": True, "ref_update_decay": 0.9}, "add --ref-update-interval"),
        ({"tis_clip_low": 3.0}, "is larger than --tis-clip 2.0"),
        ({"custom_tis_function_path": "m.f"}, "is not called without"),
        ({"rs_veto_threshold": 0.1}, "add --use-rs"),
        ({"use_tis": True, "tis_level": "geometric", "tis_batch_normalize": True}, "is not defined"),
        ({"keep_old_actor": True, "use_rollout_logprobs": True}, "keep one"),
        ({"loss_type": "custom_loss"}, "give both"),
        ({"custom_loss_function_path": "m.f"}, "give both"),
        ({"disable_compute_advantages_and_returns": True}, "without advantages"),
        ({"critic_lr": 0.1}, "is for the critic of --advantage-estimator ppo"),
        ({"overlong_buffer_len": 9}, "is longer than --rollout-max-response-len 8"),
        ({"use_opd": True}, "needs --opd-type"),
        ({"use_opd": True, "opd_type": "trainer"}, "needs --opd-teacher-load"),
        ({"use_opd": True, "opd_type": "sglang"}, "needs --opd-teacher-load (a folder to serve) or --rm-url"),
        ({"opd_teacher_load": "x"}, "add --use-opd"),
    ],
)
def test_contradicting_flags_are_rejected(flags: dict[str, Any], sentence: str) -> None:
    found = list(algorithm_contradictions(derive_config(**flags)))
    assert any(sentence in one for one in found), found


def test_valid_combinations_are_accepted() -> None:
    for flags in (
        {},
        {"advantage_estimator": "ppo", "kl_coef": 0.1},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
        {"advantage_estimator": "dapo"},
        {"advantage_estimator": "dr_grpo"},
        {"use_tis": True, "use_rs": True},
        {"use_kl_loss": True, "ref_load": "x", "ref_update_interval": 2},
    ):
        assert list(algorithm_contradictions(derive_config(**flags))) == []


def test_critic_flags_come_from_its_config_file_and_role_overrides(tmp_path: Path) -> None:
    own, roles = tmp_path / "critic.toml", tmp_path / "roles.yaml"
    own.write_text("weight_decay = 0.5\nlr = 0.25\n")
    roles.write_text(
        "megatron:\n- {role: critic, overrides: {clip_grad: 7, weight_decay: 0.1}}\n- {role: actor, overrides: {lr: 2}}"
    )
    config = derive_config(
        advantage_estimator="ppo", save=str(tmp_path / "s"), lr=1e-6, kl_coef=0.1, critic_config=str(own),
        critic_lr_warmup_iters=5, megatron_config_path=str(roles), critic_hf_checkpoint="other",
    )  # fmt: skip
    critic = critic_flags(config)
    assert (critic.lr, critic.weight_decay, critic.clip_grad) == (0.25, 0.5, 7.0)
    assert (critic.lr_warmup_iters, critic.hf_checkpoint, critic.kl_coef) == (5, "other", 0.0)
    assert critic.save == str(tmp_path / "s" / "critic")
    assert role_overrides(config, "actor") == {"lr": 2.0}
    assert critic_flags(config.replace(critic_lr=0.125)).lr == 0.125


def test_roles_may_differ_in_kernels_but_not_in_parallel_sizes(tmp_path: Path) -> None:
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron: [{role: critic, overrides: {moe_permute_fusion: true, recompute_granularity: full}}]")
    config = derive_config(
        advantage_estimator="ppo", megatron_config_path=str(roles), carried={"swiglu": True}, actor_num_gpus_per_node=2
    )
    critic = critic_flags(config)
    assert (critic.carried, critic.recompute_granularity) == ({"swiglu": True, "moe_permute_fusion": True}, "full")
    assert config.carried == {"swiglu": True}
    roles.write_text("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 2}}]")
    with pytest.raises(
        UserError, match="--tensor-model-parallel-size 2 for the critic, but 1 for the policy: one set of"
    ):
        critic_flags(config)
    assert critic_flags(config.replace(tensor_model_parallel_size=2)).tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("lrr: 1", "there is no flag lrr: did you mean lr"), ("lr: -1", "lr must be at least 0, not -1"), ("lr: x", "lr")],
)
def test_invalid_critic_file_is_rejected(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        critic_flags(derive_config(advantage_estimator="ppo", critic_config=str(file)))
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)
