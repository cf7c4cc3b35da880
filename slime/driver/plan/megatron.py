"""Checks of Megatron's parallel layout, and estimates of the memory of its training processes.

Invariant: a layout that does not fit the model is refused with its arithmetic, the flag and the number of the model,
before any process is started. Checks that do not depend on the model are made with the flags
(`slime.config.parallelism`).

The memory is estimated from the shape of the model and the layout alone. The processes of a pipeline differ: the first
has the embedding and most micro-batches in flight, the last the output layer and the logits. The estimate is that of
the process that needs the most. Of each weight that it holds, a process keeps the weight in the compute precision and
its gradient in float32; of master copy and moments it keeps all or, with the distributed optimizer, its share among the
processes that see other samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from slime.cluster.devices import resolve_dtype
from slime.config import Config
from slime.config.algorithm import has_critic, needs_reference
from slime.config.batch import data_parallel_size, num_trainers
from slime.config.critic import critic_flags
from slime.config.initial_weights import find_initial_weights, find_reference_weights
from slime.config.model_folder import read_model_config
from slime.config.parallelism import expert_tensor_size, parse_pipeline_layout, uses_megatron, virtual_stages
from slime.driver.plan.memory import MemoryEstimate, logit_bytes, other_models, tokens_per_forward, trainer_memory
from slime.errors import UserError
from slime.models.shape import BYTES_PER_ELEMENT, ModelShape, layer_bytes, layer_input_bytes, root_bytes
from slime.storage.json_types import JsonMapping, JsonObject

Fields = JsonMapping
"""Configuration of a model in Megatron's names, as its family gives it."""

_DIVISIBLE_COUNTS: tuple[tuple[str, str, str], ...] = (
    ("num_attention_heads", "attention heads", "tensor_model_parallel_size"),
    ("ffn_hidden_size", "columns of the feed-forward layers", "tensor_model_parallel_size"),
    ("moe_shared_expert_intermediate_size", "columns of the shared experts", "tensor_model_parallel_size"),
    ("linear_num_key_heads", "key heads of the gated delta nets", "tensor_model_parallel_size"),
    ("linear_num_value_heads", "value heads of the gated delta nets", "tensor_model_parallel_size"),
    ("num_moe_experts", "experts", "expert_model_parallel_size"),
)
"""Counts of a model: the field, its name in messages, and the parallel size that must divide it."""
_MASTER = 4  # bytes of a float32 master weight or gradient
_MOMENTS = 8  # bytes of the two moments of a weight


def check_layout(config: Config, *, device: str) -> None:
    """Raise a `UserError` unless Megatron supports every model that the trainers run, and the layout fits it."""
    for role, folder in _folders(config):
        flags = critic_flags(config) if role == "critic" else config
        fields = family_fields(folder)
        for sentence in _layout_errors(flags, fields, folder):
            raise UserError(sentence)
        stage_layers(flags, fields["num_layers"])
    if config.moe_token_dispatcher_type == "flex" and device != "cuda":
        raise UserError("--moe-token-dispatcher-type flex needs GPUs, and this run has none: use alltoall")


def family_fields(folder: str | Path) -> JsonObject:
    """Return Megatron's configuration fields of the model in a folder; refuse a family without Megatron layers."""
    from slime.models.families.family import family_of  # the only part of a plan that needs torch

    facts = read_model_config(Path(folder) / "config.json")
    family = family_of(facts)
    if family.support.megatron is not None:
        raise UserError(f"--train-backend megatron cannot train {folder}: {family.support.megatron}; use fsdp")
    return dict(family.fields(facts))


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    yield "policy", str(find_initial_weights(config).hf_folder or config.hf_checkpoint)
    if needs_reference(config):
        yield "reference", str(find_reference_weights(config).hf_folder or config.hf_checkpoint)
    if has_critic(config):
        yield "critic", critic_flags(config).hf_checkpoint
    if config.use_opd and config.opd_type == "trainer" and config.opd_teacher_load is not None:
        yield "teacher", config.opd_teacher_load


def _layout_errors(config: Config, fields: Fields, model: str) -> Iterator[str]:
    for name, what, size_name in _DIVISIBLE_COUNTS:
        count, size = fields.get(name), getattr(config, size_name)
        frequency = fields.get("moe_layer_freq")
        all_sparse = fields.get("num_moe_experts") is not None and isinstance(frequency, list) and all(frequency)
        if name == "ffn_hidden_size" and all_sparse:
            continue
        if count is not None and count % size:
            yield _division_error(size_name, size, count, what, model)
    yield from _attention_errors(config, fields, model)
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
        yield _division_error("expert_tensor_parallel_size", expert_tensor, width, "columns of an expert", model)
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {config.tensor_model_parallel_size} with the experts of {model} needs "
            "--sequence-parallel: Megatron trains experts only with it"
        )


