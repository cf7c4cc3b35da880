"""Rows of the plan about batches, length, learning rate and nodes.

Invariant: a run that does not fit on the cluster is refused here, before anything starts; the message says what is
missing on which node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.cluster.factory import RAY, Machines, cluster_kind, find_machines
from slime.cluster.remote.placement import ENGINE, TRAINER, NodeInfo, fit, make_bundles
from slime.config import Config
from slime.config.async_mode import describe_loop
from slime.config.batch import model_parallel_size, tokens_per_row
from slime.config.datasets import eval_datasets, evaluates
from slime.config.devices import PlannedCluster, nvidia_gpu_count
from slime.config.parallelism import uses_megatron
from slime.driver.plan.data import steps_per_epoch, training_prompts
from slime.errors import UserError


def batch_rows(config: Config, trainers: int) -> tuple[tuple[str, str], ...]:
    """Return the rows about the samples of a rollout, of an optimizer step and of a trainer."""
    prompts, per_prompt = config.rollout_batch_size, config.n_samples_per_prompt
    rollout = ("rollout step", f"{prompts} prompts x {per_prompt} samples = {prompts * per_prompt} samples")
    if not trainers:
        return (rollout, ("training", "none"))
    batch, steps = config.global_batch_size, config.num_steps_per_rollout
    sharing = model_parallel_size(config) if uses_megatron(config) else config.context_parallel_size
    takers = trainers // sharing
    share = f"{batch // takers}" if batch % takers == 0 else f"{batch // takers} to {batch // takers + 1}"
    forward = f"{config.micro_batch_size} per forward pass"
    if config.use_dynamic_batch_size:
        forward = f"up to {tokens_per_row(config)} tokens per forward pass"
    if (context := config.context_parallel_size) > 1:
        forward += f", a 1/{context} slice of each on every trainer"
    return (
        rollout,
        ("training", f"{steps} optimizer step{'s' * (steps > 1)} of {batch} samples"),
        ("per trainer" if sharing == 1 else f"per {sharing} trainers", f"{share} samples, {forward}"),
    )


def length_rows(config: Config, steps: int | None, *, generates: bool) -> tuple[tuple[str, str], ...]:
    """Return the rows about the number of steps, the loop, the learning rate, the optimizer and evaluations."""
    if config.num_rollout is not None:
        length = f"{config.num_rollout} rollout steps, {steps} optimizer steps"
        if config.num_rollout == 0:
            length = "no training, evaluation only"
    elif config.load_debug_rollout_data is not None:
        length = "as many rollout steps as there are dumps"
    else:
        prompts = training_prompts(config) if config.dry_run else None
        each = f"(prompts / {config.rollout_batch_size})" if prompts is None else steps_per_epoch(config, prompts)
        length = f"{config.num_epoch or 1} x {each} rollout steps"
    horizon = config.lr_decay_iters or steps or "all"
    if config.lr_decay_samples is not None:
        horizon = f"{config.lr_decay_samples / config.global_batch_size:g}"
    rate = f"{config.lr:g} constant"
    if config.lr_decay_style != "constant":
        rate = f"{config.lr:g} to {config.min_lr:g}, {config.lr_decay_style} over {horizon} optimizer steps"
    if config.lr_warmup_fraction:
        rate += f", after a warm-up over {config.lr_warmup_fraction:g} of the steps"
    elif warmup := config.lr_warmup_iters + config.lr_warmup_samples / config.global_batch_size:
        rate += f", after {warmup:g} steps of warm-up"
    # the settings of the optimizer, as other trainers may have other defaults
    betas = f"betas {config.adam_beta1:g} and {config.adam_beta2:g}"
    start, end = (
        config.weight_decay if given is None else given
        for given in (config.start_weight_decay, config.end_weight_decay)
    )
    decay = f"{start:g}" if start == end else f"{start:g} to {end:g}"
    clipping = f"gradients clipped at {config.clip_grad:g}" if config.clip_grad else "no clipping"
    where = " on the host" if config.optimizer_cpu_offload else ""
    dtypes = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    kept = f", moments{where} in {' and '.join(dict.fromkeys(dtypes))}" if where or dtypes != ("fp32", "fp32") else ""
    adam = f"AdamW, {'without memory' if config.use_stateless_adam else betas}{kept}, weight decay {decay}, {clipping}"
    rows = [("run", length), ("loop", describe_loop(config)), ("learning rate", rate), ("optimizer", adam)]
    if config.eval_interval is not None and evaluates(config) and generates:
        names = ", ".join(dataset.name for dataset in eval_datasets(config))
        before = "" if config.skip_eval_before_train else "before training and "
        rows.append(("evaluation", f"{before}every {config.eval_interval} rollout steps on {names}"))
    return tuple(rows)


def optimizer_steps(config: Config) -> int | None:
    """Return the number of optimizer steps; None if it depends on the data."""
    return None if config.num_rollout is None else config.num_rollout * config.num_steps_per_rollout


def planned_machines(config: Config) -> Machines:
    """Return the machines that a dry run plans for, found without torch; a Ray cluster is queried."""
    if config.plan_cluster is not None:
        return Machines("cuda", PlannedCluster.parse(config.plan_cluster).gpus)
    if cluster_kind(config) == RAY:
        return find_machines(config)
    gpus = nvidia_gpu_count()
    device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    return Machines(device, gpus)


@dataclass(frozen=True)
class PlannedNodes:
    """The nodes of a cluster that a run uses, a row for each; no rows for a run on this machine."""

    rows: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Names of those nodes that are not the driver's machine."""


def plan_nodes(config: Config, device: str, nodes: Sequence[NodeInfo], *, trainers: int, rollout: int) -> PlannedNodes:
    """Predict the placement of trainers and engines; Ray decides it when the run starts."""
    if not nodes:
        if config.plan_cluster is None:
            return PlannedNodes()
        devices = max(trainers, rollout) if config.colocate else trainers + rollout
        used = max(config.actor_num_nodes, -(-devices // PlannedCluster.parse(config.plan_cluster).gpus_per_node))
        return PlannedNodes(elsewhere=tuple(f"node {number}" for number in range(2, used + 1)))
    bundles = make_bundles(config, device, nodes, trainers=trainers, rollout=rollout)
    places = fit(bundles, nodes, device)
    unit = "GPU" if device == "cuda" else "CPU"
    names = {TRAINER: "trainers and engines" if config.colocate and rollout else "trainers", ENGINE: "engines"}
    rows = []
    for node in dict.fromkeys(places):
        here = [bundle for bundle, place in zip(bundles, places, strict=True) if place == node]
        counts = {role: sum(bundle.count for bundle in here if bundle.role == role) for role in (TRAINER, ENGINE)}
        given = [
            f"{count} {unit}{'s' if count > 1 else ''} for {names[role]}" for role, count in counts.items() if count
        ]
        rows.append((f"node {node.name}", f"{', '.join(given)} (has {node.devices(device)}, at {node.address})"))
    return PlannedNodes(tuple(rows), tuple(node.name for node in dict.fromkeys(places) if not node.is_here))


def check_one_machine(config: Config, device: str, nodes: Sequence[NodeInfo]) -> None:
    """Raise a `UserError` for several training nodes of GPUs without a cluster."""
    if device == "cuda" and config.actor_num_nodes > 1 and not nodes and config.plan_cluster is None:
        raise UserError(
            f"--actor-num-nodes {config.actor_num_nodes} with --cluster local: this machine is one node; use --cluster "
            "ray, or --actor-num-gpus-per-node alone"
        )
