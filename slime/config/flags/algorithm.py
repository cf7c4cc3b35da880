"""Flags of the algorithm: advantages, losses, off-policy corrections, the critic and on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.estimators import ESTIMATORS, POLICY_LOSSES, TOKEN, estimator_names
from slime.config.fields import above, at_least, between, flag, minus_one_or_at_least


@dataclass(frozen=True, kw_only=True)
class AlgorithmFlags:
    """Algorithm: advantages and losses"""

    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages; dr_grpo and dapo are grpo with other defaults (docs/algorithms.md)",
        choices=tuple(ESTIMATORS),
    )
    policy_loss: str = flag(
        None,
        "surrogate loss: ppo clips each token's ratio, gspo each sequence's, cispo the weight of each token's gradient",
        choices=POLICY_LOSSES,
        derived="gspo and cispo with the estimators of these names, else ppo",
    )
    loss_type: str = flag("policy_loss", "loss that is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    eps_clip: float = flag(0.2, "lower clip range of the policy ratio", check=at_least(0))
    eps_clip_high: float = flag(
        None, "upper clip range of the policy ratio", check=at_least(0), derived="--eps-clip; 0.28 with dapo"
    )
    eps_clip_c: float | None = flag(None, "dual clip: bound on the loss of negative advantages", check=above(1))
    kl_coef: float = flag(
        0.0,
        f"weight of the KL to the reference in the rewards ({estimator_names(lambda one: one.kl_in_reward)})",
        check=at_least(0),
    )
    use_kl_loss: bool = flag(False, "keep a frozen reference model and report (and weigh) the KL to it")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss")
    kl_loss_type: str = flag(
        "k1", "KL estimator, in the reward and in the loss", choices=("k1", "k2", "k3", "low_var_kl")
    )
    use_unbiased_kl: bool = flag(False, "weigh the KL loss by the policy ratio, which makes its gradient unbiased")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    gamma: float = flag(
        1.0, f"discount of later rewards ({estimator_names(lambda one: one.level == TOKEN)})", check=at_least(0)
    )
    disable_grpo_std_normalization: bool = flag(False, "only subtract the group mean", derived="on with dr_grpo")
    disable_rewards_normalization: bool = flag(False, "use raw rewards as advantages")
    advantage_population: str = flag(
        "auto",
        "population of a group's statistics if a rollout became several samples: rollouts, each with the mean of its "
        "samples; samples; or (auto) samples if those of one rollout differ in reward, else rollouts",
        choices=("auto", "rollouts", "samples"),
    )
    normalize_advantages: bool = flag(False, "whiten advantages over the whole batch")
    calculate_per_token_loss: bool = flag(
        False, "average the loss over tokens instead of over rollouts", derived="on with dapo"
    )
    loss_aggregation: str = flag(
        None,
        "contribution of each rollout to the loss: the mean of its tokens, its tokens, or its tokens divided by "
        "--rollout-max-response-len",
        choices=("rollout_mean", "token_mean", "constant"),
        derived="token_mean with --calculate-per-token-loss, constant with dr_grpo, else rollout_mean",
    )
    overlong_buffer_len: int = flag(
        0, "tokens before --rollout-max-response-len in which responses lose reward linearly", check=at_least(0)
    )
    overlong_penalty: float = flag(1.0, "reward that a response of full length loses", check=at_least(0))
    disable_compute_advantages_and_returns: bool = flag(False, "compute no advantages, for a custom loss without them")
    custom_advantage_function_path: str | None = flag(
        None, "function (args, rollout_data) that sets rollout_data['advantages'] and ['returns']"
    )
    custom_loss_function_path: str | None = flag(
        None, "function (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), with --loss-type custom_loss"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "function (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) that returns the reducer of "
        "the policy loss",
    )
    ref_load: str | None = flag(
        None,
        "model folder (or checkpoint folder of a run) of the reference; also the start of the actor if --load has no "
        "checkpoint",
        metavar="DIR",
        derived="--hf-checkpoint",
    )
    ref_ckpt_step: int | None = flag(
        None, "iteration of the checkpoint in --ref-load, instead of the latest", check=at_least(0)
    )
    ref_update_interval: int | None = flag(
        None, "rollouts between copies of the policy into the reference", check=at_least(1)
    )
    ref_update_decay: float = flag(
        0.0,
        "share of the reference that --ref-update-interval keeps, with the rest from the policy: a moving average in "
        "float32",
        check=between(0, 1, high_open=True),
    )
    use_rollout_logprobs: bool = flag(False, "use the engine's log-probs as those of the old policy")
    keep_old_actor: bool = flag(False, "keep the weights the engines sample with, for the old policy's log-probs")
    use_rollout_entropy: bool = flag(False, "report the entropy of the old policy")
    reset_optimizer_states: bool = flag(False, "forget Adam's moments before each rollout")
    log_probs_chunk_size: int = flag(
        -1, "rows of logits held at once when log-probs are computed; -1: automatic", check=minus_one_or_at_least(1)
    )
    log_probs_keep_gib: float | None = flag(
        None,
        "most GiB of GPU memory for log-prob gradients of a micro-batch that are kept for the backward pass; larger "
        "ones are recomputed. Default: 2",
        check=at_least(0),
    )


LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True, kw_only=True)
class CorrectionFlags:
    """Off-policy corrections"""

    use_tis: bool | None = flag(
        None,
        "importance weights between the engine's and the trainer's log-probs; not given: if samples have both",
        derived="on where samples may be older than the weights: asynchronous modes, --partial-rollout, "
        "--update-weights-interval above 1",
    )
    tis_clip: float = flag(2.0, "largest importance weight", check=above(0))
    tis_clip_low: float = flag(0.0, "smallest importance weight", check=at_least(0))
    tis_level: str = flag(
        "token", "the ratio of a token, of its sequence, or the sequence's geometric mean", choices=LEVELS
    )
    tis_mode: str = flag(
        "clip",
        "weights out of bounds: truncate from above, clip on both sides, or mask (IcePop)",
        choices=("truncate", "clip", "mask"),
    )
    tis_batch_normalize: bool = flag(False, "scale the weights of a step to a mean of 1")
    use_rs: bool = flag(False, "reject tokens or sequences whose ratio is out of bounds")
    rs_level: str = flag(None, "ratio that the rejection uses", choices=LEVELS, derived="--tis-level")
    rs_lower_bound: float = flag(None, "smallest ratio that is kept", check=at_least(0), derived="--tis-clip-low")
    rs_upper_bound: float = flag(None, "largest ratio that is kept", check=above(0), derived="--tis-clip")
    rs_veto_threshold: float | None = flag(
        None, "one token with a smaller ratio rejects its whole sequence", check=above(0)
    )
    custom_tis_function_path: str | None = flag(
        None,
        "function (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths) "
        "-> (pg_loss, masks, metrics)",
    )
    get_mismatch_metrics: bool = flag(False, "report the metrics of the correction without applying it")
    use_opsm: bool = flag(
        False,
        "off-policy sequence masking: mask sequences of negative advantage that became less likely after sampling",
    )
    opsm_delta: float = flag(
        0.05, "mean of engine's less trainer's log-probs above which --use-opsm masks a sequence", check=at_least(0)
    )
    use_routing_replay: bool = flag(
        False,
        "R2: in the updates of a rollout, routers repeat their choices of experts in the preceding log-prob pass",
        derived="on with --use-rollout-routing-replay",
    )
    use_rollout_routing_replay: bool = flag(
        False, "R3: the trainer's routers repeat the choices of the engine's routers when it sampled the tokens"
    )


@dataclass(frozen=True, kw_only=True)
class CriticFlags:
    """Critic: the value model of PPO"""

    lambd: float = flag(1.0, "lambda of generalised advantage estimation", check=between(0, 1))
    value_clip: float = flag(0.2, "how far a value may move from the old one in one rollout", check=above(0))
    num_critic_only_steps: int = flag(0, "initial rollouts that train only the critic", check=at_least(0))
    critic_hf_checkpoint: str | None = flag(
        None, "model folder the critic starts from", metavar="DIR", derived="--hf-checkpoint"
    )
    critic_load: str | None = flag(
        None, "checkpoints the critic resumes from", metavar="DIR", derived="critic/ under --load, if it exists"
    )
    critic_save: str | None = flag(None, "the critic's checkpoints", metavar="DIR", derived="critic/ under --save")
    critic_lr: float | None = flag(None, "the critic's learning rate", check=at_least(0), derived="--lr")
    critic_lr_warmup_iters: int | None = flag(
        None, "the critic's warm-up", check=at_least(0), derived="--lr-warmup-iters"
    )
    critic_config: str | None = flag(
        None, "TOML or YAML file of flags that differ for the critic (lr, weight_decay, clip_grad ...)", metavar="FILE"
    )
    megatron_config_path: str | None = flag(
        None,
        "YAML file of overrides by role, in upstream's format: megatron: [{role: critic, overrides: {lr: 1e-5}}]",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class DistillationFlags:
    """On-policy distillation"""

    use_opd: bool = flag(False, "subtract the reverse KL to a teacher from the advantages")
    opd_type: str | None = flag(
        None,
        "where the teacher is: served by an engine (at --rm-url, or started from --opd-teacher-load), loaded in the "
        "trainer, or called by the generate function, which sets teacher_log_probs (sample); sglang and megatron are "
        "aliases of the first two",
        choices=("engine", "trainer", "sample", "sglang", "megatron"),
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL")
    opd_teacher_load: str | None = flag(None, "model folder of the teacher", metavar="DIR")
