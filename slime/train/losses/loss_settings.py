"""What the loss is made of, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config import Config
from slime.config.algorithm import estimator_of, weighs_importance, weighs_what_it_can


@dataclass(frozen=True)
class Correction:
    """Importance weights and rejection for the gap between the engine's and the trainer's log-probs."""

    weigh: bool
    reject: bool
    level: str
    mode: str
    lower: float
    upper: float
    batch_normalize: bool
    reject_level: str
    reject_lower: float
    reject_upper: float
    veto_threshold: float | None
    optional: bool = False
    """Rollouts without the engine's log-probs are trained on without it."""

    @classmethod
    def from_config(cls, config: Config) -> Correction | None:
        weigh = weighs_importance(config)
        if not (weigh or config.use_rs or config.get_mismatch_metrics):
            return None
        return cls(
            weigh=weigh,
            reject=config.use_rs,
            level=config.tis_level,
            mode=config.tis_mode,
            lower=config.tis_clip_low,
            upper=config.tis_clip,
            batch_normalize=config.tis_batch_normalize and config.custom_tis_function_path is None,
            reject_level=config.rs_level,
            reject_lower=config.rs_lower_bound,
            reject_upper=config.rs_upper_bound,
            veto_threshold=config.rs_veto_threshold,
            optional=weighs_what_it_can(config),
        )


@dataclass(frozen=True)
class LossSettings:
    loss_type: str
    policy_loss: str
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    unbiased_kl: bool
    entropy_coef: float
    opsm_delta: float | None
    rollout_is_old: bool
    correction: Correction | None

    @classmethod
    def from_config(cls, config: Config) -> LossSettings:
        return cls(
            loss_type=config.loss_type,
            policy_loss=config.policy_loss or estimator_of(config).policy_loss,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip if config.eps_clip_high is None else config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
            use_kl_loss=config.use_kl_loss,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type=config.kl_loss_type,
            unbiased_kl=config.use_unbiased_kl,
            entropy_coef=config.entropy_coef,
            opsm_delta=config.opsm_delta if config.use_opsm else None,
            rollout_is_old=config.use_rollout_logprobs,
            correction=Correction.from_config(config),
        )
