"""Tensors of one forward and backward pass.

Invariant: every per-token tensor has one entry for each response token of the packed row, in the row's order, and a
weight of zero wherever the loss mask is zero. Expert choices (`Routing`) that are known for a token are never
overwritten by a later pass: they come from an engine, or from the router's own first pass over the row. Where none are
known (the last token of a sequence, tokens after the last sampled one, padding) the router chooses in every pass; no
trained token depends on these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.reduce import constant_weights, per_rollout_weights, per_token_weights
from slime.train.samples.batch import TrainBatch
from slime.train.samples.packing import PackedRow, pack

UNKNOWN = -1


class Routing:
    """Expert choices of one micro-batch, which every pass repeats.

    `given` [T, layers, experts per token], int16, on the host, has the engine's choices, or `UNKNOWN` where it has
    none. If it is None, the first pass fills `recorded` [t, experts per token] of this rank's tokens, by layer.
    `counted` has the numbers of compared and of differing router choices. This is not a dataclass because FSDP passes
    copies of dataclasses to modules, and the recorded choices would be lost with the copy.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self.recorded: dict[int, Tensor] = {}
        self.counted: Tensor | None = None

    def forget(self) -> None:
        """Discard the recorded choices: the next pass chooses again; `given` is kept."""
        self.recorded = {}

    def count(self, own: Tensor, chosen: Tensor) -> None:
        """Count the differences between the routers' `own` choices [t, k] in a layer and the `chosen` ones [t, k]."""
        known = (chosen >= 0).sum()
        differing = ((own[:, None, :] != chosen[:, :, None]).all(-1) & (chosen >= 0)).sum()
        found = torch.stack([known, differing]).to(torch.float64)
        self.counted = found if self.counted is None else self.counted + found


def given_experts(rows: Sequence[np.ndarray], lengths: Sequence[int], num_tokens: int) -> Tensor:
    """Pack the experts of sequences as [num_tokens, layers, k]; each sequence has rows for its first tokens."""
    shape = rows[0].shape[1:]
    experts = np.full((num_tokens, *shape), UNKNOWN, dtype=np.int16)
    begin = 0
    for own, length in zip(rows, lengths, strict=True):
        experts[begin : begin + len(own)] = own
        begin += length
    return torch.from_numpy(experts)


def mismatch(routings: Sequence[Routing], device: torch.device) -> Tensor:
    """Return [2]: the numbers of compared and of differing choices since the last call."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for routing in routings:
        if routing.counted is not None:
            total += routing.counted
            routing.counted = None
    return total


@dataclass
class MicroBatch:
    """One packed row and the inputs of the loss for each of its response tokens.

    `positions` are those of its samples in the rank's data, in the row's order; empty for a row that only keeps a rank
    in step with the others. `columns` holds computed values of the tokens (log_probs, advantages ...).
    """

    row: PackedRow
    positions: list[int]
    mask: Tensor
    weights: Tensor  # share of the step's loss; zero where masked
    metric_weights: Tensor  # share of the rollout's per-rollout mean, over all steps
    scale: float  # factor from a sum over samples to a share of the step's loss
    columns: dict[str, Tensor] = field(default_factory=dict)
    importance_scale: float = 1.0  # factor of the importance weights of the step
    train_log_probs: Tensor | None = None  # of the first training forward, if there was no separate pass
    routing: Routing | None = None  # expert choices, if passes repeat them

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.row.response_lengths

    def take(self, name: str, values: Sequence[Tensor]) -> None:
        """Set a column from the per-sample tensors `[response length]` of the rank's data."""
        parts = [values[position] for position in self.positions]
        self.columns[name] = torch.cat(parts).to(self.mask) if parts else torch.zeros_like(self.mask)

    def split_by_sample(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Split a tensor over the row's response tokens into (position, its part on the host)."""
        if not self.positions:
            return []
        return list(zip(self.positions, values.detach().float().cpu().split(self.lengths), strict=True))


@dataclass
class LossOutcome:
    """Result of an objective for one micro-batch: its share of the loss, partial sums and maxima (>= 0) of metrics."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


Objective = Callable[[MicroBatch, Tensor, Tensor], LossOutcome]
"""Loss function of (micro-batch, values or logits, entropies [R]).

The ranks of the last pipeline stage call it once for each micro-batch, in order.
"""


@dataclass(frozen=True)
class StepShare:
    """The divisor of the losses of a step.

    It is the number of rollouts; or of unmasked tokens, if `num_tokens` is set; or of rollouts times `constant_length`.
    """

    num_rollouts: int
    num_tokens: int | None = None
    constant_length: int | None = None

    def weights(self, mask: Tensor, rollout_mask_sums: Tensor) -> Tensor:
        """Compute the weight of each token in the step's loss."""
        if self.num_tokens is not None:
            return per_token_weights(mask, self.num_tokens)
        if self.constant_length is not None:
            return constant_weights(mask, self.constant_length, self.num_rollouts)
        return per_rollout_weights(mask, rollout_mask_sums, self.num_rollouts)

    @property
    def scale(self) -> float:
        return 1.0 / max(self.num_rollouts if self.num_tokens is None else self.num_tokens, 1)


def make_micro_batch(
    batch: TrainBatch,
    positions: Sequence[int],
    share: StepShare,
    total_rollouts: int,
    device: torch.device,
    *,
    multiple: int = 1,
    repeats_routing: bool = False,
    share_prompts: bool = False,
) -> MicroBatch:
    """Pack samples into a micro-batch, those of equal length side by side (they share an attention call on the CPU).

    The row is padded to a `multiple`, so that ranks can split it equally. Without positions the result is a one-token
    row of weight zero, so that the rank joins the collectives. With `repeats_routing` routers follow the engine's
    choices if the batch has them, else those of the first pass. With `share_prompts` the row lists duplicate tokens.
    """
    if not positions:
        zero = torch.zeros(1, device=device)
        row = pack([np.zeros(2, dtype=np.int64)], [1], device, multiple=multiple)
        return MicroBatch(row, [], zero, zero, zero, share.scale)
    ordered = sorted(positions, key=lambda i: len(batch.tokens[i]))
    responses = [batch.response_lengths[i] for i in ordered]
    sequences = [batch.tokens[i] for i in ordered]
    row = pack(sequences, responses, device, multiple=multiple, share_prompts=share_prompts)
    mask = torch.from_numpy(np.concatenate([batch.loss_masks[i] for i in ordered]).astype(np.float32))
    sums = np.repeat([batch.rollout_mask_sums[i] for i in ordered], [batch.response_lengths[i] for i in ordered])
    mask_sums = torch.from_numpy(sums.astype(np.float32))
    routing = Routing() if repeats_routing else None
    if repeats_routing and batch.rollout_routed_experts is not None:
        rows = [batch.rollout_routed_experts[i] for i in ordered]
        routing = Routing(given_experts(rows, [len(tokens) for tokens in sequences], row.num_tokens))
    return MicroBatch(
        row=row,
        positions=ordered,
        mask=mask.to(device),
        weights=share.weights(mask, mask_sums).to(device),
        metric_weights=per_rollout_weights(mask, mask_sums, total_rollouts).to(device),
        scale=share.scale,
        routing=routing,
    )
