"""Batch arithmetic: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

from slime.config.config import Config
from slime.errors import UserError


def num_trainers(config: Config) -> int:
    """Return the number of training processes; those of a context-parallel group share their samples."""
    return config.actor_num_nodes * config.actor_num_gpus_per_node


def model_replica_size(config: Config) -> int:
    """Return the number of training processes that share one copy of the model."""
    return config.fsdp_shard_size or num_trainers(config)


def model_parallel_size(config: Config) -> int:
    """Return tensor x pipeline x context parallel size: the processes that share their samples."""
    return config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size


def data_parallel_size(config: Config) -> int:
    """Return the number of data-parallel shares of a step: one for each model replica that the flags describe.

    With FSDP, tensor and pipeline parallelism are only counted: the model is sharded over all processes, and each
    process that does not share sequences takes its own samples. A step with fewer samples leaves some processes
    without samples, which does not change the result.
    """
    return max(1, num_trainers(config) // model_parallel_size(config))


def tokens_per_row(config: Config) -> int | None:
    """Return the most tokens of a micro-batch, shared by a context-parallel group; None if it is sized by samples."""
    if not config.use_dynamic_batch_size or config.max_tokens_per_gpu is None:
        return None
    return config.max_tokens_per_gpu * config.context_parallel_size


def derive_batch_sizes(config: Config) -> Config:
    """Fill in the global batch size or the steps per rollout, so that the equation of this module holds."""
    prompts, per_prompt = config.rollout_batch_size, config.n_samples_per_prompt
    rollouts = prompts * per_prompt
    left = f"rollout_batch_size {prompts} x n_samples_per_prompt {per_prompt} = {rollouts}"
    batch, steps = config.global_batch_size, config.num_steps_per_rollout
    if batch is None:
        steps = steps or 1
        if rollouts % steps:
            raise UserError(f"{left}, which num_steps_per_rollout {steps} does not divide: change one of the three")
        batch = rollouts // steps
    elif steps is None:
        if rollouts % batch:
            raise UserError(f"{left}, which global_batch_size {batch} does not divide: change one of the three")
        steps = rollouts // batch
    elif batch * steps != rollouts:
        right = f"global_batch_size {batch} x num_steps_per_rollout {steps} = {batch * steps}"
        raise UserError(f"{left}, but {right}: change one of the four")
    replicas = data_parallel_size(config)
    if batch < replicas:
        shared = "" if replicas == num_trainers(config) else f" / {model_parallel_size(config)} of a model replica"
        raise UserError(
            f"global_batch_size {batch} is less than the {replicas} training processes (actor_num_nodes "
            f"{config.actor_num_nodes} x actor_num_gpus_per_node {config.actor_num_gpus_per_node}{shared}), "
            "each of which needs a sample per step: use fewer processes or a larger batch"
        )
    return config.replace(global_batch_size=batch, num_steps_per_rollout=steps)
