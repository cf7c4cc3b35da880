"""The plan of a run before it starts: processes, batches, memory, files, and notes for the user.

Invariant: making a plan starts no component of the run, writes nothing and imports no torch. It reads the first rows of
the prompt files, and all rows for a dry run. With SGLang it asks the interpreter that has SGLang for its version and
flags.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.algorithms.estimators import estimator_names
from slime.cluster.devices import choose_dtype, resolve_rollout_dtype, slow_dtype_note
from slime.cluster.remote.placement import NodeInfo
from slime.config import Config
from slime.config.algorithm import (
    biased_sampling_flags,
    has_critic,
    needs_reference,
    serves_teacher,
    uses_group_baseline,
)
from slime.config.batch import model_replica_size, num_trainers
from slime.config.datasets import all_datasets, evaluates, train_datasets
from slime.config.devices import PlannedCluster, nvidia_gpu_memory
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN, ONE_STEP, SFT_ROLLOUT_FUNCTION, compares_with_label
from slime.config.ignored_flags import flag_list, flags_unused_by_layers, flags_without_effect
from slime.config.initial_weights import describe_initial_weights, describe_reference, initial_weight_notes
from slime.config.lora import uses_lora
from slime.config.model_folder import read_model_config
from slime.config.parallelism import uses_megatron
from slime.config.parser import custom_file_flags, misspelled_custom_file_keys
from slime.driver.plan.data import check_data, data_rows
from slime.driver.plan.fit import MemoryBudget, fit_notes, format_gib
from slime.driver.plan.megatron import check_layout, estimate_trainer, family_fields, layout_rows
from slime.driver.plan.memory import (
    ProcessPlan,
    available_memory,
    engine_memory,
    longest_sample,
    planned_adapter,
)
from slime.driver.plan.schedule import batch_rows, check_one_machine, length_rows, optimizer_steps, plan_nodes
from slime.engine.fleet.backend import EMBEDDED, EXTERNAL, SGLANG_SERVER, choose_backend
from slime.engine.fleet.engines import check_engines, count_engines, refuse_quantised
from slime.engine.fleet.external import ExternalEngines
from slime.engine.http.blocking import connection_problem
from slime.engine.launch import EMBEDDED_PARSERS
from slime.errors import UserError
from slime.models.shape import ModelShape, check_context_parallel
from slime.weights.transport import choose_transport

_SERVICE_TIMEOUT_S = 10.0
_SYNCED = {"merged": "the merged weights", "adapter": "the adapter alone"}
_OWN_PACKAGE = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions of a run as data (`processes`, the choices) and as text (`sections`, `notes`)."""

    device: str
    gpus_needed: int
    processes: tuple[ProcessPlan, ...]
    rollout_backend: str
    weight_transport: str
    optimizer_steps: int | None
    """Optimizer steps of the whole run; None if they depend on the length of the data."""
    lacks: int | None
    """Bytes that a GPU, or a machine without one, lacks for the estimate; None if its memory is unknown."""
    sections: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    notes: tuple[str, ...]

    def render(self) -> str:
        """The plan as text for a terminal."""
        width = max(len(label) for _, rows in self.sections for label, _ in rows)
        lines: list[str] = []
        for title, rows in self.sections:
            lines += ["", title, "-" * len(title)]
            lines += [f"  {label:<{width}}  {text}" for label, text in rows]
        if self.notes:
            lines += ["", "Notes", "-----", *(f"  * {note}" for note in self.notes)]
        return "\n".join(lines[1:]) + "\n"


