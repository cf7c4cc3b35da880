"""Which finished groups are worth training on: those whose best response got some reward.

    --dynamic-sampling-filter-path examples/plugins/dynamic_filter.py --over-sampling-batch-size 8

A dropped group is replaced by another prompt's; the reason is counted in rollout/dynamic_filter/drop_<reason>.
"""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput


def dynamic_filter(args, samples):
    """Keep a group, or say why not. `keep_when_insufficient` keeps it rather than asking for more prompts."""
    best = max(sample.get_reward_value(args) for sample in samples)
    return DynamicFilterOutput(keep=best > 0, reason="hopeless", keep_when_insufficient=True)
