"""The policy's loss on one micro-batch.

Invariant: every term is a sum of per-token values times the micro-batch's weights, so the micro-batches of a step add
up to the same total for any split; tokens that a correction rejects leave the numerator of every term (surrogate,
entropy, KL) and stay in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.estimators import CISPO, GSPO
from slime.algorithms.importance import (
    ImportanceWeights,
    importance_weights,
    rejection_mask,
    unit_mean_scale,
    weight_sums,
)
from slime.algorithms.policy_loss import (
    approximate_kl,
    cispo_loss,
    clipped_policy_loss,
    finite_ratio,
    off_policy_sequence_mask,
    sequence_log_ratio,
)
from slime.algorithms.reduce import weighted_sum
from slime.config import Config
from slime.config.algorithm import estimator_of, uses_importance_weights, uses_optional_importance_weights
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.samples.micro_batch import MicroBatch
from slime.train.topology import RankSum


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
    """Train without the correction on rollouts that lack the engine's log-probs."""

    @classmethod
    def from_config(cls, config: Config) -> Correction | None:
        weigh = uses_importance_weights(config)
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
            optional=uses_optional_importance_weights(config),
        )


@dataclass(frozen=True)
class LossSettings:
    """Settings of the policy's loss, as plain values."""

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


ABS_DIFF = "train_rollout_logprob_abs_diff"
ADVANTAGE_MAX = "advantages_abs_max"
Metrics = dict[str, Tensor]