def make_plan(
    config: Config,
    *,
    device: str,
    gpu_count: int,
    nodes: Sequence[NodeInfo] = (),
    reward_given: bool = False,
) -> Plan:
    """Make the plan of a resolved config on a machine with `gpu_count` GPUs, or on the nodes of a cluster.

    A run that cannot be placed, or whose samples cannot be scored, is a `UserError`. `reward_given` is True when the
    reward function is given as an object instead of by a flag.
    """
    check_data(config, reward_given=reward_given)
    _check_service(config)
    trainers = 0 if config.debug_rollout_only else num_trainers(config)
    backend, backend_reason = "none", "nothing is generated"
    if needs_engines(config):
        backend, backend_reason = choose_rollout_backend(config, device)
    engines = 0 if backend == "none" else count_engines(config, backend)
    if backend == EXTERNAL:
        ExternalEngines(config).start(timeout_s=10.0)
    check_one_machine(config, device, nodes)
    for_engines = 0 if not engines or config.rollout_external_engine_addrs else config.rollout_num_gpus
    on_nodes = plan_nodes(config, device, nodes, trainers=trainers, rollout=for_engines)
    gpus_needed = _check_gpus(config, device, gpu_count, trainers, for_engines)
    shape = ModelShape.from_folder(config.hf_checkpoint)
    layout = _check_layout(config, device) if trainers else ()
    transport, transport_reason = ("none", "nothing is trained" if engines else "there is no engine")
    if engines and trainers:
        transport, transport_reason = choose_transport(
            config, device, "sglang" if backend == SGLANG_SERVER else "embedded", nodes=on_nodes.elsewhere
        )

    if config.plan_cluster is None:
        available = nvidia_gpu_memory() if device == "cuda" else available_memory()
    else:
        available = PlannedCluster.parse(config.plan_cluster).gpu_memory

    def processes_of(changed: Config) -> tuple[ProcessPlan, ...]:
        now = num_trainers(changed) if trainers else 0
        return _processes(changed, shape, device, now, engines, available, backend)

    processes, steps = processes_of(config), optimizer_steps(config)
    training, rollout = precisions(config, device, shape.num_parameters)
    data = data_rows(config) if config.dry_run else ()
    placed = [(process.name, f"{process.count} on {process.where}") for process in processes]
    placed += [("rollout backend", f"{backend} ({backend_reason})")]
    placed += [("weight transport", f"{transport} ({transport_reason})")]
    precision = training if training == rollout else f"{training}, engines {rollout}"
    sections = (
        ("Model", (*_model_rows(config, shape), ("precision", precision))),
        ("Processes", (*layout, *placed, *on_nodes.rows)),
        *((("Data", data),) if data else ()),
        ("Batches", batch_rows(config, trainers)),
        ("Length", length_rows(config, steps, generates=needs_engines(config))),
        (f"Memory (estimate, {device})", _memory_rows(processes, available, device)),
        ("Files", _file_rows(config)),
    )
    dtypes = (("--dtype", config.dtype), ("--rollout-dtype", config.rollout_dtype))
    notes = [note for flag, dtype in dtypes if (note := slow_dtype_note(flag, dtype, device)) is not None]
    notes += [*_config_notes(config, backend), *flags_unused_by_layers(config, device)]
    lacks: int | None = None
    if available is not None:
        room = MemoryBudget(processes_of, available, device)
        notes += fit_notes(config, room)
        lacks = room.lacking(config)
    return Plan(device, gpus_needed, processes, backend, transport, steps, lacks, sections, tuple(notes))


def choose_rollout_backend(config: Config, device: str) -> tuple[str, str]:
    """Return the engine that generates, and the reason; refuse flags that it does not have."""
    if config.plan_cluster is not None and config.rollout_backend != EMBEDDED:
        return SGLANG_SERVER, "assumed; what is installed there is not known"
    backend, reason = choose_backend(config, device)
    refuse_quantised(config, backend)
    check_engines(config, backend, device)
    return backend, reason


def needs_engines(config: Config) -> bool:
    """Return True if the run generates: SFT without evaluation does not, nor does --debug-train-only."""
    if config.debug_train_only or (config.rollout_num_gpus == 0 and not config.rollout_external_engine_addrs):
        return False
    return config.rollout_function_path != SFT_ROLLOUT_FUNCTION or evaluates(config)


def _check_service(config: Config) -> None:
    """Raise a `UserError` unless the reward service or teacher at --rm-url can be reached."""
    rm_types = [config.rm_type, *(dataset.rm_type for dataset in all_datasets(config))]
    rewards = any((rm_type or "").removeprefix("boxed_") == "remote_rm" for rm_type in rm_types)
    teaches = config.use_opd and config.opd_type == "engine" and config.opd_teacher_load is None
    if config.rm_url is None or config.debug_train_only or not (rewards or teaches):
        return
    reason = connection_problem(config.rm_url, timeout_s=_SERVICE_TIMEOUT_S)
    if reason is not None:
        raise UserError(
            f"--rm-url {config.rm_url} cannot be reached ({reason}): start the service, or correct the address"
        )


