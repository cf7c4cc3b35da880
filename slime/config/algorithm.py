"""Flag values that the algorithm implies, and contradictions between algorithm flags.

A preset is a name for a set of other flags: it fills in flags that are not set and overrides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from slime.algorithms.estimators import CISPO, ESTIMATORS, GSPO, Estimator, estimator_names
from slime.config.async_mode import may_train_on_stale_tokens
from slime.config.config import Config, given_flags
from slime.config.fields import flag_name
from slime.storage.json_types import JsonObject

_log = logging.getLogger(__name__)


def biased_sampling_flags(config: Config) -> str | None:
    """Return the flags that make the policy train on tokens sampled from a part of the vocabulary, or None.

    The loss takes log-probs over the whole vocabulary, which is not the distribution of such tokens.
    """
    cuts = (("--rollout-top-p", config.rollout_top_p, 1.0), ("--rollout-top-k", config.rollout_top_k, -1))
    given = " and ".join(f"{flag} {value:g}" for flag, value, off in cuts if value != off)
    return given if given and trains_on_log_probs(config) else None


def trains_on_log_probs(config: Config) -> bool:
    """Return whether a policy is trained on sampled tokens: not with --loss-type sft_loss or --debug-rollout-only."""
    return config.loss_type != "sft_loss" and not config.debug_rollout_only


def needs_reference(config: Config) -> bool:
    """Return whether the run needs a frozen reference model: its KL is in the loss or in the rewards."""
    return config.use_kl_loss or config.kl_coef != 0


def serves_teacher(config: Config) -> bool:
    """Return whether an engine of this run serves the teacher of on-policy distillation."""
    return config.use_opd and config.opd_type == "engine" and config.opd_teacher_load is not None


def uses_importance_weights(config: Config) -> bool:
    """Return whether the loss uses importance weights between the engine's and the trainer's log-probs.

    Without `--use-tis` the mode decides.
    """
    if config.use_tis is not None:
        return config.use_tis
    return may_train_on_stale_tokens(config) and config.loss_type == "policy_loss" and not config.use_rollout_logprobs


def uses_optional_importance_weights(config: Config) -> bool:
    """Return whether importance weights are optional: the mode implies them, and no flag requires them.

    A rollout without the engine's log-probs is then trained on without weights.
    """
    requested = (
        config.use_tis or config.use_rs or config.get_mismatch_metrics or config.custom_tis_function_path is not None
    )
    return uses_importance_weights(config) and not requested


def estimator_of(config: Config) -> Estimator:
    """Return the registry entry of `--advantage-estimator`."""
    return ESTIMATORS[config.advantage_estimator]


def has_critic(config: Config) -> bool:
    return estimator_of(config).has_critic and config.loss_type == "policy_loss"


def normalizes_group_rewards(config: Config) -> bool:
    """Return whether rewards are compared with those of their group."""
    relative = estimator_of(config).group_relative and not config.disable_rewards_normalization
    return config.loss_type != "sft_loss" and relative and config.custom_reward_post_process_path is None


def uses_group_baseline(config: Config) -> bool:
    """Return whether advantages are relative to the other samples of the group; a group of one then has no signal."""
    own = config.loss_type == "custom_loss" or config.custom_advantage_function_path
    return normalizes_group_rewards(config) and not own and not config.use_opd


def derive_algorithm(config: Config) -> Config:
    """Fill in the flags that presets and other flags imply."""
    estimator = estimator_of(config)
    presets = dict(estimator.presets)
    if config.live_judge_path is not None:
        presets.pop("dynamic_sampling_filter_path", None)  # groups of a live service have one sample
    aggregation, clip_high = presets.pop("loss_aggregation", "rollout_mean"), presets.pop("eps_clip_high", 0.0)
    changes: JsonObject = {name: value for name, value in presets.items() if getattr(config, name) in (None, False)}
    if config.loss_aggregation is None:
        changes["loss_aggregation"] = "token_mean" if config.calculate_per_token_loss else aggregation
    if changes.get("loss_aggregation", config.loss_aggregation) == "token_mean":
        changes["calculate_per_token_loss"] = True
    if config.eps_clip_high is None:
        changes["eps_clip_high"] = max(clip_high, config.eps_clip)
    if config.policy_loss is None:
        changes["policy_loss"] = estimator.policy_loss
    if config.use_rollout_routing_replay:
        changes["use_routing_replay"] = True
    if config.custom_tis_function_path is None:  # a custom function has its own defaults for flags that are not set
        bounds = {
            "rs_level": config.tis_level,
            "rs_lower_bound": config.tis_clip_low,
            "rs_upper_bound": config.tis_clip,
        }
        changes |= {name: value for name, value in bounds.items() if getattr(config, name) is None}
    if has_critic(config):
        if config.critic_save is None and config.save is not None:
            changes["critic_save"] = str(Path(config.save) / "critic")
        if config.critic_load is None and config.load is not None:
            changes["critic_load"] = str(Path(config.load) / "critic")
    if config.opd_type is not None:
        changes["opd_type"] = {"sglang": "engine", "megatron": "trainer"}.get(config.opd_type, config.opd_type)
    return config.replace(**changes)


def algorithm_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each contradiction between algorithm flags."""
    yield from _kl(config)
    yield from _estimator(config)
    yield from _off_policy(config)
    if (config.loss_type == "custom_loss") != (config.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path belong together: give both"
    if config.custom_advantage_function_path is not None and config.disable_compute_advantages_and_returns:
        yield "--custom-advantage-function-path is not called with --disable-compute-advantages-and-returns: keep one"
    if config.disable_compute_advantages_and_returns and config.loss_type == "policy_loss":
        yield "--disable-compute-advantages-and-returns leaves policy_loss without advantages: give a custom loss"
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
        yield "--opd-type sample gets its teacher log-probs from the generate function: drop --opd-teacher-load"
    if config.opd_type == "engine" and config.rollout_temperature != 1:
        yield (
            f"--opd-type engine scores at temperature 1, but --rollout-temperature is {config.rollout_temperature}: "
            "use 1, or --opd-type trainer"
        )
    rewards_there = config.rm_type is not None and config.rm_type.removeprefix("boxed_") == "remote_rm"
    if serves_teacher(config) and config.rm_url is not None and not rewards_there:
        yield "--opd-teacher-load and --rm-url each name a teacher of --opd-type engine: keep one"


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
            f"--kl-coef {config.kl_coef} has no effect with --advantage-estimator {estimator}, which has one reward "
            "per response: use --use-kl-loss --kl-loss-coef"
        )
    if config.use_unbiased_kl and not config.use_kl_loss:
        yield "--use-unbiased-kl weights the KL loss: add --use-kl-loss"
    if not needs_reference(config) and config.ref_update_interval is not None:
        yield "--ref-update-interval has no reference model to update: add --use-kl-loss or drop it"
    if config.ref_update_decay and config.ref_update_interval is None:
        yield "--ref-update-decay has no effect without updates of the reference: add --ref-update-interval, or drop it"


