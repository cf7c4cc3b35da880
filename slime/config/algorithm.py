"""What the choice of an algorithm implies for other flags, and which flags contradict each other.

A preset is a name for other flags: it fills in what was not given and overrules nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.algorithms.estimators import CISPO, ESTIMATORS, GSPO, Estimator, estimators_that
from slime.config.async_mode import may_be_older
from slime.config.config import Config

_log = logging.getLogger(__name__)


def cut_sampling(config: Config) -> str | None:
    """The flags with which a policy is trained on tokens from a part of the vocabulary, or None.

    The loss takes log-probs over the whole vocabulary, which is not what such tokens were drawn from.
    """
    cuts = (("--rollout-top-p", config.rollout_top_p, 1.0), ("--rollout-top-k", config.rollout_top_k, -1))
    given = " and ".join(f"{flag} {value:g}" for flag, value, off in cuts if value != off)
    return given if given and trains_on_log_probs(config) else None


def trains_on_log_probs(config: Config) -> bool:
    """Whether a policy is trained on sampled tokens: not with --loss-type sft_loss or --debug-rollout-only."""
    return config.loss_type != "sft_loss" and not config.debug_rollout_only


def needs_reference(config: Config) -> bool:
    """A frozen reference model takes part: its KL is in the loss or in the rewards."""
    return config.use_kl_loss or config.kl_coef != 0


def serves_teacher(config: Config) -> bool:
    """An engine of this run serves the teacher of on-policy distillation."""
    return config.use_opd and config.opd_type == "engine" and config.opd_teacher_load is not None


def weighs_importance(config: Config) -> bool:
    """Whether the engine's and the trainer's log-probs are weighed against each other; None leaves it to the mode."""
    if config.use_tis is not None:
        return config.use_tis
    return may_be_older(config) and config.loss_type == "policy_loss" and not config.use_rollout_logprobs


def weighs_what_it_can(config: Config) -> bool:
    """Nobody asked for the engine's log-probs: a rollout without them is trained on all the same."""
    asked = (
        config.use_tis or config.use_rs or config.get_mismatch_metrics or config.custom_tis_function_path is not None
    )
    return weighs_importance(config) and not asked


def estimator_of(config: Config) -> Estimator:
    """The entry of `--advantage-estimator` in the registry."""
    return ESTIMATORS[config.advantage_estimator]


def has_critic(config: Config) -> bool:
    return estimator_of(config).has_critic and config.loss_type == "policy_loss"


def normalizes_groups(config: Config) -> bool:
    """Rewards are compared with those of their group."""
    relative = estimator_of(config).group_relative and not config.disable_rewards_normalization
    return config.loss_type != "sft_loss" and relative and config.custom_reward_post_process_path is None


def compares_siblings(config: Config) -> bool:
    """A sample's advantage is how it did against the others of its group, so that a group of one teaches nothing."""
    own = config.loss_type == "custom_loss" or config.custom_advantage_function_path
    return normalizes_groups(config) and not own and not config.use_opd


def derive_algorithm(config: Config) -> Config:
    """Fill in what presets and other flags imply."""
    estimator = estimator_of(config)
    presets = dict(estimator.presets)
    if config.live_judge_path is not None:
        presets.pop("dynamic_sampling_filter_path", None)  # a client's question has one answer: no group to judge
    aggregation, clip_high = presets.pop("loss_aggregation", "rollout_mean"), presets.pop("eps_clip_high", 0.0)
    changes: dict[str, Any] = {name: value for name, value in presets.items() if getattr(config, name) in (None, False)}
    if config.loss_aggregation is None:
        changes["loss_aggregation"] = "token_mean" if config.calculate_per_token_loss else aggregation
    if changes.get("loss_aggregation", config.loss_aggregation) == "token_mean":
        changes["calculate_per_token_loss"] = True
    if config.eps_clip_high is None:
        changes["eps_clip_high"] = max(clip_high, config.eps_clip)
    if config.policy_loss is None:
        changes["policy_loss"] = estimator.policy_loss
    changes |= _corrections(config) | _critic(config)
    if config.opd_type is not None:
        changes["opd_type"] = {"sglang": "engine", "megatron": "trainer"}.get(config.opd_type, config.opd_type)
    return config.replace(**changes)


