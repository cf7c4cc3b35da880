"""How much memory a training process of Megatron's takes, told from the model's shape and the layout alone.

A pipeline's processes are not alike: the first has the embedding and most micro-batches in flight, the last the output
layer and the logits. The estimate is that of the one that takes the most. Of each weight that it has, a process keeps
the weight in the compute precision, its gradient in float32, and of master copy and moments all or, with the
distributed optimizer, its share among those that see other samples.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.cluster.devices import resolve_dtype
from slime.config import Config
from slime.config.algorithm import has_critic, needs_reference
from slime.config.async_mode import versions_behind
from slime.config.batch import data_parallel_size, num_trainers
from slime.config.critic import critic_flags
from slime.config.initial_weights import find_reference, find_start
from slime.config.megatron_model_flags import read_model_config
from slime.config.parallelism import expert_tensor_size, uses_megatron, virtual_stages
from slime.driver.plan.memory import (
    CHUNK_LOGITS,
    MemoryEstimate,
    response_tokens,
    tokens_per_forward,
    trainer_memory,
)
from slime.errors import UserError
from slime.models.shape import BYTES_PER_ELEMENT, ModelShape, layer_bytes, layer_input_bytes, root_bytes

# Whether a model can be cut the way the flags say, and how that looks: the plan of Megatron's layouts.
#
# Invariant: what is refused here is refused with its arithmetic, the flag and the number of the model, before any
# process is started. What a layout may be whatever the model is, is checked with the flags (`slime.config.parallelism`).

Fields = Mapping[str, Any]
"""What a family says of a model, in Megatron's names."""

_DIVIDED: tuple[tuple[str, str, str], ...] = (
    ("num_attention_heads", "attention heads", "tensor_model_parallel_size"),
    ("ffn_hidden_size", "columns of the feed-forward layers", "tensor_model_parallel_size"),
    ("moe_shared_expert_intermediate_size", "columns of the shared experts", "tensor_model_parallel_size"),
    ("linear_num_key_heads", "key heads of the gated delta nets", "tensor_model_parallel_size"),
    ("linear_num_value_heads", "value heads of the gated delta nets", "tensor_model_parallel_size"),
    ("num_moe_experts", "experts", "expert_model_parallel_size"),
)
"""What a model has so many of, and which size must divide it."""


def check_layout(config: Config, *, device: str) -> None:
    """Raise a `UserError` unless Megatron has the layers of every model that is trained or compared with, and can cut
    them so."""
    for role, folder in _folders(config):
        flags = critic_flags(config) if role == "critic" else config
        fields = family_fields(folder)
        for sentence in _misfits(flags, fields, folder):
            raise UserError(sentence)
        stage_layers(flags, fields["num_layers"])
    if config.moe_token_dispatcher_type == "flex" and device != "cuda":
        raise UserError("--moe-token-dispatcher-type flex needs GPUs, and this run has none: use alltoall")


def family_fields(folder: str | Path) -> dict[str, Any]:
    """What Megatron is told about the model in a folder; a family that it has no layers for is refused."""
    from slime.models.families.family import family_of  # which needs torch, as no other part of a plan does

    facts = read_model_config(Path(folder) / "config.json")
    family = family_of(facts)
    if family.support.megatron is not None:
        raise UserError(f"--train-backend megatron cannot train {folder}: {family.support.megatron}; use fsdp")
    return dict(family.fields(facts))


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    yield "policy", str(find_start(config).hf_folder or config.hf_checkpoint)
    if needs_reference(config):
        yield "reference", str(find_reference(config).hf_folder or config.hf_checkpoint)
    if has_critic(config):
        yield "critic", critic_flags(config).hf_checkpoint
    if config.use_opd and config.opd_type == "trainer" and config.opd_teacher_load is not None:
        yield "teacher", config.opd_teacher_load