class PolicyObjective:
    """Surrogate - entropy bonus + KL to the reference, with the selected corrections and user functions."""

    def __init__(self, config: Config) -> None:
        self.settings = LossSettings.from_config(config)
        self._config = config
        self._custom_correction: Callable[..., object] | None = None
        self._custom_reducer: Callable[..., Callable[[Tensor], Tensor]] | None = None
        if config.custom_tis_function_path is not None:
            self._custom_correction = load_function(config.custom_tis_function_path, what="--custom-tis-function-path")
        if config.custom_pg_loss_reducer_function_path is not None:
            self._custom_reducer = load_function(
                config.custom_pg_loss_reducer_function_path,
                what="--custom-pg-loss-reducer-function-path",
                params=("total_lengths", "response_lengths", "loss_masks"),
            )

    def __call__(self, micro: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        """Compute the loss, and metrics that are partial sums of this micro-batch."""
        s = self.settings
        old = self.old_log_probs(micro, log_probs)
        log_ratio = log_probs - old
        if s.policy_loss == GSPO:
            log_ratio = sequence_log_ratio(log_probs, old, micro.mask, micro.lengths)
        advantages, clip = micro.columns["advantages"], {"eps_clip": s.eps_clip, "eps_clip_high": s.eps_clip_high}
        if s.policy_loss == CISPO:
            token_loss, was_clipped = cispo_loss(log_probs, log_ratio, advantages, **clip)
        else:
            token_loss, was_clipped = clipped_policy_loss(log_ratio, advantages, **clip, eps_clip_c=s.eps_clip_c)
        metrics: Metrics = {}
        if s.opsm_delta is not None:
            sampled_with = _rollout_log_probs(micro, "--use-opsm")
            keep = off_policy_sequence_mask(
                log_probs.detach(), sampled_with, advantages, micro.mask, micro.lengths, delta=s.opsm_delta
            )
            token_loss = token_loss * keep
            metrics["opsm_clipfrac"] = weighted_sum(1.0 - keep, micro.weights)
        token_loss, kept, more = self._corrected(micro, token_loss, log_probs, log_ratio)
        weights = micro.weights * kept
        if self._custom_reducer is None:
            pg_loss = weighted_sum(token_loss, weights)
        else:
            reducer = self._custom_reducer(
                list(micro.row.total_lengths),
                list(micro.lengths),
                list((micro.mask * kept).split(micro.lengths)),
                calculate_per_token_loss=self._config.calculate_per_token_loss,
            )
            pg_loss = reducer(token_loss) * micro.scale if micro.positions else token_loss.sum() * 0.0
        loss = pg_loss
        with torch.set_grad_enabled(s.entropy_coef != 0.0):
            entropy_loss = weighted_sum(entropy, weights)
        if s.entropy_coef:
            loss = loss - s.entropy_coef * entropy_loss
        metrics |= more | {
            "pg_loss": pg_loss.detach(),
            "entropy_loss": entropy_loss.detach(),
            "pg_clipfrac": weighted_sum(was_clipped, weights),
            "ppo_kl": weighted_sum(-log_ratio.detach(), weights),
        }
        if s.use_kl_loss:
            token_log_ratio = log_probs - old
            with torch.set_grad_enabled(s.kl_loss_coef != 0.0):
                ratio = finite_ratio(token_log_ratio) if s.unbiased_kl else None
                kl = approximate_kl(log_probs, micro.columns["ref_log_probs"], s.kl_loss_type, ratio=ratio)
                kl_loss = weighted_sum(kl, weights)
            loss = loss + s.kl_loss_coef * kl_loss if s.kl_loss_coef else loss
            metrics["kl_loss"] = kl_loss.detach()
        if "rollout_log_probs" in micro.columns:
            gap = self.own_log_probs(micro, log_probs) - micro.columns["rollout_log_probs"]
            metrics[ABS_DIFF] = weighted_sum(gap.abs(), micro.weights)
        metrics["loss"] = loss.detach()
        return loss, metrics

    def own_log_probs(self, micro: MicroBatch, log_probs: Tensor) -> Tensor:
        """Return the trainer's log-probs from before the rollout's first update; by default those of this forward."""
        own = micro.columns.get("log_probs")
        return log_probs.detach() if own is None else own

    def old_log_probs(self, micro: MicroBatch, log_probs: Tensor) -> Tensor:
        """Return the log-probs of the old policy in the ratio: the engine's, or the trainer's own."""
        if not self.settings.rollout_is_old:
            return self.own_log_probs(micro, log_probs)
        return _rollout_log_probs(micro, "--use-rollout-logprobs")

    # corrections

    def _corrected(
        self, micro: MicroBatch, token_loss: Tensor, log_probs: Tensor, log_ratio: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the weighted token loss, 1 for tokens that are not rejected, and metrics."""
        correction, everything = self.settings.correction, torch.ones_like(micro.mask)
        if correction is None or not _has_rollout_log_probs(correction, micro):
            return token_loss, everything, {}
        train, rollout = self.own_log_probs(micro, log_probs), micro.columns["rollout_log_probs"]
        metrics = {"ois": weighted_sum(torch.exp(log_ratio.detach()), micro.weights)}
        if self._custom_correction is not None:
            changed, kept, more = self._call_custom(self._custom_correction, micro, token_loss, train, rollout)
        else:
            changed, kept, more = self._weigh_and_reject(correction, micro, token_loss, train, rollout)
        if not (correction.weigh or correction.reject):  # --get-mismatch-metrics alone changes nothing
            changed, kept = token_loss, everything
        return changed, kept, metrics | more

    def _weigh_and_reject(
        self, c: Correction, micro: MicroBatch, token_loss: Tensor, train: Tensor, rollout: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Apply the importance weights and the rejection that the flags select."""
        found = _weights(c, micro, train, rollout)
        weights = found.weights * micro.importance_scale
        metrics = {
            "tis": weighted_sum(found.ratio, micro.weights),
            "tis_clipfrac": weighted_sum(found.out_of_bounds, micro.weights),
            "tis_abs": weighted_sum((found.ratio - 1.0).abs(), micro.weights),
        }
        kept = torch.ones_like(micro.mask)
        if c.reject:
            kept = rejection_mask(
                train,
                rollout,
                micro.mask,
                micro.lengths,
                level=c.reject_level,
                lower=c.reject_lower,
                upper=c.reject_upper,
                veto_threshold=c.veto_threshold,
            )
            metrics["rs_rejected"] = weighted_sum(1.0 - kept, micro.weights)
        return (token_loss * weights if c.weigh else token_loss), kept, metrics

    def _call_custom(
        self, function: Callable[..., object], micro: MicroBatch, token_loss: Tensor, train: Tensor, rollout: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Apply the user's correction and check its result."""
        masks = list(micro.mask.split(micro.lengths))
        answer = function(
            plugin_args(self._config),
            pg_loss=token_loss,
            train_log_probs=list(train.split(micro.lengths)),
            rollout_log_probs=list(rollout.split(micro.lengths)),
            loss_masks=masks,
            total_lengths=list(micro.row.total_lengths),
            response_lengths=list(micro.lengths),
        )
        path = str(self._config.custom_tis_function_path)
        if not isinstance(answer, tuple | list) or len(answer) != 3 or not isinstance(answer[2], Mapping):
            raise UserError(f"{path} must return (pg_loss, masks, metrics), not {answer!r:.80}")
        changed, new_masks, found = answer
        lengths = list(micro.lengths) if new_masks is None else [len(mask) for mask in new_masks]
        if not isinstance(changed, Tensor) or changed.shape != token_loss.shape or lengths != list(micro.lengths):
            raise UserError(f"{path} must return a loss for each token, and masks as long as the responses, or None")
        kept = torch.ones_like(micro.mask)
        if new_masks is not None:
            kept = (torch.cat([mask.to(micro.mask) for mask in new_masks]) != 0).to(micro.mask)
        values = {name: torch.as_tensor(value, device=micro.mask.device).detach() for name, value in found.items()}
        if wrong := [name for name, value in values.items() if value.numel() not in (1, micro.mask.numel())]:
            raise UserError(f"{path}: the metric {wrong[0]} must be one number, or one for each token")
        metrics = {n: weighted_sum(v.reshape(-1).expand_as(micro.mask), micro.weights) for n, v in values.items()}
        return changed, kept, metrics


def set_importance_scale(correction: Correction | None, micro_batches: Sequence[MicroBatch], ranks: RankSum) -> None:
    """Scale importance weights to a mean of 1 over the step, for any split (`--tis-batch-normalize`)."""
    if correction is None or not correction.batch_normalize:
        return
    sums = torch.zeros(2, dtype=torch.float64)
    if not all(_has_rollout_log_probs(correction, micro) for micro in micro_batches):
        return
    for micro in micro_batches:
        found = _weights(correction, micro, micro.columns["log_probs"], micro.columns["rollout_log_probs"])
        sums += weight_sums(found.weights, micro.mask, micro.lengths, correction.level).cpu()
    scale = unit_mean_scale(*ranks.sum(sums.to(ranks.device)).tolist())
    for micro in micro_batches:
        micro.importance_scale = scale


def _has_rollout_log_probs(correction: Correction, micro: MicroBatch) -> bool:
    """Check for the engine's log-probs: all samples of a rollout have them, on all ranks, or none have them.

    Raises UserError if the flags request the correction and they are missing.
    """
    if correction.optional and "rollout_log_probs" not in micro.columns:
        return False
    flag = "--use-tis" if correction.weigh else "--use-rs" if correction.reject else "--get-mismatch-metrics"
    _rollout_log_probs(micro, flag)
    return True


def _rollout_log_probs(micro: MicroBatch, flag: str) -> Tensor:
    """Return the engine's log-probs, which a flag needs."""
    if "rollout_log_probs" not in micro.columns:
        raise UserError(f"{flag}: a sample has no rollout log-probs; its generate function must set them")
    return micro.columns["rollout_log_probs"]


def _weights(c: Correction, micro: MicroBatch, train: Tensor, rollout: Tensor) -> ImportanceWeights:
    """Compute the importance weights that the flags select."""
    return importance_weights(
        train, rollout, micro.mask, micro.lengths, level=c.level, mode=c.mode, lower=c.lower, upper=c.upper
    )


def max_log_prob_gap(objective: PolicyObjective, micro: MicroBatch, log_probs: Tensor) -> Tensor | None:
    """Compute the largest |train - rollout| log-prob difference over the unmasked tokens."""
    if "rollout_log_probs" not in micro.columns:
        return None
    return max_unmasked(micro, (objective.own_log_probs(micro, log_probs) - micro.columns["rollout_log_probs"]).abs())


def max_unmasked(micro: MicroBatch, values: Tensor) -> Tensor:
    """Compute the maximum of non-negative values over the unmasked tokens."""
    return torch.where(micro.weights != 0, values, torch.zeros_like(values)).max()
