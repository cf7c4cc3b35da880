"""FSDP2: parameters, gradients and optimizer state sharded over the ranks.

Invariant: master weights, gradients after reduction and optimizer state are float32 whatever the compute dtype is; one
rank runs the same code as many, so the numbers do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from slime.config import Config
from slime.errors import UserError
from slime.train.backends.fsdp.optimizer import choose_trainable, make_optimizer, set_rates
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.protocol import NamedTensor
from slime.train.distributed import Ranks
from slime.train.progress import Progress
from slime.train.rates import Rates

MOMENTS = ("exp_avg", "exp_avg_sq")
COMPILE_MIN_PARAMETERS = 100_000_000  # below, half a minute of compiling costs more than it saves


class FSDPBackend:
    """One model that is trained, and its optimizer, on this rank."""

    def __init__(
        self, config: Config, ranks: Ranks, module: PackedModel, *, compute_dtype: torch.dtype, progress: Progress
    ) -> None:
        self.ranks = ranks
        self.progress = progress
        self.clip_grad = config.clip_grad
        self.module = module
        model = module.model
        self.model_config = model.config
        if config.recompute_activations:
            _enable_recompute(model)
        choose_trainable(model, freeze=config.freeze_params_name_list, only_train=config.only_train_params_name_list)
        shard(module, ranks, MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32))
        self.optimizer = make_optimizer(module.parameters(), config)
        self._parameters = dict(model.named_parameters())

    def begin_micro_batch(self, *, last: bool) -> None:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)

    def clip_gradients(self) -> torch.Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.clip_grad, norm)
        return norm

    def update(self, rates: Rates) -> None:
        set_rates(self.optimizer, rates)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def forget_optimizer_state(self) -> None:
        self.optimizer.state.clear()

    def full_parameters(self) -> Iterator[NamedTensor]:
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach())
        for name, buffer in persistent_buffers(self.module.model):
            yield name, buffer

    def full_optimizer_state(self) -> Iterator[NamedTensor]:
        for name, parameter in self._parameters.items():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            for moment in MOMENTS:
                yield f"{moment}/{name}", whole(state[moment])
            yield f"step/{name}", state["step"].reshape(1)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self.module.model)}

    def parameter_facts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tensors = [*self._parameters.items(), *persistent_buffers(self.module.model)]
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}

    def local_parameters(self) -> Iterator[NamedTensor]:
        for name, parameter in self._parameters.items():
            yield name, local_part(parameter.detach())
        yield from persistent_buffers(self.module.model)

    def gather_part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        like = self._parameters.get(name)
        if not isinstance(like, DTensor) or self.ranks.world_size == 1:
            return part
        placed = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return placed.full_tensor()

    def load_parameter(self, name: str, full: torch.Tensor) -> None:
        target = self._parameters.get(name)
        with torch.no_grad():
            if target is None:
                dict(persistent_buffers(self.module.model))[name].copy_(full)
            else:
                local_part(target).copy_(local_part(shard_like(target, full, self.ranks)))

    def load_optimizer_state(self, name: str, full: dict[str, torch.Tensor]) -> None:
        parameter = self._parameters[name]
        state = {moment: shard_like(parameter, full[moment], self.ranks) for moment in MOMENTS}
        state["step"] = full["step"].reshape(()).to(self.ranks.device)
        self.optimizer.state[parameter] = state


def shard_like(parameter: torch.Tensor, full: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of `full`, placed as `parameter` is."""
    placed = full.to(device=ranks.device, dtype=parameter.dtype)
    if not isinstance(parameter, DTensor):
        return placed
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; a collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _enable_recompute(model: PreTrainedModel) -> None:
    """Layers keep only their inputs and run again in backward; transformers wants train mode for it, so no dropout."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --recompute-activations")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def shard(packed: PackedModel, ranks: Ranks, precision: MixedPrecisionPolicy) -> None:
    """One group per decoder layer, the rest (embedding, last norm, head) at the root; shards go to the device."""
    layer_names = set(packed.model._no_split_modules or ())
    keep = ranks.world_size == 1
    num_parameters = sum(parameter.numel() for parameter in packed.parameters())
    worth_compiling = ranks.device.type == "cuda" and num_parameters >= COMPILE_MIN_PARAMETERS
    for module in list(packed.modules()):
        if type(module).__name__ in layer_names:
            if worth_compiling:  # fuses norms, rotary embedding and gating; all layers share the compiled code
                module.compile(dynamic=True)
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=not keep)
    fully_shard(packed, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def persistent_buffers(model: PreTrainedModel) -> list[NamedTensor]:
    names = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]
