"""One optimizer step: losses, their sum over micro-batches and ranks, and the update.

Invariant: the loss added up over the micro-batches of all ranks is the loss of the whole step, because every token
comes with its final weight; how the step was cut changes nothing. Metrics stay on the device until the step's one
transfer to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.kl import approximate_kl
from slime.algorithms.policy_loss import clipped_policy_loss
from slime.algorithms.reduce import weighted_sum
from slime.config import Config
from slime.errors import UserError
from slime.train.backends.protocol import TrainBackend
from slime.train.micro_batch import MicroBatch

ABS_DIFF = "train_rollout_logprob_abs_diff"


@dataclass(frozen=True)
class LossSettings:
    loss_type: str
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    entropy_coef: float

    @classmethod
    def from_config(cls, config: Config) -> LossSettings:
        return cls(
            loss_type=config.loss_type,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip if config.eps_clip_high is None else config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
            use_kl_loss=config.use_kl_loss,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type=config.kl_loss_type,
            entropy_coef=config.entropy_coef,
        )


def sft_loss(micro: MicroBatch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the unmasked response tokens."""
    loss = weighted_sum(-log_probs, micro.weights)
    return loss, {"loss": loss.detach()}


def policy_loss(
    micro: MicroBatch, log_probs: Tensor, entropy: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate - entropy bonus + KL to the reference; metrics are partial sums of this micro-batch."""
    old = micro.old_log_probs if micro.old_log_probs is not None else log_probs.detach()
    token_loss, was_clipped = clipped_policy_loss(
        log_probs,
        old,
        micro.advantages,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
    )
    pg_loss = weighted_sum(token_loss, micro.weights)
    with torch.set_grad_enabled(settings.entropy_coef != 0.0):
        entropy_loss = weighted_sum(entropy, micro.weights)
    loss = pg_loss - settings.entropy_coef * entropy_loss if settings.entropy_coef else pg_loss
    metrics = {
        "pg_loss": pg_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "pg_clipfrac": weighted_sum(was_clipped, micro.weights),
        "ppo_kl": weighted_sum(old - log_probs.detach(), micro.weights),
    }
    if settings.use_kl_loss:
        assert micro.ref_log_probs is not None
        with torch.set_grad_enabled(settings.kl_loss_coef != 0.0):
            kl = approximate_kl(log_probs, micro.ref_log_probs, settings.kl_loss_type)
            kl_loss = weighted_sum(kl, micro.weights)
        loss = loss + settings.kl_loss_coef * kl_loss if settings.kl_loss_coef else loss
        metrics["kl_loss"] = kl_loss.detach()
    if micro.rollout_log_probs is not None:
        metrics[ABS_DIFF] = weighted_sum((old - micro.rollout_log_probs).abs(), micro.weights)
    metrics["loss"] = loss.detach()
    return loss, metrics


def largest_difference(micro: MicroBatch, log_probs: Tensor) -> Tensor:
    """Largest |train - rollout| log-prob difference over the unmasked tokens."""
    old = micro.old_log_probs if micro.old_log_probs is not None else log_probs.detach()
    assert micro.rollout_log_probs is not None
    difference = (old - micro.rollout_log_probs).abs()
    return torch.where(micro.weights != 0, difference, torch.zeros_like(difference)).max()


def train_step(
    backend: TrainBackend, micro_batches: Sequence[MicroBatch], settings: LossSettings, learning_rate: float
) -> dict[str, float]:
    """Forward and backward over all micro-batches of this rank, then one clipped update; metrics of the whole step."""
    totals: dict[str, Tensor] = {}
    largest: Tensor | None = None
    for index, micro in enumerate(micro_batches):
        backend.begin_micro_batch(last=index == len(micro_batches) - 1)
        log_probs, entropy = backend.policy(micro.row, with_entropy=settings.loss_type == "policy_loss")
        if settings.loss_type == "sft_loss":
            loss, metrics = sft_loss(micro, log_probs)
        else:
            loss, metrics = policy_loss(micro, log_probs, entropy, settings)
            if micro.rollout_log_probs is not None:
                here = largest_difference(micro, log_probs)
                largest = here if largest is None else torch.maximum(largest, here)
        if micro.train_log_probs is None:
            micro.train_log_probs = log_probs.detach()
        loss.backward()
        totals = {name: value + totals[name] if name in totals else value for name, value in metrics.items()}
    grad_norm = backend.clip_gradients()
    vector = backend.ranks.sum(torch.stack([value.float() for value in totals.values()]))
    extra = [grad_norm.float()]
    if largest is not None:
        extra.append(backend.ranks.max(largest.float().reshape(1))[0])
    values = torch.cat([vector, torch.stack(extra)]).tolist()
    metrics_on_host = dict(zip(totals, values, strict=False))
    metrics_on_host["grad_norm"] = values[len(totals)]
    if largest is not None:
        metrics_on_host[f"{ABS_DIFF}_max"] = values[len(totals) + 1]
    if not math.isfinite(metrics_on_host["grad_norm"]):
        raise UserError(
            f"the gradient norm is {metrics_on_host['grad_norm']} (loss {metrics_on_host['loss']}); the weights were "
            "not updated: lower --lr or --clip-grad, or look for extreme log-probs in the samples"
        )
    backend.update(learning_rate)
    return metrics_on_host
