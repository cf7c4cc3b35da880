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
from slime.models.loading import load_causal_lm
from slime.train.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.protocol import NamedTensor
from slime.train.distributed import Ranks
from slime.train.optimizer import choose_trainable, make_adamw
from slime.train.policy import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
COMPILE_MIN_PARAMETERS = 100_000_000  # below, half a minute of compiling costs more than it saves


class FSDPBackend:
    """Policy, optimizer and perhaps a frozen reference on this rank."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        compute_dtype: torch.dtype,
        model_folder: str,
        reference_folder: str | None,
    ) -> None:
        register_packed_attention()
        self.ranks = ranks
        self.clip_grad = config.clip_grad
        model = _load(config, model_folder, torch.float32)
        self.model_config = model.config
        if config.recompute_activations:
            _enable_recompute(model)
        choose_trainable(model, freeze=config.freeze_params_name_list, only_train=config.only_train_params_name_list)
        self.policy = _wrap(config, model)
        _shard(self.policy, ranks, MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32))
        self.optimizer = make_adamw(self.policy.parameters(), config)
        self.reference: PolicyModel | None = None
        if reference_folder is not None:
            frozen = _load(config, reference_folder, compute_dtype).requires_grad_(False)
            self.reference = _wrap(config, frozen)
            _shard(self.reference, ranks, MixedPrecisionPolicy())
        self._parameters = dict(model.named_parameters())

    def begin_micro_batch(self, *, last: bool) -> None:
        assert isinstance(self.policy, FSDPModule)
        self.policy.set_requires_gradient_sync(last)

    def clip_gradients(self) -> torch.Tensor:
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(self.policy.parameters(), self.clip_grad, norm)
        return norm

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def full_parameters(self) -> Iterator[NamedTensor]:
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach())
        for name, buffer in _persistent_buffers(self.policy.model):
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
        return shapes | {name: tuple(buffer.shape) for name, buffer in _persistent_buffers(self.policy.model)}

    def load_parameter(self, name: str, full: torch.Tensor) -> None:
        target = self._parameters.get(name)
        with torch.no_grad():
            if target is None:
                dict(_persistent_buffers(self.policy.model))[name].copy_(full)
            else:
                _local(target).copy_(_local(self._shard_like(target, full)))

    def load_optimizer_state(self, name: str, full: dict[str, torch.Tensor]) -> None:
        parameter = self._parameters[name]
        state = {moment: self._shard_like(parameter, full[moment]) for moment in MOMENTS}
        state["step"] = full["step"].reshape(()).to(self.ranks.device)
        self.optimizer.state[parameter] = state

    def _shard_like(self, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        placed = full.to(device=self.ranks.device, dtype=parameter.dtype)
        if not isinstance(parameter, DTensor):
            return placed
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; a collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _load(config: Config, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    return load_causal_lm(
        folder,
        dtype=dtype,
        device="cpu",
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=config.trust_remote_code,
    )


def _wrap(config: Config, model: PreTrainedModel) -> PolicyModel:
    return PolicyModel(model, temperature=config.rollout_temperature, chunk_rows=config.log_probs_chunk_size)


def _enable_recompute(model: PreTrainedModel) -> None:
    """Layers keep only their inputs and run again in backward; transformers wants train mode for it, so no dropout."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --recompute-activations")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()


def _shard(policy: PolicyModel, ranks: Ranks, precision: MixedPrecisionPolicy) -> None:
    """One group per decoder layer, the rest (embedding, last norm, head) at the root; shards go to the device."""
    layer_names = set(policy.model._no_split_modules or ())
    keep = ranks.world_size == 1
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    worth_compiling = ranks.device.type == "cuda" and num_parameters >= COMPILE_MIN_PARAMETERS
    for module in list(policy.modules()):
        if type(module).__name__ in layer_names:
            if worth_compiling:  # fuses norms, rotary embedding and gating; all layers share the compiled code
                module.compile(dynamic=True)
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=not keep)
    fully_shard(policy, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _persistent_buffers(model: PreTrainedModel) -> list[NamedTensor]:
    names = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]
