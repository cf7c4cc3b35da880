"""Copies of samples that generate functions, which may write into what they get, cannot reach."""

from __future__ import annotations

import copy
from typing import Any

from slime.data.sample import Sample
from slime.rollout.base_types import Produced


def snapshot(member: Produced) -> Produced:
    """A member of a group as it is now."""
    if not isinstance(member, Sample):
        return [_copied(sample) for sample in member]
    return _copied(member)


def _copied(sample: Sample) -> Sample:
    twin = copy.copy(sample)
    for name, value in vars(sample).items():
        setattr(twin, name, _copied_value(value))
    return twin


def _copied_value(value: Any) -> Any:
    if isinstance(value, list) and (not value or isinstance(value[0], int | float)):
        return list(value)  # token ids and log-probs: thousands of numbers, which nothing can change in place
    return copy.deepcopy(value)
