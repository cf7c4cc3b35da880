"""Which parameters are trained, and the optimizer that moves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slime.config import Config
from slime.errors import UserError
from slime.train.rates import Rates

DECAYED = "decayed"
"""In a group of parameters: whether its weight decay is that of the schedule."""


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """What the next update is made with."""
    for group in optimizer.param_groups:
        group["lr"] = rates.learning_rate
        group["weight_decay"] = rates.weight_decay if group[DECAYED] else 0.0


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
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay, DECAYED: True},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, DECAYED: False},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
