"""FSDP2 backend: parameters, gradients and optimizer state sharded over the ranks.

Invariant: master weights, gradients after reduction and optimizer state are float32 for every compute dtype.

Scores are copied to the host asynchronously. With `--recompute-activations` a decoder layer keeps only its input for
the backward and is recomputed there. Invariant: recomputing changes no number. transformers recomputes layers only in
training mode, so the layer modules alone are put into it, and leave it while their function runs: neither dropout nor a
router's noise is ever active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from slime.config import Config
from slime.config.initial_weights import InitialWeights, adapter_base_path
from slime.errors import UserError
from slime.models.loading import persistent_buffers, split_fused_weights
from slime.models.lora import is_adapter
from slime.train.backend import (
    OPTIMIZER_STATE,
    POLICY,
    NamedTensor,
    ObjectiveInput,
    StepTotals,
    TokenScores,
    TrainBackend,
    choose_trainable,
)
from slime.train.backends.frozen import FrozenSets, ResidentTensors, ShardedModel
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.hf_export import HfExport
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.lora_sets import PolicyAdapter
from slime.train.backends.fsdp.optimizer import ParamGroup, make_optimizer
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import (
    gather_ahead,
    gather_full_tensor,
    gather_like,
    local_part,
    reshard,
    set_gradient_sync,
    shard,
    sharded_model,
    stays_gathered,
    total_norm,
)
from slime.train.backends.fsdp.state import (
    LocalPart,
    optimizer_tensors,
    parts_to_write,
    read_optimizer,
    read_parts,
    with_local_parts,
)
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.samples.micro_batch import MicroBatch, Objective
from slime.train.timers import RankProgress
from slime.train.topology import Topology


class AsyncHostCopies:
    """Asynchronous copies from the device to the host; tensors on a CPU are returned directly.

    Invariant: `wait` waits for the copies started before it and for nothing that was launched after the last of them.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> Tensor:
        """Start the copy and return its target, in float32; read it after `wait`."""
        if not tensor.is_cuda:
            return tensor.float()
        host = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._last = torch.cuda.Event()
        self._last.record()
        return host

    def wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()


