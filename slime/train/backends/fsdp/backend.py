"""FSDP2 backend: parameters, gradients and optimizer state sharded over the ranks.

Invariant: master weights, gradients after reduction and optimizer state are float32 for every compute dtype.

Scores are copied to the host asynchronously. With `--recompute-activations` a decoder layer keeps only its input for
the backward and is recomputed there. Invariant: recomputing changes no number. transformers recomputes layers only in
training mode, so the layer modules alone are put into it, and leave it while their function runs: neither dropout nor a
router's noise is ever active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    Objective,
    ObjectiveInput,
    ResidentTensors,
    StepTotals,
    TokenScores,
    TrainedAdapter,
)
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.hf_export import HfExport
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.lora_sets import AdaptedModel
from slime.train.backends.fsdp.optimizer import choose_trainable, make_optimizer, set_rates
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel
from slime.train.backends.fsdp.sharding import (
    gather_ahead,
    gather_full_tensor,
    local_part,
    part_on_device,
    reshard,
    set_gradient_sync,
    shard,
    stays_gathered,
    total_norm,
)
from slime.train.backends.fsdp.state import (
    LocalPart,
    ShardedFrozenSets,
    optimizer_tensors,
    parts_to_write,
    read_optimizer,
    read_parts,
    with_local_parts,
)
from slime.train.backends.hf_buckets import HfBucket, HfTensor, PreviousExport
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch
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


class FSDPBackend:
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
        load_frozen: Callable[[InitialWeights], PolicyModel],
        layers: LoraLayers | None = None,
        base: Path = Path(),
    ) -> None:
        self.topology = topology
        self.progress = progress
        self._mesh = mesh
        self.clip_grad = config.clip_grad
        self._averages = config.ref_update_decay > 0
        self.module = module
        model = module.model
        self.model_config = model.config
        if config.share_prompts:
            module.check_prompt_sharing()
        if config.fp8:
            check_float8(model, compute_dtype, topology.device)
        if mesh.device_type == "cuda":
            fuse_layers(model, in_float8=config.fp8)
        if config.recompute_activations:
            recompute_layers(model)
        if layers is None:  # otherwise `put_adapter` has chosen what is trained
            patterns = {"freeze": config.freeze_params_name_list, "only_train": config.only_train_params_name_list}
            choose_trainable(model, **patterns)
        self._on_host = config.fsdp_cpu_offload
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        self._has_whole = stays_gathered(module, mesh, on_host=self._on_host)
        self._gathers_ahead = False  # until FSDP has completed a step and created its streams
        shard(module, mesh, precision, progress, on_host=self._on_host)
        self.optimizer = make_optimizer(module.parameters(), config)
        self._parameters = dict(model.named_parameters())
        self._frozen = ShardedFrozenSets(
            module, mesh, load_frozen, progress, on_host=self._on_host, in_float8=config.fp8
        )
        self._base_of = partial(adapter_base_path, config)
        self._adapted: AdaptedModel | None = None
        self.adapter: TrainedAdapter | None = None
        if layers is not None:
            self._adapted = AdaptedModel(module, layers, base=base, base_dtype=compute_dtype)
            self.adapter = self._adapted.info
        self._active: PackedModel = module
        self._before_update: Callable[[], None] = lambda: None
        own = self._parameters if self._adapted is None else self._adapted.leaving
        self._leaves: dict[str, Tensor] = {**own, **dict(persistent_buffers(model))}
        self._export = HfExport(
            self._leaves,
            partial(split_fused_weights, model),
            rank=topology.world.rank,
            world_size=topology.world.size,
            value=self._leaving,
        )

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        pass  # this backend has no user hooks

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        assert self._active is self.module, "gradients are those of the policy"
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
            for micro in self.progress.over(micro_batches, f"{weights}: micro-batch", len(micro_batches)):
                routing = None if own_routing else micro.routing
                values, entropies = self._active(micro.row, reads="log_probs", entropy=entropy, routing=routing)
                found.append(TokenScores(arrivals.send(values), arrivals.send(entropies) if entropy else None))
            reshard(self._active)
            if self._gathers_ahead and self._active is not self.module:
                gather_ahead(self.module)  # overlaps with the host's work on the scores
        arrivals.wait()
        return found

    # updates

    def clip_gradients(self) -> Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = total_norm(gradients, self._mesh) if self._on_host else nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.clip_grad, norm)
        return norm

    def update(self, rates: Rates) -> None:
        self._before_update()
        set_rates(self.optimizer, rates)
        self.optimizer.step()
        self._gathers_ahead = self._has_whole
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def reset_optimizer_state(self) -> None:
        self._before_update()
        self.optimizer.state.clear()

    # device memory

    def resident(self) -> Iterator[ResidentTensors]:
        reshard(self.module)
        own = list(self._parameters.values())
        for kind, trained in (("weights", True), ("weights that are not trained", False)):
            parts = [local_part(one.detach()) for one in own if one.requires_grad == trained]
            yield ResidentTensors(kind, parts, None if trained else 0)
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        yield ResidentTensors(OPTIMIZER_STATE, [local_part(tensor) for tensor in states if isinstance(tensor, Tensor)])
        yield from self._frozen.resident()

    def register_update_hook(self, call: Callable[[], None]) -> None:
        self._before_update = call

    # frozen sets

    def load_frozen(self, name: str, source: InitialWeights) -> None:
        if self._adapted is not None and self._base_of(source) == self._adapted.info.base:
            self._adapted.sets.add_base(name)
        else:
            self._frozen.load(name, source)

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        if self._adapted is None:
            self._frozen.snapshot(name, decay=decay, on_host=on_host)
            return
        assert decay == 0.0, "the average of two adapters has another rank"
        self._frozen.forget(name)
        self._adapted.sets.snapshot(name, on_host=on_host)

    def forget(self, name: str) -> None:
        self._frozen.forget(name)
        if self._adapted is not None:
            self._adapted.sets.forget(name)

    def has(self, name: str) -> bool:
        return name in self._frozen or (self._adapted is not None and name in self._adapted.sets)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        if self._adapted is not None and name in self._adapted.sets:
            with self._adapted.sets.using(name):
                yield
            return
        before = self._active
        self._active = self.module if name == POLICY else self._frozen.model(name).module
        try:
            yield
        finally:
            self._active = before

    # contents of a checkpoint

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        if self._adapted is not None and weights in self._adapted.sets:
            yield from self._adapted.sets.full_parameters(weights)
        elif weights != POLICY:
            yield from self._frozen.model(weights).full_parameters()
        else:
            for name, tensor in self._saved().items():
                yield name, gather_full_tensor(tensor.detach())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._saved().items()}

    def state_parts(self, kinds: Sequence[str]) -> Iterator[SavedPart]:
        for kind in kinds:
            yield from parts_to_write(kind, self._state(kind), rank=self.topology.world.rank)

    def load_parts(self, kind: str, saved: SavedTensors) -> None:
        if kind == OPTIMIZER:
            parameters = self.progress.over(self._parameters.items(), "reading the optimizer: parameter")
            read_optimizer(saved, self.optimizer, parameters)
            return
        if kind != MODEL and self._adapted is not None and any(map(is_adapter, saved.names)):
            self._frozen.forget(kind)  # it was loaded as a separate model; in the checkpoint it is an adapter
            self._adapted.sets.snapshot(kind, on_host=False)
        elif kind != MODEL:
            frozen = self._frozen.model(kind)
            reshard(frozen.module)
            if self._averages:
                frozen.start_average()
        read_parts(saved, self.progress.over(self._state(kind), f"reading a checkpoint, {kind}: tensor"))
        if kind in self._frozen:
            self._frozen.model(kind).round_average()

    def _state(self, kind: str) -> Iterator[LocalPart]:
        """Tensors of one kind, with this rank's parts of them."""
        if kind == OPTIMIZER:
            return with_local_parts(optimizer_tensors(self.optimizer, self._parameters))
        if kind == MODEL:
            return with_local_parts(self._saved().items())
        if self._adapted is not None and kind in self._adapted.sets:
            return self._adapted.sets.placed(kind)
        return self._frozen.model(kind).state()

    def _saved(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        if self._adapted is not None:
            return self._adapted.trained
        return {**self._parameters, **dict(persistent_buffers(self.module.model))}

    # export

    def hf_plan(
        self, dtype: torch.dtype, max_bytes: int, *, owners: Sequence[int] | None = None
    ) -> list[tuple[HfTensor, ...]]:
        return [load.tensors for load in self._export.plan(dtype, max_bytes, owners)]

    def hf_buckets(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        owners: Sequence[int] | None = None,
        earlier: PreviousExport | None = None,  # unused: shards are small here, and owners compare the tensors
    ) -> Iterator[HfBucket]:
        with nullcontext() if self._adapted is None else self._adapted.gathered():
            yield from self._export.buckets(dtype, max_bytes, owners)

    def full_adapter(self) -> Iterator[NamedTensor]:
        if self._adapted is not None:
            yield from self._adapted.full_adapter()

    def _leaving(self, name: str) -> Tensor:
        """This rank's rows of a parameter, with the adapter merged; a buffer unchanged."""
        if self._adapted is not None and name in self._parameters:
            return self._adapted.rows(name)
        return part_on_device(self._leaves[name]).detach()
