"""Runs one optimizer step: the losses of all micro-batches, their sum over ranks, and the update.

Invariant: the sum of the losses over the micro-batches of all ranks is the loss of the whole step, because every token
carries its final weight; the split into micro-batches does not matter. Metrics stay on the device until one transfer to
the host per step. A loss or gradient that is not finite on one rank cancels the step on all ranks, before any update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.config import Config
from slime.config.initial_weights import InitialWeights
from slime.train.backend import Objective, ObjectiveInput, TrainBackend
from slime.train.checkpoints.folder import CheckpointFolder, TrainState
from slime.train.checkpoints.writer import CheckpointDraft
from slime.train.lr_schedule import Rates, RateSchedule
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.nan_check import report_nonfinite
from slime.train.samples.rollout_data import RolloutData

SKIPPED = "skipped_steps"
"""Metric: 1 for a step without an update, because its loss or gradient was not finite."""


class NotFinite(Exception):
    """Raised on all ranks when the loss or gradient is not finite; weights and moments are unchanged."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm

    def sentence(self, where: str, names: Sequence[str], rate: str) -> str:
        """Format a warning for the user that lists the samples."""
        causes = f": {'; '.join(names)}" if names else ""
        return (
            f"{where}: no update, the loss is {self.loss:g} and the gradient norm {self.grad_norm:g}{causes}; check "
            f"the tokens, log-probs and rewards, or lower {rate}"
        )


class TrainedModel:
    """A model in training with its schedule, its counters and its checkpoints: the policy, or the critic."""

    named = ""
    """Prefix of the metrics' names."""
    whose = ""
    """Beginning of the sentences of warnings."""
    values = "log-probs"
    """What the model computes for each response token."""
    rate_flag = "--lr"

    def __init__(self, config: Config, backend: TrainBackend, start: InitialWeights, *, without: int = 0) -> None:
        """Load counters, optimizer and frozen sets if `start` resumes; `without`: rollouts that do not train it."""
        self.config = config
        self.backend = backend
        self.topology = backend.topology
        self.rates = RateSchedule(config, without=without)
        self.state = TrainState()
        if start.resumes and start.checkpoint is not None:
            self.state = CheckpointFolder(start.checkpoint).load(backend, config, sets=self.saved_sets)

    @property
    def saved_sets(self) -> list[str]:
        """Names of the frozen sets that a checkpoint must contain."""
        return []

    def token_values(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, Tensor]]:
        """Compute (sample, the values of its tokens) for all samples of the micro-batches."""
        scores = zip(micro_batches, self.backend.forward(micro_batches), strict=True)
        return [part for micro, found in scores for part in micro.split_by_sample(found.values)]

    def update(
        self,
        rollout_id: int,
        step_id: int,
        data: RolloutData,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        warnings: list[str],
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = False,
    ) -> dict[str, float] | None:
        """Run optimizer step `step_id` of a rollout; return its metrics.

        Returns None for a step without an update, whose reason is added to `warnings`.
        """
        rates = self.rates.at(self.state.updates)
        self.backend.begin_step(rollout_id, step_id, rates)
        try:
            metrics = train_step(self.backend, micro_batches, objective, rates, reads=reads, entropy=entropy)
        except NotFinite as found:
            parts = self.token_values(micro_batches)  # repeats the forward; all ranks take part
            world, run_dir = self.topology.world, self.config.output_dir or "."
            names = report_nonfinite(data, parts, self.values, world, rollout_id, run_dir)
            where = f"{self.whose}rollout {rollout_id}, step {step_id}"
            warnings.append(found.sentence(where, names, self.rate_flag))
            return None
        self.state.updates += 1
        named = {f"train/{self.named}{name}": value for name, value in metrics.items()}
        return named | {f"train/{self.named}lr-pg_0": rates.learning_rate}

    def draft(self, rollout_id: int, folder: Path) -> CheckpointDraft:
        """Prepare a checkpoint; nothing is written yet."""
        self.state.next_rollout_id = rollout_id + 1
        return CheckpointFolder.draft(folder, rollout_id, self.backend, self.state, self.config, sets=self.saved_sets)


def train_step(
    backend: TrainBackend,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    rates: Rates,
    *,
    reads: ObjectiveInput = "log_probs",
    entropy: bool = False,
) -> dict[str, float]:
    """Run forward and backward over this rank's micro-batches, then one clipped update; return the step's metrics."""
    totals = backend.forward_backward(micro_batches, objective, reads=reads, entropy=entropy)
    grad_norm = backend.clip_gradients()
    world = backend.topology.world
    # ranks may have different names, in any order; all values are copied to the host at once
    names, largest = sorted(world.union(totals.sums)), sorted(world.union(totals.maxima))
    zero = grad_norm.float().new_zeros(())
    found = []
    if names:
        sums = torch.stack([totals.sums.get(name, zero).float() for name in names])
        found.append(backend.topology.total(sums))
    if largest:
        maxima = torch.stack([totals.maxima.get(name, zero).float() for name in largest])
        found.append(backend.topology.largest(maxima))
    norm = grad_norm.float().reshape(1)
    not_finite = world.max((~torch.isfinite(norm)).float())  # norms may differ between model parts
    values = torch.cat([*found, norm, not_finite]).tolist()
    metrics = dict(zip([*names, *largest, "grad_norm", SKIPPED], values, strict=True))
    if metrics[SKIPPED] or not math.isfinite(metrics["loss"]):
        backend.drop_gradients()
        raise NotFinite(metrics["loss"], metrics["grad_norm"])
    backend.update(rates)
    return metrics
