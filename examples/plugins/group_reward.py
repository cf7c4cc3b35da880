"""Rewards of all samples of a prompt at once: 1 for the longest responses.

--custom-rm-path examples/plugins/group_reward.py --group-rm
"""


async def group_reward(args, samples):
    """One reward for each sample, in their order."""
    longest = max(sample.response_length for sample in samples)
    return [float(sample.response_length == longest) for sample in samples]
