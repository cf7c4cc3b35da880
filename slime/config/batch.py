"""Batch arithmetic: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""

from __future__ import annotations

from slime.config.config import Config
from slime.errors import UserError


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
    trainers = config.actor_num_nodes * config.actor_num_gpus_per_node
    if batch < trainers:
        raise UserError(
            f"global_batch_size {batch} is less than the {trainers} training processes (actor_num_nodes "
            f"{config.actor_num_nodes} x actor_num_gpus_per_node {config.actor_num_gpus_per_node}), "
            "each of which needs a sample per step: use fewer processes or a larger batch"
        )
    return config.replace(global_batch_size=batch, num_steps_per_rollout=steps)
