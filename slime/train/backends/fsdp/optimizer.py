"""Optimizers of the FSDP2 backend.

`StreamedAdam` keeps AdamW's moments in the host's memory or in bfloat16 and brings them to the device in float32, part
by part. Invariant: the arithmetic is that of torch's AdamW in float32, so with float32 moments the weights are the same
bit for bit. Moments in bfloat16 are rounded stochastically, in proportion to the distance, so that a change too small
for bfloat16 is kept on average; the random number is a function of the element's place in the whole tensor and of the
step, so neither the number of ranks nor a resumed run changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from slime.config import Config
from slime.models.families.tp_sharding import whole_region
from slime.train.backend import MOMENTS
from slime.train.backends.fsdp.sharding import local_part, local_region

ParamGroup = dict[str, Any]
"""A group of parameters with its settings, as `torch.optim` defines it."""

_PART = 1 << 24  # elements updated at a time: 64 MiB of each float32 moment
_MIX = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's finalizer
_SPREAD = 0x9E3779B1


def adamw_settings(group: ParamGroup) -> ParamGroup:
    """Keyword arguments of torch's fused AdamW for a group of parameters."""
    beta1, beta2 = group["betas"]
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
    return {"fused": True, "amsgrad": False, "maximize": False, "beta1": beta1, "beta2": beta2, **rates}


class StreamedAdam(torch.optim.Optimizer):
    """AdamW that keeps the first and the second moment in `dtypes`, on the device or in the host's memory."""

    def __init__(
        self,
        groups: list[ParamGroup],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtypes: tuple[torch.dtype, torch.dtype],
        on_host: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._dtypes = dict(zip(MOMENTS, dtypes, strict=True))
        self._on_host = on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        number: int | None = None
        salt = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                salt += 1
                if parameter.grad is None:
                    continue
                state = self.state_of(parameter)
                if number is None:  # equal for all parameters: read once, since it waits for the device
                    number = int(state["step"].item())
                seed = (2 * salt + (number << 12)) * _MIX[0]
                self._update(parameter, state, group, salt=(seed ^ seed >> 13) * _MIX[1] & 0xFFFFFFFF)
                state["step"] += 1
        if self._on_host and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the moments must be on the host when the step is over

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, created if absent.

        Its moments, also those from a checkpoint, are converted to the configured dtypes and moved to the host if
        configured.
        """
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
        for moment, dtype in self._dtypes.items():
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if state[moment].dtype != dtype:
                state[moment] = state[moment].to(dtype)
            if self._on_host and state[moment].device.type != "cpu":
                state[moment] = state[moment].to("cpu", non_blocking=True)  # allocates pinned memory
        return state

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: ParamGroup, *, salt: int) -> None:
        """Update one parameter, `_PART` elements at a time; `salt` seeds the rounding."""
        weights = local_part(parameter.detach()).view(-1)
        gradients = local_part(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        kept = [local_part(state[moment]).view(-1) for moment in MOMENTS]
        region = local_region(parameter)
        assert region[1:] == whole_region(parameter.shape[1:]), "parameters are sharded along their rows"
        first = (region[0].start if region else 0) * math.prod(parameter.shape[1:])  # this rank's first element
        for begin in range(0, weights.numel(), _PART):
            part = slice(begin, min(begin + _PART, weights.numel()))
            moments = [moment[part].to(weights.device, torch.float32, non_blocking=True) for moment in kept]
            adamw(
                [weights[part]],
                [gradients[part]],
                [moments[0]],
                [moments[1]],
                [],
                [state["step"].clone()],
                **adamw_settings(group),
            )
            for which, (held, new) in enumerate(zip(kept, moments, strict=True)):
                if held.dtype == torch.bfloat16:
                    new = rounded(new, first + begin, salt + which)
                if held[part].data_ptr() != new.data_ptr():
                    held[part].copy_(new, non_blocking=True)


def rounded(values: Tensor, first: int, salt: int) -> Tensor:
    """Round float32 values stochastically to bfloat16; `first` is the index of the first one in the whole tensor."""
    places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    noise = places.add_(_signed(first)).mul_(_signed(_SPREAD)).add_(_signed(salt * _SPREAD))
    noise ^= (noise >> 16) & 0xFFFF
    noise = noise.mul_(_signed(_MIX[0]))
    noise ^= (noise >> 13) & 0x7FFFF
    noise = noise.mul_(_signed(_MIX[1]))
    noise ^= (noise >> 16) & 0xFFFF
    bits = (values.view(torch.int32) + (noise & 0xFFFF)) & _signed(0xFFFF0000)
    return bits.view(torch.float32).to(torch.bfloat16)


def _signed(number: int) -> int:
    """Reinterpret the lowest 32 bits of a number as an int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """Make the optimizer of the flags; decoupled weight decay applies to matrices only, not to biases and norms."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    matrices, others = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups = [
        {"params": own, "weight_decay": config.weight_decay * factor, "lr_mult": 1.0, "wd_mult": factor}
        for own, factor in ((matrices, 1.0), (others, 0.0))
        if own
    ]
    if config.use_stateless_adam:
        return StatelessAdam(groups, lr=config.lr, eps=config.adam_eps)
    betas = (config.adam_beta1, config.adam_beta2)
    dtypes = (MOMENT_DTYPES[config.exp_avg_dtype], MOMENT_DTYPES[config.exp_avg_sq_dtype])
    on_host = config.optimizer_cpu_offload
    if on_host or dtypes != (torch.float32, torch.float32):
        return StreamedAdam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, dtypes=dtypes, on_host=on_host)
    return ShardedAdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW and its state, computed on this rank's parts of the parameters.

    On sharded tensors the call alone takes the host 30 ms for 310 parameters, during which the device is idle.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in trained]
            for parameter, state in zip(trained, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state.update({moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS})
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


class StatelessAdam(torch.optim.Optimizer):
    """Adam whose every step is a first step: after bias correction both moments are those of one gradient.

    So the betas cancel out, `p -= lr (g / (|g| + eps) + weight_decay p)`, and no state is kept or saved.
    """

    def __init__(self, groups: list[ParamGroup], *, lr: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(parameter.grad, parameter.grad.abs() + group["eps"], value=-group["lr"])
