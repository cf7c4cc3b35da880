"""Layout of the training processes: parallel sizes, contradictions between layout flags, and `--share-prompts`.

Only flags are used here; the plan checks a layout against the model (heads, layers, experts).
Invariant: with Megatron, `tensor x pipeline x context x data` is the number of training processes.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from slime.config.batch import model_replica_size, num_trainers
from slime.config.config import Config, given_flags
from slime.config.fields import flag_name
from slime.config.flags.megatron import HOOKS, RECOMPUTED_MODULES
from slime.errors import UserError

_FSDP_ONLY = (
    "fsdp_shard_size", "fsdp_cpu_offload", "lora_rank", "use_stateless_adam", "fp8", "share_prompts",
    "log_probs_keep_gib", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload",
)  # fmt: skip
"""Flags that only FSDP supports and that would change numbers or memory."""
_VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_UNEVEN_STAGES = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip


def uses_megatron(config: Config) -> bool:
    """Return whether the training backend is Megatron-Core."""
    return config.train_backend == "megatron"


def virtual_stages(config: Config, num_layers: int) -> int:
    """Return the number of stages per pipeline rank; more than one if they are interleaved."""
    if config.pipeline_model_parallel_layout is not None:
        return len(parse_pipeline_layout(config.pipeline_model_parallel_layout)) // config.pipeline_model_parallel_size
    if config.num_virtual_stages_per_pipeline_rank is not None:
        return config.num_virtual_stages_per_pipeline_rank
    per_stage = config.num_layers_per_virtual_pipeline_stage
    if per_stage is None or config.pipeline_model_parallel_size == 1:
        return 1
    return num_layers // config.pipeline_model_parallel_size // per_stage


def parse_pipeline_layout(text: str) -> list[int]:
    """Count the decoder layers of each stage of a layout in Megatron's notation, such as `Et*3|(tt|)*2tL`."""
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


def expert_tensor_size(config: Config) -> int:
    """Return the number of processes that share each matrix of an expert."""
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size


