"""Samples that are not trained on, though they count in their group's statistics: the truncated ones.

--rollout-sample-filter-path examples/plugins/sample_filter.py
"""

from slime.rollout.base_types import leaves
from slime.utils.types import Sample


def sample_filter(args, groups):
    """Set `remove_sample`; `leaves` also finds the samples of a fan-out."""
    for sample in leaves(groups):
        if sample.status is Sample.Status.TRUNCATED:
            sample.remove_sample = True
