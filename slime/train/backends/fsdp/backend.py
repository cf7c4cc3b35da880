"""FSDP2: parameters, gradients and optimizer state sharded over the ranks.

Invariant: master weights, gradients after reduction and optimizer state are float32 whatever the compute dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.config import Config
from slime.config.start import Start
from slime.errors import UserError
from slime.models.loading import as_in_folder, persistent_buffers
from slime.train.backends.fsdp.frozen import FrozenSets
from slime.train.backends.fsdp.optimizer import choose_trainable, make_optimizer, set_rates
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel
from slime.train.backends.fsdp.sharding import gather_like, local_part, shard, shard_like, whole
from slime.train.backends.protocol import POLICY, NamedTensor, Objective, Reads, Scores, Totals
from slime.train.progress import Progress
from slime.train.rates import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.topology import Topology

MOMENTS = ("exp_avg", "exp_avg_sq")


def _loads_nothing(source: Start) -> PolicyModel:
    raise RuntimeError("a value model has no frozen sets")


class FSDPBackend:
    """One model that is trained, its optimizer and its frozen sets, on this rank."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        mesh: DeviceMesh,
        module: PackedModel,
        *,
        compute_dtype: torch.dtype,
        progress: Progress,
        load_frozen: Callable[[Start], PolicyModel] = _loads_nothing,
    ) -> None:
        self.topology = topology
        self.progress = progress
        self.clip_grad = config.clip_grad
        self.module = module
        model = module.model
        self.model_config = model.config
        if config.recompute_activations:
            _enable_recompute(model)
        choose_trainable(model, freeze=config.freeze_params_name_list, only_train=config.only_train_params_name_list)
        shard(module, mesh, MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32))
        self.optimizer = make_optimizer(module.parameters(), config)
        self._parameters = dict(model.named_parameters())
        self._frozen = FrozenSets(module, mesh, load_frozen)
        self._active: PackedModel = module

    # passes

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: Reads = "log_probs",
        entropy: bool = False,
    ) -> Totals:
        assert isinstance(self.module, FSDPModule)
        assert self._active is self.module, "gradients are those of the policy"
        totals = Totals()
        each = self.progress.over(micro_batches, "update: micro-batch", len(micro_batches))
        for index, micro in enumerate(each):
            self.module.set_requires_gradient_sync(index == len(micro_batches) - 1)
            values, entropies = self.module(micro.row, reads=reads, entropy=entropy)
            outcome = objective(micro, values, entropies)
            outcome.loss.backward()
            totals.add(outcome)
        return totals

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], *, weights: str = POLICY, entropy: bool = False
    ) -> list[Scores]:
        with self.using(weights):
            each = self.progress.over(micro_batches, f"{weights}: micro-batch", len(micro_batches))
            found = [self._active(micro.row, reads="log_probs", entropy=entropy) for micro in each]
        return [Scores(values, entropies if entropy else None) for values, entropies in found]

    # updates

    def clip_gradients(self) -> Tensor:
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

    # frozen sets

    def load_frozen(self, name: str, source: Start) -> None:
        self._frozen.load(name, source)

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        self._frozen.snapshot(name, decay=decay, on_host=on_host)

    def forget(self, name: str) -> None:
        self._frozen.forget(name)

    def has(self, name: str) -> bool:
        return name in self._frozen

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        before = self._active
        self._active = self.module if name == POLICY else self._frozen.model(name).module
        try:
            yield
        finally:
            self._active = before

    # weights, whole and in parts

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        if weights != POLICY:
            yield from self._frozen.model(weights).full_parameters()
            return
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
        return {name: shape for name, (shape, _) in self.parameter_facts().items()}

    def parameter_facts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tensors = [*self._parameters.items(), *persistent_buffers(self.module.model)]
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}

    def local_parameters(self) -> Iterator[NamedTensor]:
        for name, parameter in self._parameters.items():
            yield name, local_part(parameter.detach())
        yield from persistent_buffers(self.module.model)

    def gather_part(self, name: str, part: Tensor) -> Tensor:
        return gather_like(self._parameters[name], part) if name in self._parameters else part

    def as_in_folder(self, members: dict[str, Tensor]) -> dict[str, Tensor]:
        return as_in_folder(self.module.model, members)

    def load_parameter(self, name: str, full: Tensor, weights: str = POLICY) -> None:
        if weights != POLICY:
            self._frozen.model(weights).load_parameter(name, full)
            return
        target = self._parameters.get(name)
        with torch.no_grad():
            if target is None:
                dict(persistent_buffers(self.module.model))[name].copy_(full)
            else:
                local_part(target).copy_(local_part(shard_like(target, full)))

    def load_optimizer_state(self, name: str, full: dict[str, Tensor]) -> None:
        parameter = self._parameters[name]
        state = {moment: shard_like(parameter, full[moment]) for moment in MOMENTS}
        state["step"] = full["step"].reshape(()).to(self.topology.device)
        self.optimizer.state[parameter] = state


def _enable_recompute(model: PreTrainedModel) -> None:
    """Layers keep only their inputs and run again in backward; transformers wants train mode for it, so no dropout."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --recompute-activations")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
