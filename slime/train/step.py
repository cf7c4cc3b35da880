"""One optimizer step: the losses of all micro-batches, their sum over ranks, and the update.

Invariant: the loss added up over the micro-batches of all ranks is the loss of the whole step, because every token
comes with its final weight; how the step was cut changes nothing. Metrics stay on the device until the step's one
transfer to the host. A loss or gradient that is not finite stops the step before anything is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.train.backends.protocol import TrainBackend
from slime.train.rates import Rates
from slime.train.samples.micro_batch import MicroBatch


class NotFinite(Exception):
    """A step whose loss or gradient is no number; the weights are as they were."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm


@dataclass
class Outcome:
    """What one micro-batch contributes: its share of the loss, partial sums of metrics, and maxima."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


Objective = Callable[[MicroBatch], Outcome]
"""Runs the model on a micro-batch and measures it."""


def train_step(
    backend: TrainBackend, micro_batches: Sequence[MicroBatch], objective: Objective, rates: Rates
) -> dict[str, float]:
    """Forward and backward over all micro-batches of this rank, then one clipped update; metrics of the whole step."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for index, micro in enumerate(backend.progress.over(micro_batches, "update: micro-batch", len(micro_batches))):
        backend.begin_micro_batch(last=index == len(micro_batches) - 1)
        outcome = objective(micro)
        outcome.loss.backward()
        for name, value in outcome.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in outcome.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    grad_norm = backend.clip_gradients()
    metrics = _on_host(backend, sums, maxima, grad_norm)
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
        backend.drop_gradients()
        raise NotFinite(metrics["loss"], metrics["grad_norm"])
    backend.update(rates)
    return metrics


def _on_host(
    backend: TrainBackend, sums: dict[str, Tensor], maxima: dict[str, Tensor], grad_norm: Tensor
) -> dict[str, float]:
    """Reduce over ranks and read everything at once; ranks may have seen different names, in any order."""
    names, largest = sorted(backend.ranks.union(sums)), sorted(backend.ranks.union(maxima))
    zero = grad_norm.float().new_zeros(())
    vector = [sums[name].float() if name in sums else zero for name in names]
    found = [backend.ranks.sum(torch.stack(vector))] if vector else []
    if largest:
        found.append(backend.ranks.max(torch.stack([maxima.get(name, zero).float() for name in largest])))
    values = torch.cat([*found, grad_norm.float().reshape(1)]).tolist()
    return dict(zip([*names, *largest, "grad_norm"], values, strict=True))