def precisions(config: Config, device: str, parameters: int | None) -> tuple[str, str]:
    """Return the dtypes in which trainers and engines compute, each with its reason."""
    rollout = config.dtype if config.rollout_dtype == "auto" else config.rollout_dtype
    chosen = (choose_dtype(asked, device, parameters) for asked in (config.dtype, rollout))
    training, engines = (f"{dtype} ({reason})" for dtype, reason in chosen)
    return training, engines


def _check_gpus(config: Config, device: str, gpu_count: int, trainers: int, rollout: int) -> int:
    """Return the number of GPUs that the run needs; raise a `UserError` if there are fewer."""
    if device != "cuda":
        return 0
    if config.plan_cluster is not None:
        cluster = PlannedCluster.parse(config.plan_cluster)
        nodes, gpus = config.actor_num_nodes, config.actor_num_gpus_per_node
        if nodes > cluster.nodes or gpus > cluster.gpus_per_node:
            raise UserError(
                f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {gpus} do not fit on {cluster} "
                "(--plan-cluster): lower one of them"
            )
    needed = max(trainers, rollout) if config.colocate else trainers + rollout
    if gpu_count == 0:
        raise UserError("--device cuda, but this machine has no NVIDIA GPU: use --device cpu")
    if needed > gpu_count:
        how = "shared" if config.colocate else f"{trainers} for training and {rollout} for rollout"
        shared = "" if config.colocate or max(trainers, rollout) > gpu_count else "add --colocate, or "
        raise UserError(
            f"this run needs {needed} GPUs ({how}), but there {'is' if gpu_count == 1 else 'are'} {gpu_count}: "
            f"{shared}lower --actor-num-gpus-per-node or --rollout-num-gpus"
        )
    return needed


def _check_layout(config: Config, device: str) -> tuple[tuple[str, str], ...]:
    """Check that the trainers can shard every model that they run; return the rows about Megatron's layout."""
    if uses_megatron(config):
        check_layout(config, device=device)
        return tuple(layout_rows(config, family_fields(config.hf_checkpoint)))
    teaches = config.use_opd and config.opd_type == "trainer"
    folders = [
        config.hf_checkpoint,
        (config.critic_hf_checkpoint if has_critic(config) else None),
        (config.opd_teacher_load if teaches else None),
    ]
    for folder in filter(None, folders):
        check_context_parallel(ModelShape.from_folder(folder).num_heads, config.context_parallel_size, folder)
    return ()


def _processes(
    config: Config,
    shape: ModelShape,
    device: str,
    trainers: int,
    engines: int,
    available: int | None,
    backend: str,
) -> tuple[ProcessPlan, ...]:
    processes = [ProcessPlan("driver", 1, "cpu", None)]
    if engines:
        first, sglang = 0 if config.colocate else trainers, backend == SGLANG_SERVER
        dtype = resolve_rollout_dtype(config.rollout_dtype, config.dtype, device, shape.num_parameters)
        memory = engine_memory(config, shape, dtype=dtype, device=device, available=available, sglang=sglang)
        if config.rollout_external_engine_addrs:
            processes.append(ProcessPlan("engine", engines, "the addresses given", None))
        else:
            processes.append(
                ProcessPlan("engine", engines, _device_range(device, first, config.rollout_num_gpus), memory)
            )
        if serves_teacher(config) and config.opd_teacher_load is not None:
            teacher = ModelShape.from_folder(config.opd_teacher_load)
            memory = engine_memory(config, teacher, dtype=dtype, device=device, available=available, sglang=sglang)
            processes.append(ProcessPlan("teacher", 1, _device_range(device, first, 1), memory))
    if trainers:
        sharing = model_replica_size(config)
        memory = estimate_trainer(config, shape, device=device, trainers=sharing)
        copies = f", {trainers // sharing} copies of the model" if sharing < trainers else ""
        processes.append(ProcessPlan("trainer", trainers, f"{_device_range(device, 0, trainers)}{copies}", memory))
    return tuple(processes)


def _device_range(device: str, first: int, count: int) -> str:
    if device != "cuda":
        return "cpu"
    return f"GPU {first}" if count == 1 else f"GPUs {first}-{first + count - 1}"