def _estimator(config: Config) -> Iterator[str]:
    estimator = estimator_of(config)
    if config.advantage_population != "auto" and not normalizes_group_rewards(config):
        yield (
            f"--advantage-population {config.advantage_population} needs rewards that are compared within their group, "
            "which this run does not do: drop it"
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
        yield f"{chosen} has one ratio per sequence, which a token mean would weight by length: drop the token mean"
    if estimator.needs_siblings and config.n_samples_per_prompt < 2 and normalizes_group_rewards(config):
        yield (
            f"--advantage-estimator {estimator.name} compares a sample with its siblings: --n-samples-per-prompt must "
            "be 2 or more"
        )
    if config.eps_clip_c is not None and config.policy_loss == CISPO:
        yield "--eps-clip-c bounds a loss term that cispo does not have: drop it"
    if config.policy_loss == CISPO and config.eps_clip < 1:
        _log.warning(
            "--eps-clip %s with cispo also clips ratios from below, unlike the paper: use 1.0", config.eps_clip
        )
    if config.overlong_buffer_len and config.rollout_max_response_len is None:
        yield f"--overlong-buffer-len {config.overlong_buffer_len} counts from --rollout-max-response-len: set it"
    elif config.overlong_buffer_len > (config.rollout_max_response_len or 0):
        yield (
            f"--overlong-buffer-len {config.overlong_buffer_len} is longer than --rollout-max-response-len "
            f"{config.rollout_max_response_len}"
        )
    if config.loss_aggregation == "constant" and config.rollout_max_response_len is None:
        yield "--loss-aggregation constant divides by --rollout-max-response-len: set it"
    if not has_critic(config):
        critics = estimator_names(lambda one: one.has_critic)
        names = ("critic_load", "critic_save", "critic_lr", "critic_config", "critic_hf_checkpoint")
        for name in given_flags(config, names):
            yield f"{flag_name(name)} is for the critic of --advantage-estimator {critics}: drop it"


def _off_policy(config: Config) -> Iterator[str]:
    corrects = uses_importance_weights(config) or config.use_rs or config.get_mismatch_metrics
    if config.use_rollout_logprobs and (config.use_tis or config.use_rs):
        yield (
            "--use-tis corrects for the difference between trainer and engine, which --use-rollout-logprobs assumes is "
            "zero: keep one"
        )
    if config.tis_clip_low > config.tis_clip:
        yield f"--tis-clip-low {config.tis_clip_low} is larger than --tis-clip {config.tis_clip}"
    if config.custom_tis_function_path is not None and not corrects:
        yield "--custom-tis-function-path is not called without --use-tis or --get-mismatch-metrics: add one"
    if config.custom_tis_function_path is None:
        if config.rs_veto_threshold is not None and not config.use_rs:
            yield "--rs-veto-threshold is part of rejection: add --use-rs"
        if config.use_rs and config.rs_lower_bound > config.rs_upper_bound:
            yield f"--rs-lower-bound {config.rs_lower_bound} is larger than --rs-upper-bound {config.rs_upper_bound}"
        if config.tis_batch_normalize and config.tis_level == "geometric":
            yield "--tis-batch-normalize is not defined for --tis-level geometric: choose token or sequence"
    if config.use_routing_replay and config.loss_type == "sft_loss":
        flag = "--use-rollout-routing-replay" if config.use_rollout_routing_replay else "--use-routing-replay"
        yield f"{flag} repeats how sampled tokens were routed, and --loss-type sft_loss samples none: drop it"
    if config.keep_old_actor and config.use_rollout_logprobs:
        yield "--keep-old-actor computes what --use-rollout-logprobs takes from the engine: keep one"