def _corrections(config: Config) -> dict[str, Any]:
    given: dict[str, Any] = {}
    replay = {"use_routing_replay": True} if config.use_rollout_routing_replay else {}
    if config.custom_tis_function_path is None:  # a user's function reads what was given, and has defaults of its own
        given = {"rs_level": config.tis_level, "rs_lower_bound": config.tis_clip_low, "rs_upper_bound": config.tis_clip}
    return replay | {name: value for name, value in given.items() if getattr(config, name) is None}


def _critic(config: Config) -> dict[str, Any]:
    if not has_critic(config):
        return {}
    changes: dict[str, Any] = {}
    if config.critic_save is None and config.save is not None:
        changes["critic_save"] = str(Path(config.save) / "critic")
    if config.critic_load is None and config.load is not None:
        changes["critic_load"] = str(Path(config.load) / "critic")
    return changes


def algorithm_contradictions(config: Config) -> Iterator[str]:
    """One sentence for each pair of flags that cannot both be meant."""
    yield from _kl(config)
    yield from _estimator(config)
    yield from _off_policy(config)
    yield from _custom(config)
    yield from _distillation(config)


def _kl(config: Config) -> Iterator[str]:
    estimator = config.advantage_estimator
    if config.kl_loss_coef != 0 and not config.use_kl_loss:
        yield f"--kl-loss-coef {config.kl_loss_coef} needs --use-kl-loss: add it or drop the coefficient"
    if config.kl_coef != 0 and config.use_kl_loss and config.kl_loss_coef != 0:
        yield (
            f"--kl-coef {config.kl_coef} and --kl-loss-coef {config.kl_loss_coef} would charge the KL twice, in the "
            "reward and in the loss: keep one"
        )
    if config.kl_coef != 0 and not estimator_of(config).kl_in_reward:
        yield (
            f"--kl-coef {config.kl_coef} has no effect with --advantage-estimator {estimator}, which has one reward a "
            "response: use --use-kl-loss --kl-loss-coef"
        )
    if config.use_unbiased_kl and not config.use_kl_loss:
        yield "--use-unbiased-kl weighs the KL loss: add --use-kl-loss"
    if not needs_reference(config) and config.ref_update_interval is not None:
        yield "--ref-update-interval has no reference model to update: add --use-kl-loss or drop it"
    if config.ref_update_decay and config.ref_update_interval is None:
        yield "--ref-update-decay is about an update that is never made: add --ref-update-interval, or drop it"


def _estimator(config: Config) -> Iterator[str]:
    estimator = estimator_of(config)
    if config.advantage_population != "auto" and not normalizes_groups(config):
        yield (
            f"--advantage-population {config.advantage_population} is about rewards that are compared within their "
            "group, and this run's are not: drop it"
        )
    if config.loss_type == "sft_loss" and config.policy_loss != estimator.policy_loss:
        yield f"--policy-loss {config.policy_loss} is not what --loss-type sft_loss minimises: drop it"
    if config.loss_type != "policy_loss":
        return
    if estimator.needs_whitening and not config.normalize_advantages:
        yield f"--advantage-estimator {estimator.name} needs whitened advantages: add --normalize-advantages"
    if config.calculate_per_token_loss and config.loss_aggregation != "token_mean":
        yield f"--calculate-per-token-loss contradicts --loss-aggregation {config.loss_aggregation}: keep one"
    chosen = f"--policy-loss {config.policy_loss}"
    if config.policy_loss == estimator.policy_loss:
        chosen = f"--advantage-estimator {estimator.name}"
    if config.policy_loss == GSPO and config.loss_aggregation == "token_mean":
        yield f"{chosen} has one ratio a sequence, which a token mean would weigh by length: drop the token mean"
    if estimator.needs_siblings and config.n_samples_per_prompt < 2 and normalizes_groups(config):
        yield (
            f"--advantage-estimator {estimator.name} compares a sample with its siblings: --n-samples-per-prompt must "
            "be 2 or more"
        )
    if config.eps_clip_c is not None and config.policy_loss == CISPO:
        yield "--eps-clip-c bounds a loss that cispo does not have: drop it"
    if config.policy_loss == CISPO and config.eps_clip < 1:
        _log.warning("cispo with --eps-clip %s also clips ratios from below; its paper does not: 1.0", config.eps_clip)
    if config.overlong_buffer_len and config.rollout_max_response_len is None:
        yield f"--overlong-buffer-len {config.overlong_buffer_len} counts from --rollout-max-response-len: give it"
    elif config.overlong_buffer_len > (config.rollout_max_response_len or 0):
        yield (
            f"--overlong-buffer-len {config.overlong_buffer_len} is longer than --rollout-max-response-len "
            f"{config.rollout_max_response_len}"
        )
    if config.loss_aggregation == "constant" and config.rollout_max_response_len is None:
        yield "--loss-aggregation constant divides by --rollout-max-response-len: give it"
    if not has_critic(config):
        critics = estimators_that(lambda one: one.has_critic)
        for name in ("critic_load", "critic_save", "critic_lr", "critic_config", "critic_hf_checkpoint"):
            if getattr(config, name) is not None:
                yield f"--{name.replace('_', '-')} is for the critic of --advantage-estimator {critics}: drop it"