def uses_transformer_engine(config: Config, device: str) -> bool:
    """Return whether Megatron uses Transformer Engine's layers instead of plain torch."""
    if config.transformer_impl is not None:
        return config.transformer_impl == "transformer_engine"
    return device == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def layout_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each contradiction in the layout that does not depend on the model."""
    if uses_megatron(config):
        yield from _processes(config)
        yield from _pipeline(config)
        yield from _recompute(config)
        if config.carried.get("fine_grained_activation_offloading") and not config.carried.get("offload_modules"):
            yield "--fine-grained-activation-offloading needs --offload-modules, the modules whose inputs are offloaded"
        for flag in given_flags(config, _FSDP_ONLY).values():
            yield f"{flag} works only with FSDP, but Megatron trains: drop it, or use --train-backend fsdp"
        if config.plan_cluster is None and importlib.util.find_spec("megatron") is None:
            yield "--train-backend megatron needs Megatron-Core, which is not installed: pip install 'slime[megatron]'"
        return
    for name in given_flags(config, HOOKS):
        why = "it is called inside Megatron, and the trainer is FSDP: drop the flag, or give --train-backend megatron"
        if name == "custom_model_provider_path":
            why = (
                "transformers builds the model from its folder: put the code into the folder and give "
                "--trust-remote-code, or train with --train-backend megatron"
            )
        yield f"{flag_name(name)} is not supported: {why}"
    trainers, sharing = num_trainers(config), model_replica_size(config)
    if trainers % sharing:
        yield (
            f"--fsdp-shard-size {sharing} does not divide {_trainers_text(config)}: each copy of the model needs the "
            "same number of processes"
        )
    if trainers % config.context_parallel_size:
        yield (
            f"--context-parallel-size {config.context_parallel_size} does not divide {_trainers_text(config)}: that "
            "many processes share each sequence"
        )


def _trainers_text(config: Config) -> str:
    return (
        f"the {num_trainers(config)} training processes (--actor-num-nodes {config.actor_num_nodes} x "
        f"--actor-num-gpus-per-node {config.actor_num_gpus_per_node})"
    )


def _processes(config: Config) -> Iterator[str]:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context, trainers = config.context_parallel_size, num_trainers(config)
    if trainers % (tensor * pipeline * context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {tensor * pipeline * context}, which does not divide "
            f"{_trainers_text(config)}: every copy of the model needs that many"
        )
    expert, expert_tensor = config.expert_model_parallel_size, expert_tensor_size(config)
    if trainers % (expert_tensor * expert * pipeline):
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} x --expert-model-parallel-size {expert} x "
            f"--pipeline-model-parallel-size {pipeline} = {expert_tensor * expert * pipeline}, which does not divide "
            f"{_trainers_text(config)}: every copy of the experts needs that many"
        )


def _pipeline(config: Config) -> Iterator[str]:
    size = config.pipeline_model_parallel_size
    ways = [flag_name(name) for name in given_flags(config, _VIRTUAL_STAGES)]
    if len(ways) == 2:
        yield f"{ways[0]} and {ways[1]} both set the stages per process: keep one"
    if ways and size == 1:
        yield f"{ways[0]} splits the stages of a pipeline: add --pipeline-model-parallel-size, or drop it"
    if config.microbatch_group_size_per_virtual_pipeline_stage is not None and not ways:
        yield (
            "--microbatch-group-size-per-virtual-pipeline-stage applies to interleaved stages: add "
            "--num-virtual-stages-per-pipeline-rank, or drop it"
        )
    uneven = [flag_name(name) for name in given_flags(config, _UNEVEN_STAGES)]
    if uneven and size == 1:
        yield f"{uneven[0]} applies to the stages of a pipeline: add --pipeline-model-parallel-size, or drop it"
    written = config.pipeline_model_parallel_layout
    stages = 0 if written is None else len(parse_pipeline_layout(written))
    if stages % size:
        yield (
            f"--pipeline-model-parallel-layout {written} has {stages} stages, which "
            f"--pipeline-model-parallel-size {size} does not divide"
        )
    if written is not None and (uneven or ways):
        yield f"--pipeline-model-parallel-layout already includes {(uneven + ways)[0]}: keep one"


def _recompute(config: Config) -> Iterator[str]:
    unknown = [name for name in config.recompute_modules or () if name not in RECOMPUTED_MODULES]
    if unknown:
        yield f"--recompute-modules {unknown[0]} is none of {', '.join(RECOMPUTED_MODULES)}"
    if config.recompute_granularity != "full" and config.recompute_method is not None:
        yield f"--recompute-method {config.recompute_method} needs --recompute-granularity full"
    if config.recompute_method is not None and config.recompute_num_layers is None:
        yield f"--recompute-method {config.recompute_method} needs --recompute-num-layers, its number of layers"
    if config.recompute_granularity == "full" and config.recompute_modules:
        yield "--recompute-modules needs --recompute-granularity selective: full recomputes whole layers"


def shares_prompts(config: Config) -> bool:
    """Return whether the trainer computes shared prompt tokens of a row once (`--share-prompts`).

    Without the flag, models in which more than attention mixes tokens do not use it.
    """
    if config.share_prompts is not None:
        return config.share_prompts
    return not uses_megatron(config) and next(_sharing_conflicts(config), None) is None


def sharing_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each flag that contradicts a given `--share-prompts`."""
    return _sharing_conflicts(config) if config.share_prompts else iter(())


def _sharing_conflicts(config: Config) -> Iterator[str]:
    if config.context_parallel_size > 1:
        yield (
            f"--share-prompts cannot be combined with --context-parallel-size {config.context_parallel_size}: ranks "
            "that share a row take equal parts of all its tokens; drop one"
        )
    if config.use_routing_replay:
        yield (
            "--share-prompts cannot be combined with routing replay: the copies of a prompt may have used other "
            "experts; drop one"
        )
