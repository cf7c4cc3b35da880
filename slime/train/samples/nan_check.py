"""Finds non-finite values, identifies their samples, and saves these for inspection.

Invariant: training never updates weights from non-finite values, and the samples that caused them are on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.data.validation import keep_bad_sample
from slime.train.samples.rollout_data import PER_TOKEN, RolloutData
from slime.train.topology import Ranks

MAX_REPORTED_SAMPLES = 4
"""Maximum number of samples that one rank reports."""


def check_columns_finite(data: RolloutData, ranks: Ranks, *, rollout_id: int, run_dir: str) -> list[str]:
    """Return a sentence for each sample of any rank with a non-finite number at an unmasked token."""
    own: list[str] = []
    for name in PER_TOKEN:
        if name in data and not own:
            column = list(enumerate(data[name]))
            own = report_samples(data, column, f"{name} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    return collect_sentences(own, ranks)


def collect_sentences(sentences: Sequence[str], ranks: Ranks) -> list[str]:
    """Collect the sentences of all ranks, equal on each rank; duplicates of ranks that share samples are dropped."""
    anywhere = bool(ranks.max(torch.tensor([float(bool(sentences))], device=ranks.device)).item())
    return sorted(ranks.union(sentences)) if anywhere else []


def not_finite(column: Sequence[Tensor], masks: Sequence[Tensor]) -> list[int]:
    """Return the positions of samples with a non-finite number at an unmasked token.

    A column without any, the common case, is checked in one call and not sample by sample.
    """
    if not column or bool(torch.isfinite(torch.cat([values.reshape(-1) for values in column])).all()):
        return []
    return [
        position
        for position, (values, mask) in enumerate(zip(column, masks, strict=True))
        if not bool(torch.isfinite(values[mask != 0]).all())
    ]


def report_samples(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, *, rollout_id: int, run_dir: str
) -> list[str]:
    """Save the samples whose numbers, in `found` (position, numbers), are not finite; return a sentence for each."""
    masks = [data["loss_masks"][position] for position, _ in found]
    bad = not_finite([values for _, values in found], masks)
    sentences = []
    for one in bad[:MAX_REPORTED_SAMPLES]:
        position = found[one][0]
        index, count = data["sample_indices"][position], len(data["response_lengths"])
        facts = {"rollout_id": rollout_id, "what": what}
        for name, values in data.items():
            if isinstance(values, list | Tensor) and len(values) == count:
                value = values[position]
                facts[name] = value.tolist() if isinstance(value, Tensor) else value
        path = keep_bad_sample(run_dir, rollout_id, index, facts)
        sentences.append(f"sample {index} has {what} (see {path})")
    return [*sentences, f"and {len(bad) - MAX_REPORTED_SAMPLES} more"] if len(bad) > MAX_REPORTED_SAMPLES else sentences


def report_nonfinite(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, ranks: Ranks, rollout_id: int, run_dir: str
) -> list[str]:
    """Report the samples that made a step non-finite, from the model's current numbers `found` (position, numbers).

    The result is equal on all ranks. Without such a sample, the sample with the largest advantage is reported.
    """
    own = report_samples(data, found, f"{what} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    if sentences := collect_sentences(own, ranks):
        return sentences
    largest = [-1.0, -1.0]
    for position, _ in found if "advantages" in data else ():
        values = data["advantages"][position][data["loss_masks"][position] != 0].abs()
        if len(values) and float(values.max()) > largest[0]:
            largest = [float(values.max()), float(data["sample_indices"][position])]
    size, index = max(part.tolist() for part in ranks.gather(torch.tensor(largest, dtype=torch.float64)))
    if size >= 0:
        return [f"no sample has non-finite numbers; sample {index:.0f} has the largest advantage, {size:.3g}"]
    return []
