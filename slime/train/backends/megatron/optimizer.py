"""Megatron's optimizer in two steps: gradient norm and clipping, then the update.

Invariant: the gradients are the sums of the passes. The first step only scales them, so after a non-finite norm weights
and moments are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from slime.errors import UserError
from slime.train.lr_schedule import Rates
from slime.train.topology import Ranks

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def choose_trainable(
    parameters: Mapping[str, nn.Parameter],
    world: Ranks,
    *,
    freeze: Sequence[str] | None,
    only_train: Sequence[str] | None,
) -> None:
    """Freeze parameters by regular expressions over Megatron's names; raises UserError if none is left to train."""
    if freeze and only_train:
        raise UserError("--freeze-params-name-list and --only-train-params-name-list exclude each other: give one")
    trained = 0
    for name, parameter in parameters.items():
        if only_train:
            wanted = any(re.search(pattern, name) for pattern in only_train)
        else:
            wanted = not any(re.search(pattern, name) for pattern in freeze or ())
        wanted &= parameter.requires_grad  # the user's model provider may have frozen it
        parameter.requires_grad_(wanted)
        trained += wanted
    if not world.sum(torch.tensor([trained], device=world.device)).item():
        flag = "--only-train-params-name-list" if only_train else "--freeze-params-name-list"
        raise UserError(
            f"{flag} leaves no parameter to train: check the patterns against Megatron's parameter names, such as "
            "decoder.layers.0.self_attention.linear_qkv.weight"
        )


def wrap_with_ddp(
    stages: Sequence[MegatronModule], settings: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Wrap the stages in Megatron's DDP, which sums their gradients, and set its hooks in their config."""
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
    """The optimizer of stages wrapped by `wrap_with_ddp`.

    With `is_stateless` it drops the moments after each update, so that every update is Adam's first.
    """

    def __init__(
        self, wrapped: Sequence[DistributedDataParallel], settings: OptimizerConfig, *, is_stateless: bool = False
    ) -> None:
        self.wrapped = list(wrapped)
        self.megatron = get_megatron_optimizer(settings, self.wrapped, use_gloo_process_groups=False)
        self._clip_grad = settings.clip_grad
        self._is_stateless = is_stateless

    def clip(self, device: torch.device) -> Tensor:
        """Clip the gradients, and return their global norm before clipping."""
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
        """Complete the parameter gather that an update leaves to the next pass, so that all weights are current."""
        for one in self.wrapped:
            if one.ddp_config.overlap_param_gather:
                one.start_param_sync(force_sync=True)

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers in which gradients are summed; they are zero after `drop_gradients`."""
        return [part.grad_data for one in self.wrapped for part in (*one.buffers, *one.expert_parallel_buffers)]

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of the optimizer's state, such as moments."""
        inner = [one.optimizer for one in self.megatron.chained_optimizers if not one.is_stub_optimizer]
        states = [value for one in inner for state in one.state.values() for value in state.values()]
        return [value for value in states if isinstance(value, Tensor)]

    def forget_state(self) -> None:
        for one in self.megatron.chained_optimizers:
            if not one.is_stub_optimizer:
                one.optimizer.state.clear()
                for group in one.optimizer.param_groups:
                    group.pop("step", None)