def _division_error(name: str, size: int, count: int, what: str, model: str) -> str:
    fitting = ", ".join(str(one) for one in range(1, min(count, 64) + 1) if count % one == 0)
    flag = "--" + name.replace("_", "-")
    return (
        f"{flag} {size} does not divide the {count} {what} of {model} ({count} / {size} leaves {count % size}): use "
        f"one of {fitting}"
    )


def _attention_errors(config: Config, fields: Fields, model: str) -> Iterator[str]:
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


def stage_layers(config: Config, num_layers: int) -> list[int]:
    """Return the number of layers of each process of the pipeline; raise a `UserError` if they cannot be split so."""
    pipeline = config.pipeline_model_parallel_size
    if (text := config.pipeline_model_parallel_layout) is not None:
        stages = parse_pipeline_layout(text)
        if len(stages) % pipeline:
            raise UserError(
                f"--pipeline-model-parallel-layout {text} has {len(stages)} stages, which "
                f"--pipeline-model-parallel-size {pipeline} does not divide"
            )
        if sum(stages) != num_layers:
            raise UserError(
                f"--pipeline-model-parallel-layout {text} has {sum(stages)} layers, but the model has {num_layers}"
            )
        return [sum(stages[rank::pipeline]) for rank in range(pipeline)]
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
    per_stage = config.num_layers_per_virtual_pipeline_stage
    own = max(layers)
    if per_stage is not None and own % per_stage:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {own} layers that a process of "
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} has ({own} / {per_stage} leaves "
            f"{own % per_stage}): choose a divisor"
        )
    virtual = virtual_stages(config, num_layers)
    uneven = [count for count in layers if count % virtual] if virtual > 1 and not (embedding or loss) else []
    if uneven:
        raise UserError(
            f"--num-virtual-stages-per-pipeline-rank {virtual} does not divide the {uneven[0]} layers of a process "
            f"({uneven[0]} / {virtual} leaves {uneven[0] % virtual}): choose a divisor"
        )
    return layers


def layout_rows(config: Config, fields: Fields) -> list[tuple[str, str]]:
    """Return the rows of the plan that describe how the trainers shard the model."""
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


def estimate_trainer(config: Config, shape: ModelShape, *, device: str, trainers: int) -> MemoryEstimate:
    """Estimate one training process of the chosen backend; with FSDP `trainers` share a copy of the model."""
    if not uses_megatron(config):
        return trainer_memory(config, shape, device=device, trainers=trainers)
    return megatron_memory(config, shape, family_fields(config.hf_checkpoint), device=device)


def megatron_memory(config: Config, shape: ModelShape, fields: Fields, *, device: str) -> MemoryEstimate:
    """Estimate the process of the pipeline that needs the most; `peak` names its position."""
    pipeline = config.pipeline_model_parallel_size
    step = _Step.of(config, shape, fields, device=device)
    found = {rank: step.parts(config, rank, device) for rank in range(pipeline)}
    most = max(found, key=lambda rank: sum(found[rank].values()))
    parts = {name: size for name, size in found[most].items() if size}
    return MemoryEstimate(parts, f"process {most + 1} of {pipeline} of the pipeline" if pipeline > 1 else "")