def _off_policy(config: Config) -> Iterator[str]:
    corrects = weighs_importance(config) or config.use_rs or config.get_mismatch_metrics
    if config.use_rollout_logprobs and (config.use_tis or config.use_rs):
        yield (
            "--use-tis corrects for the difference between trainer and engine, which --use-rollout-logprobs takes as "
            "none: keep one"
        )
    if config.tis_clip_low > config.tis_clip:
        yield f"--tis-clip-low {config.tis_clip_low} is larger than --tis-clip {config.tis_clip}"
    if config.custom_tis_function_path is not None and not corrects:
        yield "--custom-tis-function-path is not called without --use-tis or --get-mismatch-metrics: add one"
    if config.custom_tis_function_path is None:
        yield from _own_correction(config)
    if config.use_routing_replay and config.loss_type == "sft_loss":
        flag = "--use-rollout-routing-replay" if config.use_rollout_routing_replay else "--use-routing-replay"
        yield f"{flag} repeats how sampled tokens were routed, and --loss-type sft_loss samples none: drop it"
    if config.keep_old_actor and config.use_rollout_logprobs:
        yield "--keep-old-actor computes what --use-rollout-logprobs takes from the engine: keep one"


def _own_correction(config: Config) -> Iterator[str]:
    if config.rs_veto_threshold is not None and not config.use_rs:
        yield "--rs-veto-threshold is part of rejection: add --use-rs"
    if config.use_rs and config.rs_lower_bound > config.rs_upper_bound:
        yield f"--rs-lower-bound {config.rs_lower_bound} is larger than --rs-upper-bound {config.rs_upper_bound}"
    if config.tis_batch_normalize and config.tis_level == "geometric":
        yield "--tis-batch-normalize is not defined for --tis-level geometric: choose token or sequence"


def _custom(config: Config) -> Iterator[str]:
    if (config.loss_type == "custom_loss") != (config.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path belong together: give both"
    if config.custom_advantage_function_path is not None and config.disable_compute_advantages_and_returns:
        yield "--custom-advantage-function-path is not called with --disable-compute-advantages-and-returns: keep one"
    if config.disable_compute_advantages_and_returns and config.loss_type == "policy_loss":
        yield "--disable-compute-advantages-and-returns leaves policy_loss without advantages: give a custom loss"


def _distillation(config: Config) -> Iterator[str]:
    if not config.use_opd:
        if config.opd_teacher_load is not None or config.opd_type is not None:
            yield "--opd-type and --opd-teacher-load are for on-policy distillation: add --use-opd"
        return
    if config.opd_type is None:
        yield "--use-opd needs --opd-type: engine, trainer or sample"
    elif config.opd_type == "trainer" and config.opd_teacher_load is None:
        yield "--opd-type trainer needs --opd-teacher-load, the teacher's model folder"
    elif config.opd_type == "engine" and config.opd_teacher_load is None and config.rm_url is None:
        yield "--opd-type engine needs --opd-teacher-load (a folder to serve) or --rm-url (where it is served)"
    elif config.opd_type == "sample" and config.opd_teacher_load is not None:
        yield "--opd-type sample has its teacher asked by the generate function: drop --opd-teacher-load"
    if config.opd_type == "engine" and config.rollout_temperature != 1:
        yield (
            f"--opd-type engine scores at temperature 1, but --rollout-temperature is {config.rollout_temperature}: "
            "use 1, or --opd-type trainer"
        )
    rewards_there = config.rm_type is not None and config.rm_type.removeprefix("boxed_") == "remote_rm"
    if serves_teacher(config) and config.rm_url is not None and not rewards_there:
        yield "--opd-teacher-load and --rm-url each name a teacher of --opd-type engine: keep one"
