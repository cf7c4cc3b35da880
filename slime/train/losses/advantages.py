"""Computes the advantages of one rollout with the selected estimator.

Invariant: advantages depend on the samples, not on their distribution over ranks: whitening uses sums over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages import EstimatorInputs, reverse_kl, subtract_reverse_kl, whiten, whitening_sums
from slime.algorithms.policy_loss import approximate_kl
from slime.config import Config
from slime.config.algorithm import estimator_of
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.train.samples.rollout_data import RolloutData, check_columns
from slime.train.topology import RankSum


def set_advantages(config: Config, data: RolloutData, ranks: RankSum) -> None:
    """Set `advantages` and `returns` in the data (and `kl`, `opd_reverse_kl` if they are used)."""
    if config.kl_coef != 0:
        pairs = zip(_old_log_probs(config, data), data["ref_log_probs"], strict=True)
        data["kl"] = [approximate_kl(own, reference, config.kl_loss_type) for own, reference in pairs]
    path = config.custom_advantage_function_path
    if path is not None:
        custom = load_function(path, what="--custom-advantage-function-path", params=("args", "rollout_data"))
        custom(plugin_args(config), data)
        check_columns(data, ("advantages", "returns"), path)
    else:
        given = EstimatorInputs(
            rewards=data["rewards"],
            masks=data["loss_masks"],
            kl=data.get("kl"),
            values=data.get("values"),
            placed=data.get("turn_rewards"),
            kl_coef=config.kl_coef,
            gamma=config.gamma,
            lambd=config.lambd,
        )
        data["advantages"], data["returns"] = estimator_of(config).advantages(given)
    if config.use_opd:
        if "teacher_log_probs" not in data:
            raise UserError("--use-opd: the samples have no teacher log-probs; the rollout must set teacher_log_probs")
        student, teacher = _old_log_probs(config, data), data["teacher_log_probs"]
        data["advantages"] = subtract_reverse_kl(data["advantages"], student, teacher, config.opd_kl_coef)
        data["opd_reverse_kl"] = [reverse_kl(s, t) for s, t in zip(student, teacher, strict=True)]
    if config.normalize_advantages:
        masks, sums = data["loss_masks"], torch.zeros(3, dtype=torch.float64)
        for values, mask in zip(data["advantages"], masks, strict=True):
            sums += whitening_sums(values, mask)
        count, total, squares = ranks.sum(sums.to(ranks.device)).cpu()
        data["advantages"] = [
            whiten(values.double(), mask, count=count, total=total, squares=squares).float()
            for values, mask in zip(data["advantages"], masks, strict=True)
        ]


def _old_log_probs(config: Config, data: RolloutData) -> list[Tensor]:
    """Return the log-probs of the old policy: the engine's, or the trainer's own."""
    name = "rollout_log_probs" if config.use_rollout_logprobs else "log_probs"
    if name not in data:
        raise UserError(
            "--use-rollout-logprobs: a sample has no rollout log-probs; its generate function must set them"
        )
    columns: list[Tensor] = data[name]
    return columns