@dataclasses.dataclass(frozen=True)
class PipelineStageWeights:
    """Elements of the weights of one process of the pipeline."""

    dense: int
    """Sharded over tensor-parallel processes."""
    experts: int
    """Sharded over expert-parallel and expert-tensor-parallel processes."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_stage_weights(config: Config, shape: ModelShape, fields: Fields, rank: int) -> PipelineStageWeights:
    """Count the weights that process `rank` of the pipeline holds; small replicated tensors count as sharded.

    With --pipeline-model-parallel-layout the layers of a process count as adjacent, beginning where its share begins.
    """
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    hidden, num_layers = shape.hidden_size or 0, fields["num_layers"]
    sparse = fields.get("moe_layer_freq") if fields.get("num_moe_experts") else None
    sparse = sparse if isinstance(sparse, list) else [int(sparse is not None)] * num_layers
    counts, virtual = stage_layers(config, num_layers), virtual_stages(config, num_layers)
    if virtual == 1 or config.pipeline_model_parallel_layout is not None:
        begin = sum(counts[:rank])
        owned = list(range(begin, begin + counts[rank]))
    else:
        each = [count // virtual for count in counts]
        begins = [part * sum(each) + sum(each[:rank]) for part in range(virtual)]
        owned = [layer for begin in begins for layer in range(begin, begin + each[rank])]
    with_experts = sum(sparse[layer] for layer in owned)
    expert = 3 * hidden * (shape.expert_ffn_size or 0) * (shape.num_experts or 0)
    sparse_layer = (shape.layer_parameters or 0) - (expert if any(sparse) else 0)  # of a layer, its experts left out
    narrow = sparse_layer
    if any(sparse) and not all(sparse):
        narrow = (shape.attention_weights_per_layer or 0) + 3 * hidden * (shape.ffn_size or 0)
    dense = with_experts * sparse_layer + (len(owned) - with_experts) * narrow
    multiple = config.make_vocab_size_divisible_by * tensor
    vocabulary = -(-(shape.vocab_size or 0) // multiple) * multiple * hidden
    first, last = rank == 0, rank == pipeline - 1
    own_head = last and not (first and shape.tied_embeddings)
    dense += vocabulary * (int(first) + int(own_head))
    shared = expert_tensor_size(config) * config.expert_model_parallel_size
    return PipelineStageWeights(-(-dense // tensor), -(-with_experts * expert // shared))


@dataclasses.dataclass(frozen=True)
class _Step:
    """An optimizer step of one process of the pipeline."""

    shape: ModelShape
    fields: Fields
    compute: int
    """Bytes of one weight in forward and backward."""
    tokens: int
    layer: int
    """Bytes that one layer keeps of a micro-batch."""
    inputs: int
    """Bytes of the input of a layer."""
    root: int
    """Bytes that the parts outside the layers keep of a micro-batch."""
    chunk: int
    """Bytes of the logits that exist at once."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape, fields: Fields, *, device: str) -> _Step:
        dtype, on_gpu = resolve_dtype(config.dtype, device, shape.num_parameters), device == "cuda"
        tokens, tensor = tokens_per_forward(config), config.tensor_model_parallel_size
        size = BYTES_PER_ELEMENT[dtype]
        kept = layer_bytes(shape, dtype=dtype, on_gpu=on_gpu) or 0
        whole = shape.norms_per_layer * (4 + 2 * size) * (shape.hidden_size or 0)  # kept by norms for every token
        cut = config.sequence_parallel and tensor > 1
        share = -(-kept // tensor) if cut else whole + -(-(kept - whole) // tensor)
        inputs = layer_input_bytes(shape, dtype=dtype) or 0
        shared_inputs = tensor if cut or config.distribute_saved_activations else 1
        vocab = -(-(shape.vocab_size or 0) // tensor)
        return cls(
            shape=shape,
            fields=fields,
            compute=size,
            tokens=tokens,
            layer=tokens * share,
            inputs=-(-tokens * inputs // shared_inputs),
            root=tokens * (root_bytes(shape, dtype=dtype) or 0),
            chunk=logit_bytes(config, device, vocab, sharers=config.context_parallel_size),
        )

    def parts(self, config: Config, rank: int, device: str) -> dict[str, int]:
        """Return the bytes by purpose of process `rank` of the pipeline, in the backward of any step but the first."""
        weights = count_stage_weights(config, self.shape, self.fields, rank)
        each = _MOMENTS + (_MASTER if self.compute < _MASTER else 0)  # a float32 weight is its own master
        state = each * weights.total
        if config.use_distributed_optimizer:
            sharers = data_parallel_size(config) * config.context_parallel_size
            experts = config.expert_model_parallel_size * expert_tensor_size(config)
            experts *= config.pipeline_model_parallel_size
            expert_sharers = max(num_trainers(config) // experts, 1)
            state = each * (-(-weights.dense // sharers) + -(-weights.experts // expert_sharers))
        frozen = self.compute * weights.total
        parts = {"weights": frozen, "gradients": _MASTER * weights.total, "optimizer": state}
        if has_critic(config):
            parts["critic"] = frozen + _MASTER * weights.total + state
        parts |= other_models(config, device, frozen=frozen, average=_MASTER * weights.total, version=frozen)
        num_layers, is_last = self.fields["num_layers"], rank == config.pipeline_model_parallel_size - 1
        layers, virtual = stage_layers(config, num_layers)[rank], virtual_stages(config, num_layers)
        kept, recomputed = layers * self.layer, 0  # bytes of one micro-batch in all layers, bytes recomputed at once
        if config.recompute_granularity == "full":
            number = config.recompute_num_layers or 1
            if config.recompute_method == "block":
                full = min(number, layers)
                kept, recomputed = full * self.inputs + (layers - full) * self.layer, self.layer
            else:
                kept, recomputed = -(-layers // number) * self.inputs, min(number, layers) * self.layer
        in_flight = 1.0  # micro-batches whose activations exist at once; one in a single virtual stage is a fraction
        pipeline = config.pipeline_model_parallel_size
        if pipeline > 1:
            own = config.global_batch_size // data_parallel_size(config)
            own = max(1, own if config.use_dynamic_batch_size else own // (config.micro_batch_size or 1))
            in_flight = float(min(pipeline - rank, own))
            if virtual > 1:
                group = config.microbatch_group_size_per_virtual_pipeline_stage or pipeline
                warmup = 2 * (pipeline - rank - 1) + (virtual - 1) * group
                in_flight = min(warmup + 1, own * virtual) / virtual
        parts["activations"] = int(kept * in_flight) + recomputed + (self.root if is_last else 0)
        if is_last:
            parts["logits"] = 3 * self.chunk
        return parts
