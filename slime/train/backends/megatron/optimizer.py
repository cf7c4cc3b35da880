"""Megatron's optimizer in two halves: the norm of the gradients and their clipping, then the update.

Invariant: gradients are those that the passes have summed; between the halves nothing is changed but their length, so a
norm that is not finite leaves weights and moments as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from slime.errors import UserError
from slime.train.lr_schedule import Rates
from slime.train.topology import Ranks


def choose_trainable(
    parameters: Mapping[str, nn.Parameter],
    world: Ranks,
    *,
    freeze: Sequence[str] | None,
    only_train: Sequence[str] | None,
) -> None:
    """Freeze by regular expressions over Megatron's parameter names; refuses to freeze everything."""
    if freeze and only_train:
        raise UserError("--freeze-params-name-list and --only-train-params-name-list exclude each other: give one")
    trained = 0
    for name, parameter in parameters.items():
        if only_train:
            wanted = any(re.search(pattern, name) for pattern in only_train)
        else:
            wanted = not any(re.search(pattern, name) for pattern in freeze or ())
        wanted &= parameter.requires_grad  # a function of the user's that made the stage may have frozen it
        parameter.requires_grad_(wanted)
        trained += wanted
    if not world.sum(torch.tensor([trained], device=world.device)).item():
        flag = "--only-train-params-name-list" if only_train else "--freeze-params-name-list"
        raise UserError(
            f"{flag} leaves no parameter to train: check the patterns against Megatron's parameter names, which begin "
            "with decoder.layers.0.self_attention and the like"
        )


def sum_gradients(stages: Sequence[Any], settings: DistributedDataParallelConfig) -> list[Any]:
    """The stages with what adds up their gradients around them; their config tells the schedules of it."""
    config = stages[0].config
    wrapped = [
        DistributedDataParallel(config, settings, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(stages)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        waits = [one.no_sync for one in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return wrapped


class StepOptimizer:
    """Of the stages that `sum_gradients` gave; `is_stateless`: every update is Adam's first, and nothing is kept."""

    def __init__(self, wrapped: Sequence[Any], settings: OptimizerConfig, *, is_stateless: bool = False) -> None:
        self.wrapped = list(wrapped)
        self.megatron = get_megatron_optimizer(settings, self.wrapped, use_gloo_process_groups=False)
        self._clip_grad = settings.clip_grad
        self._is_stateless = is_stateless

    def clip(self, device: torch.device) -> Tensor:
        """The global norm before clipping."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        for one in self.megatron.chained_optimizers:
            parameters = [] if one.is_stub_optimizer else one.get_parameters()
            if parameters and self._clip_grad > 0:
                decoupled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, norm, decoupled)
        return torch.tensor(norm, device=device)

    def update(self, rates: Rates) -> None:
        for group in self.megatron.param_groups:
            group["lr"] = rates.learning_rate * group["lr_mult"]
            group["weight_decay"] = rates.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        if self._is_stateless:
            self.forget_state()

    def drop_gradients(self) -> None:
        for one in self.wrapped:
            one.zero_grad_buffer()
        self.megatron.zero_grad()

    def gather_parameters(self) -> None:
        """Finish what an update left for the next pass: afterwards every rank has its weights as they are."""
        for one in self.wrapped:
            if one.ddp_config.overlap_param_gather:
                one.start_param_sync(force_sync=True)

    def gradient_buffers(self) -> list[Tensor]:
        """Where gradients are summed; zero after `drop_gradients`."""
        return [part.grad_data for one in self.wrapped for part in (*one.buffers, *one.expert_parallel_buffers)]

    def state_tensors(self) -> list[Tensor]:
        """The moments that there are."""
        inner = [one.optimizer for one in self.megatron.chained_optimizers if not one.is_stub_optimizer]
        states = [value for one in inner for state in one.state.values() for value in state.values()]
        return [value for value in states if isinstance(value, Tensor)]

    def forget_state(self) -> None:
        for one in self.megatron.chained_optimizers:
            if not one.is_stub_optimizer:
                one.optimizer.state.clear()
                for group in one.optimizer.param_groups:
                    group.pop("step", None)
