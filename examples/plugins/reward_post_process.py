"""Rewards to log and rewards to train on, in place of the normalisation within groups: centred over all samples.

--custom-reward-post-process-path examples/plugins/reward_post_process.py
"""

from statistics import fmean


def reward_post_process(args, samples):
    """(raw rewards, rewards), one of each for every sample; failed samples have no reward."""
    raw = [0.0 if sample.reward is None else sample.get_reward_value(args) for sample in samples]
    mean = fmean(raw)
    return raw, [reward - mean for reward in raw]
