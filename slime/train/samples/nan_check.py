"""Non-finite values: found, tied to their samples, and written down.

Invariant: training never updates weights from them, and the sample that brought them can be looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.data.validation import keep_bad_sample
from slime.train.samples.rollout_data import PER_TOKEN, RolloutData
from slime.train.topology import Ranks

MOST_NAMED = 4
"""Samples of one rank that a sentence names."""


def check_columns_finite(data: RolloutData, ranks: Ranks, *, rollout_id: int, run_dir: str) -> list[str]:
    """A sentence for each sample of any rank with a number that is not finite at an unmasked token."""
    own: list[str] = []
    for name in PER_TOKEN:
        if name in data and not own:
            column = list(enumerate(data[name]))
            own = name_samples(data, column, f"{name} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    return of_all_ranks(own, ranks)


def of_all_ranks(sentences: Sequence[str], ranks: Ranks) -> list[str]:
    """What all ranks have to say, the same on each; ranks that share samples say the same once."""
    anywhere = bool(ranks.max(torch.tensor([float(bool(sentences))], device=ranks.device)).item())
    return sorted(ranks.union(sentences)) if anywhere else []


def not_finite(column: Sequence[Tensor], masks: Sequence[Tensor]) -> list[int]:
    """Positions of the samples with such a number at an unmasked token.

    A column without any, which nearly all are, is looked at once and not sample by sample.
    """
    if not column or bool(torch.isfinite(torch.cat([values.reshape(-1) for values in column])).all()):
        return []
    return [
        position
        for position, (values, mask) in enumerate(zip(column, masks, strict=True))
        if not bool(torch.isfinite(values[mask != 0]).all())
    ]


def name_samples(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, *, rollout_id: int, run_dir: str
) -> list[str]:
    """Write down the samples whose numbers, of (position, numbers), are not finite; a sentence for each."""
    masks = [data["loss_masks"][position] for position, _ in found]
    bad = not_finite([values for _, values in found], masks)
    named = [_written(data, found[one][0], what, rollout_id=rollout_id, run_dir=run_dir) for one in bad[:MOST_NAMED]]
    return [*named, f"and {len(bad) - MOST_NAMED} more"] if len(bad) > MOST_NAMED else named


def blamed(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, ranks: Ranks, rollout_id: int, run_dir: str
) -> list[str]:
    """Which samples spoilt a step, by what the model says of them now, (position, numbers); the same on all ranks."""
    own = name_samples(data, found, f"{what} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    return of_all_ranks(own, ranks) or _largest_advantage(data, [position for position, _ in found], ranks)


def _largest_advantage(data: RolloutData, positions: Iterable[int], ranks: Ranks) -> list[str]:
    """The sample that moves the step most, where no sample's own numbers are at fault."""
    own = [-1.0, -1.0]
    if "advantages" in data:
        for position in positions:
            values = data["advantages"][position][data["loss_masks"][position] != 0].abs()
            if len(values) and float(values.max()) > own[0]:
                own = [float(values.max()), float(data["sample_indices"][position])]
    size, index = max(part.tolist() for part in ranks.gather(torch.tensor(own, dtype=torch.float64)))
    return [f"no sample's numbers are; sample {index:.0f} has the largest advantage, {size:.3g}"] if size >= 0 else []


def _written(data: RolloutData, position: int, what: str, *, rollout_id: int, run_dir: str) -> str:
    index = data["sample_indices"][position]
    count = len(data["response_lengths"])
    row = {name: _plain(values[position]) for name, values in data.items() if _has(values, count)}
    path = keep_bad_sample(run_dir, rollout_id, index, {"rollout_id": rollout_id, "what": what, **row})
    return f"sample {index} has {what} (see {path})"


def _has(values: Any, count: int) -> bool:
    return isinstance(values, list | Tensor) and len(values) == count


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
