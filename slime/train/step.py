"""One optimizer step: the losses of all micro-batches, their sum over ranks, and the update.

Invariant: the loss added up over the micro-batches of all ranks is the loss of the whole step, because every token
comes with its final weight; how the step was cut changes nothing. Metrics stay on the device until the step's one
transfer to the host. A loss or gradient that is not finite stops the step before anything is updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.train.backends.protocol import Objective, Reads, Totals, TrainBackend
from slime.train.rates import Rates
from slime.train.samples.micro_batch import MicroBatch
from slime.train.topology import Topology


class NotFinite(Exception):
    """A step whose loss or gradient is no number; the weights are as they were."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm


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
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
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
    values = torch.cat([*found, grad_norm.float().reshape(1)]).tolist()
    return dict(zip([*names, *largest, "grad_norm"], values, strict=True))
