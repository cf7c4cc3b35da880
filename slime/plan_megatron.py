"""How much memory a training process of Megatron's takes, told from the model's shape and the layout alone.

A pipeline's processes are not alike: the first has the embedding and most micro-batches in flight, the last the output
layer and the logits. The estimate is that of the one that takes the most. Of each weight that it has, a process keeps
the weight in the compute precision, its gradient in float32, and of master copy and moments all or, with the
distributed optimizer, its share among those that see other samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime.cluster.precision import resolve_dtype
from slime.config import Config
from slime.config.algorithm import has_critic, needs_reference
from slime.config.asynchronous import versions_behind
from slime.config.batch import data_parallel_size, num_trainers
from slime.config.layout import expert_tensor_size, uses_megatron, virtual_stages
from slime.models.activations import layer_bytes, layer_input_bytes, root_bytes
from slime.models.shape import BYTES_PER_ELEMENT, ModelShape
from slime.plan_layout import family_fields, stage_layers
from slime.plan_memory import CHUNK_LOGITS, MemoryEstimate, response_tokens, tokens_per_forward, trainer_memory

_MASTER = 4
_MOMENTS = 8


def planned_trainer(config: Config, shape: ModelShape, *, device: str, trainers: int) -> MemoryEstimate:
    """One training process of the backend that the flags ask for; `trainers` share a copy of the model with FSDP."""
    if not uses_megatron(config):
        return trainer_memory(config, shape, device=device, trainers=trainers)
    return megatron_memory(config, shape, family_fields(config.hf_checkpoint), device=device)


def megatron_memory(config: Config, shape: ModelShape, fields: Mapping[str, Any], *, device: str) -> MemoryEstimate:
    """The process of the pipeline that takes the most; its place is said."""
    pipeline = config.pipeline_model_parallel_size
    step = _Step.of(config, shape, fields, device=device)
    found = {rank: step.parts(config, rank, device) for rank in range(pipeline)}
    most = max(found, key=lambda rank: sum(found[rank].values()))
    parts = {name: size for name, size in found[most].items() if size}
    return MemoryEstimate(parts, f"process {most + 1} of {pipeline} of the pipeline" if pipeline > 1 else "")


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one process of the pipeline has: elements of weights by whom they are shared with."""

    dense: int
    """Shared by tensor-parallel processes."""
    experts: int
    """Shared by expert-parallel and expert-tensor-parallel ones."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


def local_weights(config: Config, shape: ModelShape, fields: Mapping[str, Any], rank: int) -> Stage:
    """Elements of the weights that process `rank` of the pipeline has; small tensors that are not cut count as cut."""
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    hidden, num_layers = shape.hidden_size or 0, fields["num_layers"]
    sparse = fields.get("moe_layer_freq") if fields.get("num_moe_experts") else None
    sparse = sparse if isinstance(sparse, list) else [int(sparse is not None)] * num_layers
    owned = _layers_of(config, num_layers, rank)
    with_experts = sum(sparse[layer] for layer in owned)
    expert = 3 * hidden * (shape.expert_ffn_size or 0) * (shape.num_experts or 0)
    total, root = shape.num_parameters or 0, shape.root_parameters or 0
    narrow = (shape.attention_weights_per_layer or 0) + 3 * hidden * (shape.ffn_size or 0)
    if not any(sparse) or all(sparse):
        other = (total - root) // num_layers - (expert if any(sparse) else 0)
        dense = len(owned) * other
    else:
        layers = sum(sparse)
        other = (total - root - (num_layers - layers) * narrow) // layers - expert
        dense = with_experts * other + (len(owned) - with_experts) * narrow
    multiple = config.make_vocab_size_divisible_by * tensor
    vocabulary = -(-(shape.vocab_size or 0) // multiple) * multiple * hidden
    first, last = rank == 0, rank == pipeline - 1
    own_head = last and not (first and shape.tied_embeddings)
    dense += vocabulary * (int(first) + int(own_head))
    shared = expert_tensor_size(config) * config.expert_model_parallel_size
    return Stage(-(-dense // tensor), -(-with_experts * expert // shared))


def _layers_of(config: Config, num_layers: int, rank: int) -> list[int]:
    """Numbers of the layers of a process of the pipeline; of one written out, as many, from where its share begins."""
    counts, virtual = stage_layers(config, num_layers), virtual_stages(config, num_layers)
    if virtual == 1 or config.pipeline_model_parallel_layout is not None:
        begin = sum(counts[:rank])
        return list(range(begin, begin + counts[rank]))
    each = [count // virtual for count in counts]
    begins = [part * sum(each) + sum(each[:rank]) for part in range(virtual)]
    return [layer for begin in begins for layer in range(begin, begin + each[rank])]


@dataclasses.dataclass(frozen=True)
class _Step:
    shape: ModelShape
    fields: Mapping[str, Any]
    compute: int
    tokens: int
    layer: int
    """Bytes that one layer keeps of a micro-batch."""
    inputs: int
    """Bytes of the input of a layer."""
    root: int
    chunk: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape, fields: Mapping[str, Any], *, device: str) -> _Step:
        dtype, on_gpu = resolve_dtype(config.dtype, device, shape.num_parameters), device == "cuda"
        tokens, tensor = tokens_per_forward(config), config.tensor_model_parallel_size
        size = BYTES_PER_ELEMENT[dtype]
        kept = layer_bytes(shape, dtype=dtype, on_gpu=on_gpu) or 0
        whole = shape.norms_per_layer * (4 + 2 * size) * (shape.hidden_size or 0)  # what norms keep of every token
        cut = config.sequence_parallel and tensor > 1
        share = -(-kept // tensor) if cut else whole + -(-(kept - whole) // tensor)
        inputs = layer_input_bytes(shape, dtype=dtype) or 0
        shared_inputs = tensor if cut or config.distribute_saved_activations else 1
        vocab = -(-(shape.vocab_size or 0) // tensor)
        rows = config.log_probs_chunk_size
        if rows <= 0:
            rows = CHUNK_LOGITS["cuda" if on_gpu else "cpu"] // (vocab or 1)
        if config.loss_type == "custom_loss":
            rows = tokens * config.context_parallel_size
        return cls(
            shape=shape,
            fields=fields,
            compute=size,
            tokens=tokens,
            layer=tokens * share,
            inputs=-(-tokens * inputs // shared_inputs),
            root=tokens * (root_bytes(shape, dtype=dtype) or 0),
            chunk=4 * min(rows, response_tokens(config) * config.context_parallel_size) * vocab,
        )

    def parts(self, config: Config, rank: int, device: str) -> dict[str, int]:
        """Bytes by purpose of process `rank` of the pipeline in the backward of a step that is not the first."""
        weights = local_weights(config, self.shape, self.fields, rank)
        state = self._state(config, weights)
        frozen = self.compute * weights.total
        parts = {"weights": frozen, "gradients": _MASTER * weights.total, "optimizer": state}
        if has_critic(config):
            parts["critic"] = frozen + _MASTER * weights.total + state
        if needs_reference(config):
            parts["reference"] = frozen
            if config.ref_update_decay:
                parts["average of the reference"] = _MASTER * weights.total
        if config.keep_old_actor:
            behind = versions_behind(config)
            parts["old policy"] = frozen * (1 + (behind + 1 if behind and device != "cuda" else 0))
        if config.use_opd and config.opd_type == "trainer":
            parts["teacher (if it is as large)"] = frozen
        parts["activations"] = self._activations(config, rank)
        if rank == config.pipeline_model_parallel_size - 1:
            parts["logits"] = 3 * self.chunk
        return parts

    def _state(self, config: Config, weights: Stage) -> int:
        """Master weights and moments; in float32 a weight is its own master."""
        each = _MOMENTS + (_MASTER if self.compute < _MASTER else 0)
        if not config.use_distributed_optimizer:
            return each * weights.total
        sharers = data_parallel_size(config) * config.context_parallel_size
        experts = config.expert_model_parallel_size * expert_tensor_size(config) * config.pipeline_model_parallel_size
        expert_sharers = max(num_trainers(config) // experts, 1)
        return each * (-(-weights.dense // sharers) + -(-weights.experts // expert_sharers))

    def _activations(self, config: Config, rank: int) -> int:
        """What the micro-batches in flight keep, and what one of them computes once more."""
        num_layers = self.fields["num_layers"]
        layers, virtual = stage_layers(config, num_layers)[rank], virtual_stages(config, num_layers)
        kept, again = self._kept(config, layers)
        flight = self._in_flight(config, rank, virtual)
        return int(kept * flight) + again + (self.root if rank == config.pipeline_model_parallel_size - 1 else 0)

    def _kept(self, config: Config, layers: int) -> tuple[int, int]:
        """Bytes of a micro-batch in all layers of a process, and of those that are recomputed at once."""
        if config.recompute_granularity != "full":
            return layers * self.layer, 0
        number = config.recompute_num_layers or 1
        if config.recompute_method == "block":
            again = min(number, layers)
            return again * self.inputs + (layers - again) * self.layer, self.layer
        return -(-layers // number) * self.inputs, min(number, layers) * self.layer

    def _in_flight(self, config: Config, rank: int, virtual: int) -> float:
        """Micro-batches whose activations are there at once, those of some of the stages as parts of one."""
        pipeline = config.pipeline_model_parallel_size
        if pipeline == 1:
            return 1.0
        own = config.global_batch_size // data_parallel_size(config)
        own = max(1, own if config.use_dynamic_batch_size else own // (config.micro_batch_size or 1))
        if virtual == 1:
            return float(min(pipeline - rank, own))
        group = config.microbatch_group_size_per_virtual_pipeline_stage or pipeline
        warmup = 2 * (pipeline - rank - 1) + (virtual - 1) * group
        return min(warmup + 1, own * virtual) / virtual
