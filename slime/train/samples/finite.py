"""Numbers that are none: found, tied to their sample, and written down.

Invariant: training never updates weights from them, and the sample that brought them can be looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.data.bad_sample import keep_bad_sample
from slime.errors import UserError
from slime.train.samples.rollout_data import PER_TOKEN, RolloutData
from slime.train.topology import Ranks


def check_columns_finite(data: RolloutData, ranks: Ranks, *, rollout_id: int, run_dir: str) -> None:
    """Every per-token number of an unmasked token is finite, on all ranks; else dump the sample and stop."""
    found = None
    for name in PER_TOKEN:
        if name in data and found is None:
            position = first_not_finite(data[name], data["loss_masks"])
            found = None if position is None else (position, name)
    if not _anywhere(found is not None, ranks):
        return
    if found is None:
        raise UserError("another training process found numbers that are not finite: its message says which")
    position, name = found
    raise UserError(blame(data, position, f"{name} that are not finite", rollout_id=rollout_id, run_dir=run_dir))


def first_not_finite(column: Sequence[Tensor], masks: Sequence[Tensor]) -> int | None:
    """Position of the first sample with such a number at an unmasked token.

    A column without any, which nearly all are, is looked at once and not sample by sample.
    """
    if not column or bool(torch.isfinite(torch.cat([values.reshape(-1) for values in column])).all()):
        return None
    for position, (values, mask) in enumerate(zip(column, masks, strict=True)):
        if not bool(torch.isfinite(values[mask != 0]).all()):
            return position
    return None


def blame_one(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, *, rollout_id: int, run_dir: str
) -> str | None:
    """Write down the first sample whose numbers, of (position, numbers), are not finite; None if they all are."""
    masks = [data["loss_masks"][position] for position, _ in found]
    bad = first_not_finite([values for _, values in found], masks)
    return None if bad is None else blame(data, found[bad][0], what, rollout_id=rollout_id, run_dir=run_dir)


def blame(data: RolloutData, position: int, what: str, *, rollout_id: int, run_dir: str) -> str:
    """Write the sample down; the sentence that names it."""
    index = data["sample_indices"][position]
    count = len(data["response_lengths"])
    row = {name: _plain(values[position]) for name, values in data.items() if _has(values, count)}
    path = keep_bad_sample(run_dir, rollout_id, index, {"rollout_id": rollout_id, "what": what, **row})
    return (
        f"sample {index} of rollout {rollout_id} has {what}; nothing was updated, the sample is in {path}: look at its "
        "tokens, log-probs and reward, or lower --lr"
    )


def _anywhere(here: bool, ranks: Ranks) -> bool:
    return bool(ranks.max(torch.tensor([float(here)], device=ranks.device)).item())


def _has(values: Any, count: int) -> bool:
    return isinstance(values, list | Tensor) and len(values) == count


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