def _misfits(config: Config, fields: Fields, model: str) -> Iterator[str]:
    for name, what, size_name in _DIVIDED:
        count, size = fields.get(name), getattr(config, size_name)
        if name == "ffn_hidden_size" and _all_layers_have_experts(fields):
            continue
        if count is not None and count % size:
            yield _remainder(size_name, size, count, what, model)
    yield from _attention(config, fields, model)
    yield from _experts(config, fields, model)


def _all_layers_have_experts(fields: Fields) -> bool:
    frequency = fields.get("moe_layer_freq")
    return fields.get("num_moe_experts") is not None and isinstance(frequency, list) and all(frequency)


def _remainder(name: str, size: int, count: int, what: str, model: str) -> str:
    fitting = ", ".join(str(one) for one in range(1, min(count, 64) + 1) if count % one == 0)
    flag = "--" + name.replace("_", "-")
    return (
        f"{flag} {size} does not divide the {count} {what} of {model} ({count} / {size} leaves {count % size}): use "
        f"one of {fitting}"
    )


def _attention(config: Config, fields: Fields, model: str) -> Iterator[str]:
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    groups = fields.get("num_query_groups")
    if groups is not None and groups % tensor and tensor % groups:
        yield (
            f"--tensor-model-parallel-size {tensor} and the {groups} key and value heads of {model}: one must divide "
            "the other"
        )
    if context == 1:
        return
    if fields.get("window_size") is not None or fields.get("softmax_type", "vanilla") != "vanilla":
        yield (
            f"--context-parallel-size {context} needs full attention, and {model} has sliding windows or attention "
            "sinks: set it to 1"
        )
    if fields.get("experimental_attention_variant") == "dsa":
        yield f"--context-parallel-size {context} needs full attention, and that of {model} is sparse: set it to 1"
    keys = fields.get("linear_num_key_heads") or 0
    if fields.get("experimental_attention_variant") == "gated_delta_net" and keys % (tensor * context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context} = {tensor * context} does not "
            f"divide the {keys} key heads of the gated delta nets of {model}: lower one of them"
        )


def _experts(config: Config, fields: Fields, model: str) -> Iterator[str]:
    experts, expert_tensor = fields.get("num_moe_experts"), expert_tensor_size(config)
    if experts is None:
        if (size := config.expert_model_parallel_size) > 1:
            yield f"--expert-model-parallel-size {size}: {model} has no experts, set it to 1"
        return
    if fields.get("add_bias_linear") and expert_tensor > 1:
        yield (
            f"--expert-tensor-parallel-size {expert_tensor}: the experts of {model} have biases, with which Megatron "
            "cannot cut an expert: set it to 1"
        )
    width = fields.get("moe_ffn_hidden_size")
    if width is not None and width % expert_tensor:
        yield _remainder("expert_tensor_parallel_size", expert_tensor, width, "columns of an expert", model)
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} with the experts of {model} needs "
            "--sequence-parallel: Megatron trains them no other way"
        )


def stage_layers(config: Config, num_layers: int) -> list[int]:
    """Layers of every process of the pipeline, in order; a `UserError` where they cannot be shared so."""
    pipeline = config.pipeline_model_parallel_size
    if config.pipeline_model_parallel_layout is not None:
        return _layers_by_rank(config.pipeline_model_parallel_layout, pipeline, num_layers)
    first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
    ends = [given for given in (first, last) if given is not None]
    embedding = int(config.account_for_embedding_in_pipeline_split)
    loss = int(config.account_for_loss_in_pipeline_split)
    shared, takers = num_layers - sum(ends) + embedding + loss, pipeline - len(ends)
    counted = f"{num_layers} layers"
    counted += (
        "".join(f" - {given}" for given in ends) + " + 1 of the embedding" * embedding + " + 1 of the loss" * loss
    )
    if shared < 0 or (takers == 0) != (shared == 0) or (takers and shared % takers):
        remedy = "" if ends else ", or give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        yours = f"{counted} = {shared} cannot be shared evenly by {takers} processes"
        raise UserError(
            f"--pipeline-model-parallel-size {pipeline}: {yours} ({shared} / {takers or 1}): choose a divisor{remedy}"
        )
    each = shared // takers if takers else 0
    layers = [*([first] if first is not None else []), *[each] * takers, *([last] if last is not None else [])]
    layers[0] -= embedding
    layers[-1] -= loss
    _check_virtual(config, layers, num_layers, reserved=embedding + loss)
    return layers