def recompute_layers(model: PreTrainedModel) -> None:
    """Make the decoder layers recompute their activations in every backward."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --recompute-activations")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            module._gradient_checkpointing_func = partial(_recomputed, module)


def _recomputed(layer: nn.Module, function: Callable[..., object], *arguments: object) -> object:
    """Call a layer's function with checkpointing, with the layer's training mode off inside."""

    def evaluated(*inputs: object) -> object:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *arguments, use_reentrant=False, preserve_rng_state=False)


class FSDPBackend(TrainBackend[PackedModel]):
    """One model that is trained, its optimizer and its frozen sets: this rank's part of them."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        mesh: DeviceMesh,
        module: PackedModel,
        *,
        compute_dtype: torch.dtype,
        progress: RankProgress,
        load_frozen: Callable[[InitialWeights], PackedModel] | None,
        layers: LoraLayers | None = None,
        base: Path = Path(),
    ) -> None:
        self._mesh = mesh
        self.clip_grad = config.clip_grad
        self.module = module
        self._on_host = config.fsdp_cpu_offload
        model = module.model
        if config.share_prompts:
            module.check_prompt_sharing()

        def fuse(target: PreTrainedModel, dtype: torch.dtype) -> None:
            if config.fp8:
                check_float8(target, dtype, topology.device)
            if mesh.device_type == "cuda":
                fuse_layers(target, in_float8=config.fp8)

        def load(source: InitialWeights | None) -> ShardedModel[PackedModel]:
            """A frozen model, of the policy's shape and with weights of zero if there is no source."""
            assert load_frozen is not None, "a value model has no frozen sets"
            frozen = load_frozen(source or InitialWeights())
            if source is None:
                frozen.use_zero_sources()
            frozen.requires_grad_(False)
            fuse(frozen.model, frozen.model.dtype)
            shard(frozen, mesh, MixedPrecisionPolicy(), progress, on_host=self._on_host)
            return sharded_model(frozen)

        fuse(model, compute_dtype)
        if config.recompute_activations:
            recompute_layers(model)
        if layers is None:  # otherwise `put_adapter` has chosen what is trained
            names = "the model's parameter names"
            choose_trainable(dict(model.named_parameters()), config, topology.world, known=names)
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        self._has_whole = stays_gathered(module, mesh, on_host=self._on_host)
        self._gathers_ahead = False  # until FSDP has completed a step and created its streams
        shard(module, mesh, precision, progress, on_host=self._on_host)
        self.optimizer = make_optimizer(module.parameters(), config)
        policy = sharded_model(module)
        sets = policy, load, lambda: load(None)
        self._adapter: PolicyAdapter | None = None
        if layers is not None:
            base_of = partial(adapter_base_path, config)
            self._adapter = PolicyAdapter(*sets, layers, base=base, base_of=base_of, base_dtype=compute_dtype)
            self.adapter = self._adapter.info
        super().__init__(config, topology, progress, model.config, policy, self._adapter or FrozenSets(*sets))
        own = {name: tensor for name, tensor in module.placed.items() if layers is None or not is_adapter(name)}
        self.export = HfExport(
            {**own, **dict(persistent_buffers(model))},
            partial(split_fused_weights, model),
            rank=topology.world.rank,
            world_size=topology.world.size,
            adapter=self._adapter,
        )

    # passes

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        assert self._active is self._policy, "gradients are those of the policy"
        totals = StepTotals()
        each = self.progress.over(micro_batches, "update: micro-batch", len(micro_batches))
        for index, micro in enumerate(each):
            last = index == len(micro_batches) - 1
            set_gradient_sync(self.module, self._mesh, last=last, keeps=self._has_whole, on_host=self._on_host)
            values, entropies = self.module(micro.row, reads=reads, entropy=entropy, routing=micro.routing)
            outcome = objective(micro, values, entropies)
            outcome.loss.backward()
            totals.add(outcome)
        return totals

    @torch.no_grad()
    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: str = POLICY,
        entropy: bool = False,
        own_routing: bool = False,
    ) -> list[TokenScores]:
        found, arrivals = [], AsyncHostCopies()
        with self.using(weights):
            active = self._active.model
            for micro in self.progress.over(micro_batches, f"{weights}: micro-batch", len(micro_batches)):
                routing = None if own_routing else micro.routing
                values, entropies = active(micro.row, reads="log_probs", entropy=entropy, routing=routing)
                found.append(TokenScores(arrivals.send(values), arrivals.send(entropies) if entropy else None))
            reshard(active)
            if self._gathers_ahead and active is not self.module:
                gather_ahead(self.module)  # overlaps with the host's work on the scores
        arrivals.wait()
        return found

    # updates

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups

    def clip_gradients(self) -> Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = total_norm(gradients, self._mesh) if self._on_host else nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.clip_grad, norm)
        return norm

    def _apply_optimizer(self) -> None:
        self.optimizer.step()
        self._gathers_ahead = self._has_whole

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _forget_optimizer_state(self) -> None:
        self.optimizer.state.clear()

    # device memory

    def resident(self) -> Iterator[ResidentTensors]:
        own = self._policy.parts()
        for kind, trained in (("weights", True), ("weights that are not trained", False)):
            parts = [own[name] for name, one in self.module.placed.items() if one.requires_grad == trained]
            yield ResidentTensors(kind, parts, None if trained else 0)
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        yield ResidentTensors(OPTIMIZER_STATE, [local_part(tensor) for tensor in states if isinstance(tensor, Tensor)])
        yield from self.frozen.resident()

    # contents of a checkpoint

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        if self._adapter is not None and (adapter := self._adapter.placed(weights)) is not None:
            for name, like, part in adapter:
                yield name, gather_like(like, part.to(like.device))
            return
        tensors = self._saved() if weights == POLICY else self.frozen.model(weights).model.placed
        for name, tensor in tensors.items():
            yield name, gather_full_tensor(tensor.detach())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._saved().items()}

    def _parts_to_write(self, kind: str) -> Iterator[SavedPart]:
        return parts_to_write(kind, self._state(kind), rank=self.topology.world.rank)

    def _read_parts(self, kind: str, saved: SavedTensors) -> None:
        reading = f"reading a checkpoint, {kind}: tensor"
        if kind == OPTIMIZER:
            read_optimizer(saved, self.optimizer, self.progress.over(self.module.placed.items(), reading))
        else:
            read_parts(saved, self.progress.over(self._state(kind), reading))

    def _state(self, kind: str) -> Iterator[LocalPart]:
        """Tensors of one kind, with this rank's parts of them."""
        if kind == OPTIMIZER:
            return with_local_parts(optimizer_tensors(self.optimizer, self.module.placed))
        if kind == MODEL:
            return with_local_parts(self._saved().items())
        if self._adapter is not None and (adapter := self._adapter.placed(kind)) is not None:
            return adapter
        frozen = self.frozen.model(kind)
        parts = frozen.saved
        return ((name, like, parts[name]) for name, like in frozen.model.placed.items())

    def _saved(self) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint: all, or with LoRA the trained ones: the matrices, and a critic's head."""
        if self.adapter is not None:
            return {name: parameter for name, parameter in self.module.placed.items() if parameter.requires_grad}
        return {**self.module.placed, **dict(persistent_buffers(self.module.model))}

    # export

    def full_adapter(self) -> Iterator[NamedTensor]:
        return iter(()) if self._adapter is None else self._adapter.full_adapter()
