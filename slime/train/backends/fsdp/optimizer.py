"""Which parameters are trained, and the optimizer that moves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from slime.config import Config
from slime.errors import UserError
from slime.train.backends.fsdp.sharding import local_part
from slime.train.backends.fsdp.streamed_adam import MOMENTS, StreamedAdam, adamw_settings
from slime.train.rates import Rates

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """AdamW, or the one without memory; decoupled decay on matrices only (biases and norms are not decayed)."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay, DECAYED: True},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, DECAYED: False},
    ]
    groups = [group for group in groups if group["params"]]
    if config.use_stateless_adam:
        return StatelessAdam(groups, lr=config.lr, eps=config.adam_eps)
    betas = (config.adam_beta1, config.adam_beta2)
    dtypes = (MOMENT_DTYPES[config.exp_avg_dtype], MOMENT_DTYPES[config.exp_avg_sq_dtype])
    on_host = config.optimizer_cpu_offload
    if on_host or dtypes != (torch.float32, torch.float32):
        return StreamedAdam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, dtypes=dtypes, on_host=on_host)
    return ShardedAdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW and its state, the arithmetic over this rank's parts of the parameters.

    Through sharded tensors the call alone takes the host 30 ms for 310 parameters, and the device waits for it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in trained]
            first, second = ([local_part(state[moment]) for state in states] for moment in MOMENTS)
            adamw(
                [local_part(parameter) for parameter in trained],
                [local_part(parameter.grad) for parameter in trained],
                first,
                second,
                [],
                [state["step"] for state in states],
                **adamw_settings(group),
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state.update({moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS})
        return state


class StatelessAdam(torch.optim.Optimizer):
    """Adam whose every step is its first: corrected for their start, both moments are those of one gradient.

    So the betas cancel out, `p -= lr (g / (|g| + eps) + weight_decay p)`, and there is nothing to keep or to save.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(parameter.grad, parameter.grad.abs() + group["eps"], value=-group["lr"])
