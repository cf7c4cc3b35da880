"""Staleness of groups: the difference between the weights that sampled a group and those trained on it.

The staleness of a sample in rollout r is r minus the oldest weight version among its trained tokens. Weights of version
r are trained on rollout r, so a synchronous run has staleness 0 throughout. Versions that are not numbers (from
external engines) are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.outcomes import Group, leaves, reset_to_prompt


def group_version(group: Group) -> int | None:
    """Return the oldest weight version that sampled a trained token of the group; None if no token has a version."""
    versions = [sample.oldest_weight_version for sample in leaves(group)]
    return min((version for version in versions if version is not None), default=None)


def is_stale(args: Config, group: Group, rollout_id: int) -> bool:
    """Return whether a group exceeds `--max-weight-staleness` in this rollout."""
    return is_too_old(args, group_version(group), rollout_id)


def is_too_old(args: Config, version: int | None, rollout_id: int) -> bool:
    """Return whether a weight version exceeds `--max-weight-staleness` in this rollout."""
    bound = args.max_weight_staleness
    return bound is not None and version is not None and rollout_id - version > bound


def prompts_of(group: Group) -> Group | None:
    """Reset a group to its prompts for regeneration; None if a member is a fan-out, whose prompt no longer exists."""
    if not all(isinstance(member, Sample) for member in group):
        return None
    for sample in leaves(group):
        reset_to_prompt(sample)
        sample.metadata.pop("start_rollout_id", None)
    return group


def staleness_metrics(samples: Sequence[Sample], rollout_id: int) -> dict[str, float]:
    """Return the staleness metrics of samples.

    These are the mean and largest staleness, the share of trained tokens that older weights sampled, and the share of
    samples whose tokens were sampled by several weight versions.
    """
    known = [version for sample in samples if (version := sample.oldest_weight_version) is not None]
    if not known:
        return {}
    old, trained = 0, 0
    mixed: list[bool] = []
    for sample in samples:
        trained += sample.effective_response_length
        position, mask = 0, sample.loss_mask_array()
        for version, length in sample.version_spans:
            if version is not None and version.isdigit() and int(version) < rollout_id:
                old += length if mask is None else int(mask[position : position + length].sum())
            position += length
        mixed.append(len({version for version, _ in sample.version_spans if version is not None}) > 1)
    return {
        "rollout/staleness/mean": fmean(rollout_id - version for version in known),
        "rollout/staleness/max": float(rollout_id - min(known)),
        "rollout/off_policy_token_frac": old / trained if trained else 0.0,
        "rollout/mixed_version_frac": fmean(mixed),
    }
