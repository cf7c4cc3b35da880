"""The tensors of one forward and backward.

Invariant: every per-token tensor has one entry for each response token of the packed row, in the row's order, and a
weight of zero wherever the loss mask is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.reduce import constant_weights, per_rollout_weights, per_token_weights
from slime.train.samples.batch import TrainBatch
from slime.train.samples.packing import PackedRow, pack

# Which experts the tokens of a packed row go to, in every pass that repeats it.
#
# Invariant: what is known of a token's experts is never overwritten by a later pass: an engine's choice, or the
# router's own in the first pass over the row. Where nothing is known (the last token of a sequence, what follows the
# last sampled token, padding) the router chooses each time; no token that is trained on depends on it.

UNKNOWN = -1


class Routing:
    """Of one micro-batch. `given`: [T, layers, experts per token], int16, on the host, `UNKNOWN` where nothing is.

    None where the first pass decides, which leaves `recorded`: [t, experts per token] of this rank's tokens, by layer.
    `counted` are the choices of routers that were compared with what they had to do, and those that differed. No
    dataclass: FSDP hands a module copies of those, and what a pass records would be lost with them.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self.recorded: dict[int, Tensor] = {}
        self.counted: Tensor | None = None

    def forget(self) -> None:
        """The next pass decides; what was given stays."""
        self.recorded = {}

    def count(self, own: Tensor, chosen: Tensor) -> None:
        """`own`: what routers would have chosen for the tokens of a layer, `chosen`: [t, k] what they had to."""
        known = (chosen >= 0).sum()
        differing = ((own[:, None, :] != chosen[:, :, None]).all(-1) & (chosen >= 0)).sum()
        found = torch.stack([known, differing]).to(torch.float64)
        self.counted = found if self.counted is None else self.counted + found


def given_experts(rows: Sequence[np.ndarray], lengths: Sequence[int], num_tokens: int) -> Tensor:
    """[num_tokens, layers, k] of sequences of these lengths side by side, each with its rows of the first tokens."""
    shape = rows[0].shape[1:]
    experts = np.full((num_tokens, *shape), UNKNOWN, dtype=np.int16)
    begin = 0
    for own, length in zip(rows, lengths, strict=True):
        experts[begin : begin + len(own)] = own
        begin += length
    return torch.from_numpy(experts)


def mismatch(routings: Sequence[Routing], device: torch.device) -> Tensor:
    """[2]: choices that were compared, and those that differed, since the last call."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for routing in routings:
        if routing.counted is not None:
            total += routing.counted
            routing.counted = None
    return total


@dataclass
class MicroBatch:
    """One packed row and, for each of its response tokens, what the loss needs.

    `positions` are those of its samples in the rank's data, in the row's order; none for a row that only keeps a rank
    in step with the others. `columns` holds what was computed for the tokens (log_probs, advantages ...).
    """

    row: PackedRow
    positions: list[int]
    mask: Tensor
    weights: Tensor  # share of the step's loss; zero where masked
    metric_weights: Tensor  # share of the rollout's per-rollout mean, over all steps
    scale: float  # what a sum over samples is divided by to become a share of the step's loss
    columns: dict[str, Tensor] = field(default_factory=dict)
    importance_scale: float = 1.0  # what the importance weights of the step are multiplied by
    train_log_probs: Tensor | None = None  # of the first training forward, when no separate pass was made
    routing: Routing | None = None  # which experts its tokens go to, where that is repeated

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.row.response_lengths

    def take(self, name: str, values: Sequence[Tensor]) -> None:
        """Make a column of per-sample tensors `[response length]` of the rank's data."""
        parts = [values[position] for position in self.positions]
        self.columns[name] = torch.cat(parts).to(self.mask) if parts else torch.zeros_like(self.mask)

    def give(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """(position, its part on the host) for a tensor over the row's response tokens."""
        if not self.positions:
            return []
        return list(zip(self.positions, values.detach().float().cpu().split(self.lengths), strict=True))


@dataclass(frozen=True)
class StepShare:
    """What the losses of a step are divided by.

    Its rollouts; or its unmasked tokens, when `num_tokens` is given; or its rollouts times `constant_length`.
    """

    num_rollouts: int
    num_tokens: int | None = None
    constant_length: int | None = None

    def weights(self, mask: Tensor, rollout_mask_sums: Tensor) -> Tensor:
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
    """Pack some samples, those of equal length side by side (they share an attention call on the CPU).

    The row is padded to a `multiple`, which ranks that share it can part. No positions give a one-token row of weight
    zero, so that the rank joins the collectives. With `repeats_routing` routers follow what the engine chose, where the
    batch says, else what they choose in the first pass. With `share_prompts` the row says which tokens are the same.
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
    return MicroBatch(
        row=row,
        positions=ordered,
        mask=mask.to(device),
        weights=share.weights(mask, mask_sums).to(device),
        metric_weights=per_rollout_weights(mask, mask_sums, total_rollouts).to(device),
        scale=share.scale,
        routing=_routing_of(batch, ordered, row.num_tokens) if repeats_routing else None,
    )


def _routing_of(batch: TrainBatch, positions: Sequence[int], num_tokens: int) -> Routing:
    if batch.rollout_routed_experts is None:
        return Routing()
    rows = [batch.rollout_routed_experts[i] for i in positions]
    return Routing(given_experts(rows, [len(batch.tokens[i]) for i in positions], num_tokens))