def _check_virtual(config: Config, layers: Sequence[int], num_layers: int, *, reserved: int) -> None:
    per_stage = config.num_layers_per_virtual_pipeline_stage
    own = max(layers)
    if per_stage is not None and own % per_stage:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {own} layers that a process of "
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} has ({own} / {per_stage} leaves "
            f"{own % per_stage}): choose a divisor"
        )
    virtual = virtual_stages(config, num_layers)
    uneven = [count for count in layers if count % virtual] if virtual > 1 and not reserved else []
    if uneven:
        raise UserError(
            f"--num-virtual-stages-per-pipeline-rank {virtual} does not divide the {uneven[0]} layers of a process "
            f"({uneven[0]} / {virtual} leaves {uneven[0] % virtual}): choose a divisor"
        )


def layers_as_written(text: str) -> list[int]:
    """Decoder layers of each stage of a layout that is written out, as Megatron reads it: `Et*3|(tt|)*2tL`."""
    plain = text.replace(" ", "").replace(",", "")
    while (found := re.sub(r"\(([^()]*)\)\*(\d+)", lambda group: group[1] * int(group[2]), plain)) != plain:
        plain = found
    plain = re.sub(r"([A-Za-z])\*(\d+)", lambda one: one[1] * int(one[2]), plain)
    if re.search(r"[^EtmL|]", plain):
        raise UserError(
            f"--pipeline-model-parallel-layout {text} is not written as Megatron reads it: E, t and L for embedding, "
            "layer and loss, | between stages, t*3 and (tt|)*2 for repetitions"
        )
    return [stage.count("t") for stage in plain.split("|")]


def _layers_by_rank(text: str, pipeline: int, num_layers: int) -> list[int]:
    stages = layers_as_written(text)
    if len(stages) % pipeline:
        raise UserError(
            f"--pipeline-model-parallel-layout {text} has {len(stages)} stages, which --pipeline-model-parallel-size "
            f"{pipeline} does not divide"
        )
    if sum(stages) != num_layers:
        raise UserError(
            f"--pipeline-model-parallel-layout {text} has {sum(stages)} layers, but the model has {num_layers}"
        )
    return [sum(stages[rank::pipeline]) for rank in range(pipeline)]


def layout_in_words(config: Config, fields: Fields) -> list[tuple[str, str]]:
    """The plan's rows about how the trainers share the model."""
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context, data = config.context_parallel_size, data_parallel_size(config)
    sequence = " with sequence parallelism" if config.sequence_parallel and tensor > 1 else ""
    rows = [
        (
            "layout",
            f"TP {tensor}{sequence} x PP {pipeline} x CP {context} x DP {data} = {num_trainers(config)} trainers",
        )
    ]
    if pipeline > 1:
        layers = stage_layers(config, fields["num_layers"])
        virtual = virtual_stages(config, fields["num_layers"])
        interleaved = f", in {virtual} interleaved stages each" if virtual > 1 else ""
        rows.append(("pipeline", f"{' + '.join(map(str, layers))} layers{interleaved}"))
    if fields.get("num_moe_experts"):
        expert, expert_tensor = config.expert_model_parallel_size, expert_tensor_size(config)
        copies = num_trainers(config) // (expert * expert_tensor * pipeline)
        each = fields["num_moe_experts"] // expert
        rows.append(("experts", f"EP {expert} x expert TP {expert_tensor} x DP {copies}, {each} a trainer and layer"))
    return rows


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
