"""The value model of PPO, with its own weights, optimizer, learning rate and checkpoints, on the policy's devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from slime.config import Config
from slime.config.critic import critic_flags
from slime.config.initial_weights import adapter_base_weights, find_critic_weights
from slime.config.lora import uses_lora
from slime.train.backend import Builder, LossOutcome
from slime.train.checkpoints.folder import CheckpointFolder, TrainState
from slime.train.checkpoints.writer import CheckpointDraft
from slime.train.losses.objectives import value_loss
from slime.train.lr_schedule import RateSchedule
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.nan_check import report_nonfinite
from slime.train.samples.rollout_data import RolloutData
from slime.train.step import SKIPPED, NotFinite, train_step


class Critic:
    """Predicts the return before each response token, and is trained on the observed returns."""

    def __init__(self, config: Config, builder: Builder) -> None:
        self.config = critic_flags(config)
        start = find_critic_weights(config)
        builder.progress.begin("loading the critic")
        self.backend = builder.critic(
            self.config, adapter_base_weights(self.config, start) if uses_lora(self.config) else start
        )
        self.rates = RateSchedule.from_config(self.config)
        self.state = TrainState()
        if start.resumes and start.checkpoint is not None:
            self.state = CheckpointFolder(start.checkpoint).load(self.backend, self.config)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, Tensor]]:
        """Compute (sample, its values) for all samples of the micro-batches."""
        scores = self.backend.forward(micro_batches)
        return [
            part
            for micro, found in zip(micro_batches, scores, strict=True)
            for part in micro.split_by_sample(found.values)
        ]

    def train(
        self, rollout_id: int, data: RolloutData, steps: Sequence[Sequence[MicroBatch]], *, warnings: list[str]
    ) -> list[dict[str, float]]:
        """Run one update per step; return metrics under the critic's names."""
        return [self._step(rollout_id, data, step, step_id, warnings) for step_id, step in enumerate(steps)]

    def draft(self, rollout_id: int, folder: Path) -> CheckpointDraft:
        """Prepare a checkpoint; nothing is written yet."""
        self.state.next_rollout_id = rollout_id + 1
        return CheckpointFolder.draft(folder, rollout_id, self.backend, self.state, self.config)

    def _step(
        self,
        rollout_id: int,
        data: RolloutData,
        micro_batches: Sequence[MicroBatch],
        step_id: int,
        warnings: list[str],
    ) -> dict[str, float]:
        def objective(micro: MicroBatch, values: Tensor, _entropy: Tensor) -> LossOutcome:
            loss, sums = value_loss(micro, values, value_clip=self.config.value_clip)
            return LossOutcome(loss, sums)

        rates = self.rates.at(self.state.updates)
        self.backend.begin_step(rollout_id, step_id, rates)
        self.state.step += 1
        try:
            metrics = train_step(self.backend, micro_batches, objective, rates)
        except NotFinite as found:
            values = self.values(micro_batches)  # repeats the forward; all ranks take part
            names = report_nonfinite(
                data, values, "values", self.backend.topology.world, rollout_id, self.config.output_dir or "."
            )
            where = f"the critic, rollout {rollout_id}, step {step_id}"
            warnings.append(found.sentence(where, names, "--critic-lr"))
            return {f"train/critic-{SKIPPED}": 1.0}
        self.state.updates += 1
        named = {f"train/critic-{name}": value for name, value in metrics.items()}
        return named | {"train/critic-lr-pg_0": rates.learning_rate}
