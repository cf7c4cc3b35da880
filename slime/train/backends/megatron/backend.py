"""The Megatron-Core backend: matrices, layers, sequences and experts sharded across ranks.

Invariant: master weights, reduced gradients and optimizer state are float32 for every compute dtype. All names of
parameters are global: a layer or an expert has the same name on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.models.families.tp_sharding import Replicated
from slime.models.families.weight_map import ParameterEntry
from slime.train.backend import (
    OPTIMIZER_STATE,
    POLICY,
    NamedTensor,
    ObjectiveInput,
    Rates,
    StepTotals,
    TokenScores,
    TrainBackend,
    choose_trainable,
)
from slime.train.backends.frozen import FrozenSets, ResidentTensors, ShardedModel
from slime.train.backends.megatron.config import ddp_config, optimizer_config
from slime.train.backends.megatron.embedding_and_head import OUTPUT_WEIGHT
from slime.train.backends.megatron.hf_export import MegatronHfExport
from slime.train.backends.megatron.pipeline import StagedModel, broadcast_from_last_stage, run_passes
from slime.train.backends.megatron.plugin_hooks import MegatronHooks
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.backends.megatron.state import (
    find_masters,
    optimizer_parts,
    read_optimizer,
    read_weights,
    weight_parts,
)
from slime.train.backends.megatron.weights import ModelFolder, global_buffers, global_names
from slime.train.checkpoints.rank_files import MODEL, OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.samples.micro_batch import MicroBatch, Objective
from slime.train.timers import RankProgress

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

VALUE_HEAD = "lm_head.weight"
"""The name of a critic's output layer in a checkpoint."""
MAX_GATHERED_BYTES = 256 * 2**20
"""Maximum size of a bucket, in bytes, when every rank gathers all weights."""


