"""The Megatron-Core backend: matrices, layers, sequences and experts sharded across ranks.

Invariant: master weights, reduced gradients and optimizer state are float32 for every compute dtype. All names of
parameters are global: a layer or an expert has the same name on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.models.families.tp_sharding import Replicated
from slime.models.families.weight_map import ParameterEntry
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
from slime.train.backends.hf_buckets import HfBucket, HfTensor, PreviousExport
from slime.train.backends.megatron.config import ddp_config, optimizer_config
from slime.train.backends.megatron.embedding_and_head import OUTPUT_WEIGHT, ValueHead
from slime.train.backends.megatron.fp32_params import find_masters
from slime.train.backends.megatron.hf_export import MegatronHfExport
from slime.train.backends.megatron.optimizer import StepOptimizer, choose_trainable, wrap_with_ddp
from slime.train.backends.megatron.pipeline import StagedModel, score_passes, train_passes
from slime.train.backends.megatron.plugin_hooks import MegatronHooks
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.backends.megatron.state import (
    FrozenStageSets,
    master_parts,
    optimizer_parts,
    read_optimizer,
    read_weights,
    weight_parts,
)
from slime.train.backends.megatron.weights import ModelFolder, global_buffers, global_names
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.timers import RankProgress

VALUE_HEAD = "lm_head.weight"
"""The name of a critic's output layer in a checkpoint."""
MAX_GATHERED_BYTES = 256 * 2**20
"""Maximum size of a bucket, in bytes, when every rank gathers all weights."""


