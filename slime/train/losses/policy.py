"""The policy's loss on one micro-batch.

Invariant: every term is a sum of per-token values times the micro-batch's weights, so the micro-batches of a step add
up to the same total for any split; tokens that a correction rejects leave the numerator of every term (surrogate,
entropy, KL) and stay in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from slime.config.algorithm import uses_importance_weights, uses_optional_importance_weights
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.samples.micro_batch import LossOutcome, MicroBatch
from slime.train.topology import RankSum

Metrics = dict[str, Tensor]


class PolicyObjective:
    """Surrogate - entropy bonus + KL to the reference, with the selected corrections and user functions.

    The correction for the gap between the engine's and the trainer's log-probs weighs or rejects tokens, or only
    reports the gap (`--get-mismatch-metrics`).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._weighs = uses_importance_weights(config)
        self._corrects = self._weighs or config.use_rs or config.get_mismatch_metrics
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

    def __call__(self, micro: MicroBatch, log_probs: Tensor, entropy: Tensor) -> LossOutcome:
        """Compute the loss and its metrics; the first training forward becomes the micro-batch's `train_log_probs`."""
        config = self._config
        if config.use_rollout_logprobs:
            old = _rollout_log_probs(micro, "--use-rollout-logprobs")
        else:
            old = self._own_log_probs(micro, log_probs)
        log_ratio = log_probs - old
        if config.policy_loss == GSPO:
            log_ratio = sequence_log_ratio(log_probs, old, micro.mask, micro.lengths)
        advantages = micro.columns["advantages"]
        clip = {"eps_clip": config.eps_clip, "eps_clip_high": config.eps_clip_high}
        if config.policy_loss == CISPO:
            token_loss, was_clipped = cispo_loss(log_probs, log_ratio, advantages, **clip)
        else:
            token_loss, was_clipped = clipped_policy_loss(log_ratio, advantages, **clip, eps_clip_c=config.eps_clip_c)
        metrics: Metrics = {}
        if config.use_opsm:
            sampled_with = _rollout_log_probs(micro, "--use-opsm")
            keep = off_policy_sequence_mask(
                log_probs.detach(), sampled_with, advantages, micro.mask, micro.lengths, delta=config.opsm_delta
            )
            token_loss = token_loss * keep
            metrics["opsm_clipfrac"] = weighted_sum(1.0 - keep, micro.weights)
        token_loss, kept, more = self._correct(micro, token_loss, log_probs, log_ratio)
        weights = micro.weights * kept
        if self._custom_reducer is None:
            pg_loss = weighted_sum(token_loss, weights)
        else:
            reducer = self._custom_reducer(
                list(micro.row.total_lengths),
                list(micro.lengths),
                list((micro.mask * kept).split(micro.lengths)),
                calculate_per_token_loss=config.calculate_per_token_loss,
            )
            pg_loss = reducer(token_loss) * micro.scale if micro.positions else token_loss.sum() * 0.0
        loss = pg_loss
        with torch.set_grad_enabled(config.entropy_coef != 0.0):
            entropy_loss = weighted_sum(entropy, weights)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy_loss
        metrics |= more | {
            "pg_loss": pg_loss.detach(),
            "entropy_loss": entropy_loss.detach(),
            "pg_clipfrac": weighted_sum(was_clipped, weights),
            "ppo_kl": weighted_sum(-log_ratio.detach(), weights),
        }
        if config.use_kl_loss:
            token_log_ratio = log_probs - old
            with torch.set_grad_enabled(config.kl_loss_coef != 0.0):
                ratio = finite_ratio(token_log_ratio) if config.use_unbiased_kl else None
                kl = approximate_kl(log_probs, micro.columns["ref_log_probs"], config.kl_loss_type, ratio=ratio)
                kl_loss = weighted_sum(kl, weights)
            loss = loss + config.kl_loss_coef * kl_loss if config.kl_loss_coef else loss
            metrics["kl_loss"] = kl_loss.detach()
        maxima = {"advantages_abs_max": _max_unmasked(micro, advantages.abs())}
        if "rollout_log_probs" in micro.columns:
            gap = (self._own_log_probs(micro, log_probs) - micro.columns["rollout_log_probs"]).abs()
            metrics["train_rollout_logprob_abs_diff"] = weighted_sum(gap, micro.weights)
            maxima["train_rollout_logprob_abs_diff_max"] = _max_unmasked(micro, gap)
        metrics["loss"] = loss.detach()
        if micro.train_log_probs is None:
            micro.train_log_probs = log_probs.detach()
        return LossOutcome(loss, metrics, maxima)

    def _own_log_probs(self, micro: MicroBatch, log_probs: Tensor) -> Tensor:
        """Return the trainer's log-probs from before the rollout's first update; by default those of this forward."""
        own = micro.columns.get("log_probs")
        return log_probs.detach() if own is None else own

    # corrections

    def set_importance_scale(self, micro_batches: Sequence[MicroBatch], ranks: RankSum) -> None:
        """Scale importance weights to a mean of 1 over the step, for any split (`--tis-batch-normalize`)."""
        if not self.normalizes_weights or not all(map(self._has_rollout_log_probs, micro_batches)):
            return
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in micro_batches:
            found = self._weights(micro, micro.columns["log_probs"])
            sums += weight_sums(found.weights, micro.mask, micro.lengths, self._config.tis_level).cpu()
        scale = unit_mean_scale(*ranks.sum(sums.to(ranks.device)).tolist())
        for micro in micro_batches:
            micro.importance_scale = scale

    @property
    def normalizes_weights(self) -> bool:
        """True if importance weights are scaled over a whole step."""
        return self._corrects and self._config.tis_batch_normalize and self._custom_correction is None

    def _has_rollout_log_probs(self, micro: MicroBatch) -> bool:
        """Check for the engine's log-probs: all samples of a rollout have them, on all ranks, or none have them.

        Raises UserError if the flags request the correction and they are missing.
        """
        if uses_optional_importance_weights(self._config) and "rollout_log_probs" not in micro.columns:
            return False
        _rollout_log_probs(
            micro, "--use-tis" if self._weighs else "--use-rs" if self._config.use_rs else "--get-mismatch-metrics"
        )
        return True

    def _weights(self, micro: MicroBatch, train: Tensor) -> ImportanceWeights:
        """Compute the importance weights that the flags select."""
        config = self._config
        return importance_weights(
            train,
            micro.columns["rollout_log_probs"],
            micro.mask,
            micro.lengths,
            level=config.tis_level,
            mode=config.tis_mode,
            lower=config.tis_clip_low,
            upper=config.tis_clip,
        )

    def _correct(
        self, micro: MicroBatch, token_loss: Tensor, log_probs: Tensor, log_ratio: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the weighted token loss, 1 for tokens that are not rejected, and metrics."""
        config, everything = self._config, torch.ones_like(micro.mask)
        if not self._corrects or not self._has_rollout_log_probs(micro):
            return token_loss, everything, {}
        train, rollout = self._own_log_probs(micro, log_probs), micro.columns["rollout_log_probs"]
        metrics = {"ois": weighted_sum(torch.exp(log_ratio.detach()), micro.weights)}
        changed, kept = token_loss, everything
        if self._custom_correction is not None:
            changed, kept, more = self._call_custom(self._custom_correction, micro, token_loss, train, rollout)
            metrics |= more
        else:
            found = self._weights(micro, train)
            metrics["tis"] = weighted_sum(found.ratio, micro.weights)
            metrics["tis_clipfrac"] = weighted_sum(found.out_of_bounds, micro.weights)
            metrics["tis_abs"] = weighted_sum((found.ratio - 1.0).abs(), micro.weights)
            if self._weighs:
                changed = token_loss * (found.weights * micro.importance_scale)
            if config.use_rs:
                kept = rejection_mask(
                    train,
                    rollout,
                    micro.mask,
                    micro.lengths,
                    level=config.rs_level,
                    lower=config.rs_lower_bound,
                    upper=config.rs_upper_bound,
                    veto_threshold=config.rs_veto_threshold,
                )
                metrics["rs_rejected"] = weighted_sum(1.0 - kept, micro.weights)
        if not (self._weighs or config.use_rs):  # --get-mismatch-metrics alone changes nothing
            changed, kept = token_loss, everything
        return changed, kept, metrics

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


def _rollout_log_probs(micro: MicroBatch, flag: str) -> Tensor:
    """Return the engine's log-probs, which a flag needs."""
    if "rollout_log_probs" not in micro.columns:
        raise UserError(f"{flag}: a sample has no rollout log-probs; its generate function must set them")
    return micro.columns["rollout_log_probs"]


def _max_unmasked(micro: MicroBatch, values: Tensor) -> Tensor:
    """Compute the maximum of non-negative values over the unmasked tokens."""
    return torch.where(micro.weights != 0, values, torch.zeros_like(values)).max()
