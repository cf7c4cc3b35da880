"""One optimizer step: the losses of all micro-batches, their sum over ranks, and the update.

Invariant: the loss added up over the micro-batches of all ranks is the loss of the whole step, because every token
comes with its final weight; how the step was cut changes nothing. Metrics stay on the device until the step's one
transfer to the host. A loss or gradient that is not finite on one rank stops the step on all of them, before anything
is updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.train.backends.protocol import Objective, Reads, Totals, TrainBackend
from slime.train.lr_schedule import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.topology import Topology

SKIPPED = "skipped_steps"
"""Metric: 1 for a step without an update, whose loss or gradient was not finite."""


class NotFinite(Exception):
    """A step whose loss or gradient is not finite, raised on all ranks; weights and moments are as they were."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm

    def sentence(self, where: str, names: Sequence[str], rate: str) -> str:
        """What a user is told, with the samples by name."""
        by_whom = f": {'; '.join(names)}" if names else ""
        return (
            f"{where}: no update, the loss is {self.loss:g} and the gradient norm {self.grad_norm:g}{by_whom}; look at "
            f"the tokens, log-probs and rewards, or lower {rate}"
        )


def train_step(
    backend: TrainBackend,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    rates: Rates,
    *,
    reads: Reads = "log_probs",
    entropy: bool = False,
) -> dict[str, float]:
    """Forward and backward over all micro-batches of this rank, then one clipped update; metrics of the whole step."""
    totals = backend.forward_backward(micro_batches, objective, reads=reads, entropy=entropy)
    grad_norm = backend.clip_gradients()
    metrics = _on_host(backend.topology, totals, grad_norm)
    if metrics[SKIPPED] or not math.isfinite(metrics["loss"]):
        backend.drop_gradients()
        raise NotFinite(metrics["loss"], metrics["grad_norm"])
    backend.update(rates)
    return metrics


def _on_host(topology: Topology, totals: Totals, grad_norm: Tensor) -> dict[str, float]:
    """Reduce over ranks and read everything at once; ranks may have seen different names, in any order."""
    names, largest = sorted(topology.world.union(totals.sums)), sorted(topology.world.union(totals.maxima))
    zero = grad_norm.float().new_zeros(())
    found = []
    if names:
        found.append(topology.total(torch.stack([totals.sums.get(name, zero).float() for name in names])))
    if largest:
        found.append(topology.largest(torch.stack([totals.maxima.get(name, zero).float() for name in largest])))
    norm = grad_norm.float().reshape(1)
    not_finite = topology.world.max((~torch.isfinite(norm)).float())  # norms may differ between parts of a model
    values = torch.cat([*found, norm, not_finite]).tolist()
    return dict(zip([*names, *largest, "grad_norm", SKIPPED], values, strict=True))