class MegatronBackend:
    """A trained model, its optimizer and its frozen sets, on this rank."""

    adapter: TrainedAdapter | None = None

    def __init__(
        self,
        config: Config,
        model: StagedModel,
        folder: ModelFolder,
        *,
        progress: RankProgress,
        hooks: MegatronHooks,
        load_frozen: Callable[[InitialWeights], StagedModel],
        like_policy: Callable[[], StagedModel],
    ) -> None:
        self.groups = model.groups
        self.topology = model.groups.topology
        self.progress = progress
        self._hooks = hooks
        self.folder = folder
        self.model_config = folder.config
        self._parameters = global_names(model.stages)
        patterns = {"freeze": config.freeze_params_name_list, "only_train": config.only_train_params_name_list}
        choose_trainable(self._parameters, self.topology.world, **patterns)
        self._tensors: dict[str, Tensor] = {**self._parameters, **global_buffers(model.stages)}
        wrapped = wrap_with_ddp(model.stages, ddp_config(config, model.groups.layout))
        self.model = replace(model, wrapped=wrapped)
        settings = optimizer_config(config, compute_dtype=model.config.params_dtype)
        self.optimizer = StepOptimizer(wrapped, settings, is_stateless=config.use_stateless_adam)
        self.frozen = FrozenStageSets(self._tensors, load_frozen, like_policy)
        self._averages = config.ref_update_decay > 0
        self._placement = build_shard_map(model, folder, self._tensors)
        self.masters = find_masters(self.optimizer.megatron, self._parameters, self.topology.world.rank)
        self._active = self.model
        self._has_gradients = False
        self._before_update: Callable[[], None] = lambda: None

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        self._hooks.before_step(rollout_id, step_id, self.model.wrapped, self.optimizer.megatron, rates)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        assert self._active is self.model, "only the policy has gradients"
        assert not self._has_gradients, "gradients are summed over the ranks once per update"
        self._has_gradients = True
        return train_passes(self.model, micro_batches, objective, self.progress, reads=reads, entropy=entropy)

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: str = POLICY,
        entropy: bool = False,
        own_routing: bool = False,
    ) -> list[TokenScores]:
        with self.using(weights), self._evaluating():
            self._hooks.before_log_probs(self._active.wrapped, weights)
            return score_passes(
                self._active,
                micro_batches,
                self.progress,
                entropy=entropy,
                doing=weights,
                own_routing=own_routing,
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch off dropout and router noise, which layers apply only in training mode."""
        before = [stage.training for stage in self._active.stages]
        for stage in self._active.wrapped:
            stage.eval()
        try:
            yield
        finally:
            for stage, training in zip(self._active.wrapped, before, strict=True):
                stage.train(training)

    # updates

    def clip_gradients(self) -> Tensor:
        return self.optimizer.clip(self.topology.device)

    def update(self, rates: Rates) -> None:
        self._before_update()
        self.optimizer.update(rates)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.drop_gradients()
        self._has_gradients = False

    def reset_optimizer_state(self) -> None:
        self._before_update()
        self.optimizer.forget_state()

    # device memory

    def resident(self) -> Iterator[ResidentTensors]:
        self.optimizer.gather_parameters()
        yield ResidentTensors("weights", list(self._tensors.values()))
        yield ResidentTensors("gradients", self.optimizer.gradient_buffers(), is_zero=True)
        mains = [master.main for master in self.masters.values() if master.main is not None]
        yield ResidentTensors(OPTIMIZER_STATE, [*mains, *self.optimizer.state_tensors()])
        yield from self.frozen.resident()

    def register_update_hook(self, call: Callable[[], None]) -> None:
        self._before_update = call

    # frozen sets

    def load_frozen(self, name: str, source: InitialWeights) -> None:
        self.frozen.load(name, source)

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        self.optimizer.gather_parameters()
        self.frozen.snapshot(name, decay=decay, on_host=on_host)

    def forget(self, name: str) -> None:
        self.frozen.forget(name)

    def has(self, name: str) -> bool:
        return name in self.frozen

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        before = self._active
        self._active = self.model if name == POLICY else self.frozen.model(name).model
        try:
            yield
        finally:
            self._active = before

    # checkpoints

    def tensors(self, weights: str = POLICY) -> dict[str, Tensor]:
        """Return this rank's part of the current weights of a set, by global name."""
        if weights != POLICY:
            return self.frozen.model(weights).tensors
        self.optimizer.gather_parameters()
        return self._tensors

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        """Yield whole tensors under the names of the folder, on every rank."""
        export = MegatronHfExport(self._placement, self.topology.world, self.tensors(weights))
        for bucket in export.buckets(torch.float32, MAX_GATHERED_BYTES):
            yield from bucket.broadcast_tensors(self.topology.world)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self._placement.tensors}

    def state_parts(self, kinds: Sequence[str]) -> Iterator[SavedPart]:
        for kind in kinds:
            if kind == OPTIMIZER:
                yield from optimizer_parts(self._placement, self.masters)
            elif kind == MODEL:
                yield from master_parts(kind, self._placement, self.masters, self.tensors().items())
            else:
                yield from weight_parts(kind, self._placement, self.frozen.model(kind).kept.items())

    def load_parts(self, kind: str, saved: SavedTensors) -> None:
        reading = f"reading a checkpoint, {kind}: tensor"
        if kind == OPTIMIZER:
            read_optimizer(saved, self._placement, self.progress.over(self.masters.items(), reading))
        elif kind == MODEL:
            read_weights(saved, self._placement, self.progress.over(self.tensors().items(), reading), self.masters)
        else:
            frozen = self.frozen.model(kind)
            if self._averages:
                frozen.start_average()
            read_weights(saved, self._placement, self.progress.over(frozen.kept.items(), reading), {})
            frozen.round_average()

    # export

    def hf_plan(
        self, dtype: torch.dtype, max_bytes: int, *, owners: Sequence[int] | None = None
    ) -> list[tuple[HfTensor, ...]]:
        export = MegatronHfExport(self._placement, self.topology.world, self._tensors)
        return [load.tensors for load in export.plan(dtype, max_bytes, owners)]

    def hf_buckets(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        *,
        owners: Sequence[int] | None = None,
        earlier: PreviousExport | None = None,
    ) -> Iterator[HfBucket]:
        export = MegatronHfExport(self._placement, self.topology.world, self.tensors())
        yield from export.buckets(dtype, max_bytes, owners, earlier)

    def full_adapter(self) -> Iterator[NamedTensor]:
        return iter(())


def build_shard_map(model: StagedModel, folder: ModelFolder, own: Mapping[str, Tensor]) -> ShardMap:
    """Map the parts of a folder's tensors to ranks; a value head replaces the output layer. All ranks together."""
    entries, shapes = dict(folder.entries), {name: source.shape for name, source in folder.sources.items()}
    if isinstance(model.head, ValueHead):
        entries[OUTPUT_WEIGHT] = ParameterEntry(OUTPUT_WEIGHT, (VALUE_HEAD,), Replicated())
        shapes[VALUE_HEAD] = (1, int(folder.fields["hidden_size"]))
    groups = model.groups
    return ShardMap(groups.layout, groups.topology.world, entries.values(), shapes, own)
