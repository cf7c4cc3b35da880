"""Batch arithmetic: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

from slime.config.config import Config
from slime.errors import UserError


def num_trainers(config: Config) -> int:
    """Training processes: each has a part of the model, and samples that it shares with those of its context."""
    return config.actor_num_nodes * config.actor_num_gpus_per_node


def copy_size(config: Config) -> int:
    """Training processes that share one copy of the model."""
    return config.fsdp_shard_size or num_trainers(config)


def model_parallel_size(config: Config) -> int:
    """Processes that share their samples where a model is cut by tensor, pipeline and context."""
    return config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size


def data_parallel_size(config: Config) -> int:
    """Shares that a step must fill: one for each replica of the model that the flags describe.

    With FSDP, tensor and pipeline parallelism are only counted: the model is sharded over all processes, and whoever
    shares no sequences takes samples of its own. A step that has fewer samples leaves some without, which changes no
    number.
    """
    return max(1, num_trainers(config) // model_parallel_size(config))


def tokens_per_row(config: Config) -> int | None:
    """Tokens of a micro-batch at most, which the processes of a context share; None where it is cut by samples."""
    if not config.use_dynamic_batch_size or config.max_tokens_per_gpu is None:
        return None
    return config.max_tokens_per_gpu * config.context_parallel_size


def derive_batch_sizes(config: Config) -> Config:
    """Global batch size and steps per rollout, whichever is missing, such that the equation holds."""
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
