"""Runs one optimizer step: the losses of all micro-batches, their sum over ranks, and the update.

Invariant: the sum of the losses over the micro-batches of all ranks is the loss of the whole step, because every token
carries its final weight; the split into micro-batches does not matter. Metrics stay on the device until one transfer to
the host per step. A loss or gradient that is not finite on one rank cancels the step on all ranks, before any update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime.train.backend import Objective, ObjectiveInput, TrainBackend
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch

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