def _model_rows(config: Config, shape: ModelShape) -> tuple[tuple[str, str], ...]:
    count = shape.num_parameters
    size = "size unknown" if count is None else f"{_short_number(count)} parameters"
    rows = [("folder", config.hf_checkpoint), ("kind", f"{shape.model_type}, {size}")]
    if not config.debug_rollout_only:
        rows.append(("starts from", describe_initial_weights(config)))
        if needs_reference(config):
            rows.append(("reference", describe_reference(config)))
    if shape.num_layers and shape.hidden_size:
        experts = f", {shape.num_experts} experts" if shape.num_experts else ""
        rows.append(
            ("shape", f"{shape.num_layers} layers x {shape.hidden_size}{experts}, vocabulary {shape.vocab_size}")
        )
    if uses_lora(config) and not config.debug_rollout_only:
        adapter = f"rank {config.lora_rank}, alpha {config.lora_alpha:g}"
        planned = planned_adapter(config)
        if planned is None:  # a config.json alone, of a family whose layers only the trainer knows
            adapter += f", on {', '.join(config.lora_target_modules or ())}"
        else:
            chosen, trained = planned
            names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in chosen))
            unchanged = "; experts stay as they are" if shape.num_experts else ""
            adapter += f", on {names}: {_short_number(trained)} parameters are trained{unchanged}"
            adapter += f"; engines get {_SYNCED[config.lora_sync]}"
        rows.append(("LoRA", adapter))
    flops = shape.flops_per_token(longest_sample(config) // 2)
    if flops is not None:
        rows.append(("work", f"{flops / 1e9:.3g} GFLOP per token forward, three times that in training"))
    return tuple(rows)


def _memory_rows(processes: tuple[ProcessPlan, ...], available: int | None, device: str) -> tuple[tuple[str, str], ...]:
    rows = []
    for process in processes:
        if process.memory is not None:
            parts = ", ".join(f"{name} {format_gib(size)}" for name, size in process.memory.parts.items())
            peak = f" (most at: {process.memory.peak})" if process.memory.peak else ""
            rows.append((f"each {process.name}", f"{format_gib(process.memory.total)}: {parts}{peak}"))
            if process.memory.on_host:
                host = ", ".join(f"{name} {format_gib(size)}" for name, size in process.memory.on_host.items())
                rows.append(("", f"and in the host's memory: {host}"))
    what = "each GPU has" if device == "cuda" else "available"
    rows.append((what, "unknown" if available is None else format_gib(available)))
    return tuple(rows)


def _file_rows(config: Config) -> tuple[tuple[str, str], ...]:
    run = Path(config.output_dir)
    rows = [("run folder", f"{run}{os.sep} with config.yaml, metrics.jsonl, journal.sqlite, logs{os.sep}")]
    if config.use_tensorboard:
        rows.append(("TensorBoard", str(run / "tensorboard")))
    every = f"every {config.save_interval} rollout steps and at the end" if config.save_interval else "at the end"
    if config.save is not None:
        rows.append(("checkpoints", f"{config.save}, {every}"))
    if config.save_hf is not None:
        rows.append(("model folders", f"{config.save_hf}, {every}"))
    if config.save_debug_rollout_data is not None:
        rows.append(("rollout dumps", config.save_debug_rollout_data))
    return tuple(rows)


def _config_notes(config: Config, backend: str) -> Iterator[str]:
    yield from initial_weight_notes(config)
    path = config.carried.get("custom_config_path")
    if path is not None and Path(path).expanduser().is_file():  # a saved config has its values already
        given = ", ".join(f"{flag} {value}" for flag, value in custom_file_flags(path).items())
        if given:
            yield f"--custom-config-path {path} sets {given}, overriding the command line"
        for key, flag in misspelled_custom_file_keys(path).items():
            yield f"{key} in {path} is not a flag, so only plugins see it: did you mean {flag}?"
    sharing, batch = config.context_parallel_size, config.global_batch_size
    takers = num_trainers(config) // sharing
    if not config.debug_rollout_only and batch < takers and not uses_megatron(config):
        kind = "training processes" if sharing == 1 else f"groups of {sharing} training processes"
        yield (
            f"--global-batch-size {batch} may leave {takers - batch} of the {takers} {kind} without "
            "samples in a step: the model is sharded over all of them, without tensor or pipeline parallelism"
        )
    if config.sandbox == "subprocess":
        yield (
            "--sandbox subprocess isolates nothing: code that a model writes runs with the rights of this user, and "
            "can read and change every file, process, secret and network that this user can"
        )
    if config.plan_cluster is not None:
        yield f"--plan-cluster: planned for {PlannedCluster.parse(config.plan_cluster)}, not for this machine"
    if (other := Path.cwd() / _OWN_PACKAGE.name).joinpath("__init__.py").is_file() and other.resolve() != _OWN_PACKAGE:
        yield f"this folder has its own {other.name} ({other}), but the run uses {_OWN_PACKAGE}"
    yield from _evaluation_notes(config)
    if config.async_buffer_size > 1 and config.async_mode != ONE_STEP:
        yield f"--async-buffer-size {config.async_buffer_size} has no effect: it is for --async-mode one-step"
    yield from _length_notes(config)
    if config.debug_rollout_only and config.num_rollout == 0:
        yield f"evaluation alone: engines serve {config.hf_checkpoint}, no trainer is started"
    elif config.debug_rollout_only:
        yield f"--debug-rollout-only: engines serve {config.hf_checkpoint} throughout, nothing is trained"
    elif config.save is None and config.num_rollout != 0:
        kept = "the trained model is not kept"
        if config.save_hf:
            kept = f"only the models of --save-hf {config.save_hf} are kept"
        yield f"no --save: {kept}, and a run that is stopped starts over; --save DIR --load DIR resumes it"
    yield from _objective_notes(config)
    yield from flags_without_effect(config)
    sglang = [name for name in config.carried if name.startswith(("sglang_", "router_"))]
    if backend == "embedded":
        sglang = [name for name in sglang if name not in EMBEDDED_PARSERS]
    if sglang and backend in ("embedded", "external"):
        affected = "the embedded engine" if backend == "embedded" else "engines that run already"
        yield f"SGLang flags without effect on {affected}: {flag_list(sglang)}"


def _evaluation_notes(config: Config) -> Iterator[str]:
    if evaluates(config) and not needs_engines(config):
        why = "--debug-train-only" if config.debug_train_only else "--rollout-num-gpus 0"
        yield f"{why}: nothing is evaluated, there are no engines"
    elif evaluates(config) and config.eval_interval is None:
        flag = "--eval-prompt-data" if config.eval_prompt_data else "--eval-config"
        yield f"{flag} without --eval-interval: there is no periodic evaluation"
    elif config.eval_interval is not None and not evaluates(config):
        yield f"--eval-interval {config.eval_interval} without --eval-prompt-data: there is nothing to evaluate"


def _length_notes(config: Config) -> Iterator[str]:
    """Yield notes about the length of responses and of the run."""
    wanted, generates = config.rollout_max_response_len, needs_engines(config)
    if wanted is None and generates and config.loss_type != "sft_loss":
        yield f"no --rollout-max-response-len: responses end after {DEFAULT_RESPONSE_LEN} tokens, SGLang's default"
    context = read_model_config(Path(config.hf_checkpoint) / "config.json").get("max_position_embeddings")
    if wanted is not None and isinstance(context, int) and wanted >= context and generates:
        yield (
            f"--rollout-max-response-len {wanted} is not less than the context of the model (max_position_embeddings "
            f"{context}): responses end where prompt and response fill the context"
        )
    if config.num_rollout is None and config.num_epoch is None and config.load_debug_rollout_data is None:
        yield "no --num-rollout and no --num-epoch: the run is one pass over the prompts"


def _objective_notes(config: Config) -> Iterator[str]:
    """Yield notes about the training objective.

    Distillation with a verifier but without labels trains without rewards. Engines may truncate the distribution that
    they sample from, while the loss uses the whole vocabulary.
    """
    if uses_group_baseline(config) and config.n_samples_per_prompt == 1:
        unless = ", unless the generate function makes several" if config.custom_generate_function_path else ""
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {config.advantage_estimator}: a group of one always "
            f"has advantage 0, so nothing is learned{unless}; sample 4 or more, or use an estimator that does not "
            f"compare siblings ({estimator_names(lambda one: not one.group_relative)})"
        )
    rm_type, labels = config.rm_type, [one.label_key for one in train_datasets(config)] or [config.label_key]
    has_verifier = rm_type is not None and config.custom_rm_path is None and compares_with_label(rm_type, {})
    if has_verifier and config.use_opd and not all(labels):
        yield (
            f"--rm-type {rm_type} compares with a label and there is no --label-key: responses without a label get no "
            "reward, so that only the teacher of --use-opd teaches; name the column with --label-key, or drop --rm-type"
        )
    if (cut := biased_sampling_flags(config)) is not None:
        yield (
            f"{cut}: tokens are sampled from a part of the vocabulary, but training takes their "
            "log-probs over all of it, so the gradient is biased; leave it out to train on-policy"
        )


def _short_number(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