class MegatronBackend(TrainBackend[StagedModel]):
    """A trained model, its optimizer and its frozen sets, on this rank.

    Invariant: the gradients are the sums of the passes. Clipping only scales them, so after a non-finite norm weights
    and moments are unchanged. With `--use-stateless-adam` the moments are dropped after each update, so that every
    update is Adam's first.
    """

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
        self.folder = folder
        self._hooks = hooks
        world = model.groups.topology.world
        parameters = global_names(model.stages)
        trainable = {name: one for name, one in parameters.items() if one.requires_grad}  # the provider may freeze some
        names = "Megatron's parameter names, such as decoder.layers.0.self_attention.linear_qkv.weight"
        choose_trainable(trainable, config, world, known=names)
        self._tensors: dict[str, Tensor] = {**parameters, **global_buffers(model.stages)}
        self._wrapped = wrap_with_ddp(model.stages, ddp_config(config, model.groups.layout))
        self.model = replace(model, wrapped=self._wrapped)
        settings = optimizer_config(config, compute_dtype=model.config.params_dtype)
        self.optimizer = get_megatron_optimizer(settings, self._wrapped, use_gloo_process_groups=False)
        self._clip_grad = settings.clip_grad
        self._is_stateless = config.use_stateless_adam
        policy = ShardedModel(self.model, self._gathered_tensors)
        frozen = FrozenSets(
            policy, lambda source: frozen_stages(load_frozen(source)), lambda: frozen_stages(like_policy())
        )
        super().__init__(config, model.groups.topology, progress, folder.config, policy, frozen)
        self._placement = build_shard_map(model, folder, self._tensors)
        self.export = MegatronHfExport(self._placement, world, self._gathered_tensors)
        self.masters = find_masters(self.optimizer, parameters, world.rank)
        self._has_gradients = False

    def _gathered_tensors(self) -> dict[str, Tensor]:
        """Complete the parameter gather that an update leaves to the next pass; returns the current weights."""
        for one in self._wrapped:
            if one.ddp_config.overlap_param_gather:
                one.start_param_sync(force_sync=True)
        return self._tensors

    # passes

    def begin_step(self, rollout_id: int, step_id: int, rates: Rates) -> None:
        self._hooks.before_step(rollout_id, step_id, self.model.wrapped, self.optimizer, rates)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> StepTotals:
        assert self._active is self._policy, "only the policy has gradients"
        assert not self._has_gradients, "gradients are summed over the ranks once per update"
        self._has_gradients = True
        totals = StepTotals()

        def finish(micro: MicroBatch, values: Tensor, entropies: Tensor) -> Tensor:
            outcome = objective(micro, values, entropies)
            totals.add(outcome)
            return outcome.loss

        self.progress.begin("update: micro-batch", len(micro_batches))
        run_passes(self.model, micro_batches, finish, self.progress, reads=reads, entropy=entropy, forward_only=False)
        return totals

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: str = POLICY,
        entropy: bool = False,
        own_routing: bool = False,
    ) -> list[TokenScores]:
        found: list[tuple[Tensor, Tensor]] = []

        def finish(_micro: MicroBatch, values: Tensor, entropies: Tensor) -> Tensor:
            found.append((values, entropies))
            return values.new_zeros(())

        with self.using(weights):
            model = self._active.model
            before = [stage.training for stage in model.stages]
            for stage in model.wrapped:
                stage.eval()  # layers apply dropout and router noise only in training mode
            try:
                self._hooks.before_log_probs(model.wrapped, weights)
                self.progress.begin(f"{weights}: micro-batch", len(micro_batches))
                routed = replace(model, routers=None) if own_routing else model
                with torch.no_grad():
                    run_passes(
                        routed,
                        micro_batches,
                        finish,
                        self.progress,
                        reads="log_probs",
                        entropy=entropy,
                        forward_only=True,
                    )
            finally:
                for stage, training in zip(model.wrapped, before, strict=True):
                    stage.train(training)
        counts = [sum(micro.lengths) for micro in micro_batches]
        values = broadcast_from_last_stage([one for one, _ in found], counts, self.groups)
        if not entropy:
            return [TokenScores(one) for one in values]
        entropies = broadcast_from_last_stage([one for _, one in found], counts, self.groups)
        return [TokenScores(one, other) for one, other in zip(values, entropies, strict=True)]

    # updates

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [one.optimizer for one in self.optimizer.chained_optimizers if not one.is_stub_optimizer]

    def clip_gradients(self) -> Tensor:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        for one in self.optimizer.chained_optimizers:
            parameters = [] if one.is_stub_optimizer else one.get_parameters()
            if parameters and self._clip_grad > 0:
                decoupled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, norm, decoupled)
        return torch.tensor(norm, device=self.topology.device)

    def _apply_optimizer(self) -> None:
        self.optimizer.step_with_ready_grads()
        if self._is_stateless:
            self._forget_optimizer_state()

    def drop_gradients(self) -> None:
        for one in self._wrapped:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._has_gradients = False

    def _forget_optimizer_state(self) -> None:
        for one in self._inner_optimizers:
            one.state.clear()
            for group in one.param_groups:
                group.pop("step", None)

    # device memory

    def resident(self) -> Iterator[ResidentTensors]:
        yield ResidentTensors("weights", list(self._policy.parts().values()))
        buffers = [part.grad_data for one in self._wrapped for part in (*one.buffers, *one.expert_parallel_buffers)]
        yield ResidentTensors("gradients", buffers, is_zero=True)
        mains = [master.main for master in self.masters.values() if master.main is not None]
        states = [value for one in self._inner_optimizers for state in one.state.values() for value in state.values()]
        yield ResidentTensors(OPTIMIZER_STATE, [*mains, *(value for value in states if isinstance(value, Tensor))])
        yield from self.frozen.resident()

    # checkpoints

    def tensors(self, weights: str = POLICY) -> Mapping[str, Tensor]:
        """Return this rank's part of the current weights of a set, by global name."""
        return self._policy.parts() if weights == POLICY else self.frozen.model(weights).parts()

    def full_parameters(self, weights: str = POLICY) -> Iterator[NamedTensor]:
        """Yield whole tensors under the names of the folder, on every rank."""
        export = MegatronHfExport(self._placement, self.topology.world, lambda: self.tensors(weights))
        for bucket in export.buckets(export.plan(torch.float32, MAX_GATHERED_BYTES)):
            yield from bucket.broadcast_tensors(self.topology.world)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self._placement.tensors}

    def _parts_to_write(self, kind: str) -> Iterator[SavedPart]:
        if kind == OPTIMIZER:
            return optimizer_parts(self._placement, self.masters)
        if kind == MODEL:
            return weight_parts(kind, self._placement, self.tensors().items(), self.masters)
        return weight_parts(kind, self._placement, self.frozen.model(kind).saved.items(), {})

    def _read_parts(self, kind: str, saved: SavedTensors) -> None:
        reading = f"reading a checkpoint, {kind}: tensor"
        if kind == OPTIMIZER:
            read_optimizer(saved, self._placement, self.progress.over(self.masters.items(), reading))
            return
        own = self.tensors() if kind == MODEL else self.frozen.model(kind).saved
        masters = self.masters if kind == MODEL else {}
        read_weights(saved, self._placement, self.progress.over(own.items(), reading), masters)


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


def frozen_stages(model: StagedModel) -> ShardedModel[StagedModel]:
    """Switch off the gradients and the training mode of a model's stages."""
    for stage in model.stages:
        stage.requires_grad_(False)
        stage.eval()
    tensors: dict[str, Tensor] = {**global_names(model.stages), **global_buffers(model.stages)}
    return ShardedModel(model, lambda: tensors)


def build_shard_map(model: StagedModel, folder: ModelFolder, own: Mapping[str, Tensor]) -> ShardMap:
    """Map the parts of a folder's tensors to ranks; a value head replaces the output layer. All ranks together."""
    entries, shapes = dict(folder.entries), {name: source.shape for name, source in folder.sources.items()}
    if model.head.output is None:  # a critic
        entries[OUTPUT_WEIGHT] = ParameterEntry(OUTPUT_WEIGHT, (VALUE_HEAD,), Replicated())
        shapes[VALUE_HEAD] = (1, int(folder.fields["hidden_size"]))
    groups = model.groups
    return ShardMap(groups.layout, groups.topology.world, entries.values(), shapes, own)
