"""The value model of PPO, with its own weights, optimizer, learning rate and checkpoints, on the policy's devices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime.config import Config
from slime.config.critic import critic_flags
from slime.config.initial_weights import adapter_base_weights, find_critic_weights
from slime.config.lora import uses_lora
from slime.train.backend import Builder, LossOutcome
from slime.train.losses.objectives import value_loss
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.rollout_data import RolloutData
from slime.train.step import SKIPPED, TrainedModel


class Critic(TrainedModel):
    """Predicts the return before each response token, and is trained on the observed returns."""

    named, whose, values, rate_flag = "critic-", "the critic, ", "values", "--critic-lr"

    def __init__(self, config: Config, builder: Builder) -> None:
        own, start = critic_flags(config), find_critic_weights(config)
        builder.progress.begin("loading the critic")
        weights = adapter_base_weights(own, start) if uses_lora(own) else start
        super().__init__(own, builder.critic(own, weights), start)

    def train(
        self, rollout_id: int, data: RolloutData, steps: Sequence[Sequence[MicroBatch]], *, warnings: list[str]
    ) -> list[dict[str, float]]:
        """Run one update per step; return metrics under the critic's names."""

        def objective(micro: MicroBatch, values: Tensor, _entropy: Tensor) -> LossOutcome:
            return LossOutcome(*value_loss(micro, values, value_clip=self.config.value_clip))

        found = []
        for step_id, step in enumerate(steps):
            self.state.step += 1
            metrics = self.update(rollout_id, step_id, data, step, objective, warnings)
            found.append({f"train/critic-{SKIPPED}": 1.0} if metrics is None else metrics)
        return found
