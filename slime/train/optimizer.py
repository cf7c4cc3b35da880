"""AdamW and the learning rate of each step.

Invariant: the learning rate is a pure function of the number of finished updates of the model, so a resumed run
continues with the same one, and steps that only a critic made use nothing of the policy's warm-up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slime.config import Config
from slime.errors import UserError


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up over `warmup` steps, then `style` from `peak` to `floor` over the rest of `horizon` steps."""

    peak: float
    floor: float
    style: str
    warmup: int
    horizon: int | None

    def __post_init__(self) -> None:
        if self.style != "constant" and self.horizon is None:
            raise UserError(
                f"--lr-decay-style {self.style} needs an end: give --lr-decay-iters, or --num-rollout to derive it from"
            )

    @classmethod
    def from_config(cls, config: Config, *, without: int = 0) -> LearningRate:
        """The horizon is that of the run, less the rollouts at its begin in which this model is not updated."""
        horizon = config.lr_decay_iters
        if horizon is None and config.num_rollout is not None:
            horizon = max(config.num_rollout - without, 0) * (config.num_steps_per_rollout or 1)
        return cls(config.lr, config.min_lr, config.lr_decay_style, config.lr_warmup_iters, horizon)

    def at(self, step: int) -> float:
        """The rate of the update that follows `step` finished ones."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "constant" or self.horizon is None:
            return self.peak
        span = max(self.horizon - self.warmup, 1)
        progress = min((step - self.warmup) / span, 1.0)
        remaining = 1.0 - progress if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * remaining


def choose_trainable(module: nn.Module, *, freeze: Sequence[str] | None, only_train: Sequence[str] | None) -> None:
    """Freeze by regular expressions over parameter names; refuses to freeze everything."""
    if freeze and only_train:
        raise UserError("--freeze-params-name-list and --only-train-params-name-list exclude each other: give one")
    trained = 0
    for name, parameter in module.named_parameters():
        if only_train:
            wanted = any(re.search(pattern, name) for pattern in only_train)
        else:
            wanted = not any(re.search(pattern, name) for pattern in freeze or ())
        parameter.requires_grad_(wanted)
        trained += wanted
    if not trained:
        flag = "--only-train-params-name-list" if only_train else "--freeze-params-name-list"
        raise UserError(f"{flag} leaves no parameter to train: check the patterns against the model's parameter names")


def make_adamw(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.AdamW:
    """AdamW with decoupled decay on matrices only (biases and norms are not decayed)."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
