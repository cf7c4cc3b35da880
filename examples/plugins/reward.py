"""A reward of one sample: 1 when the response holds the label.

    --custom-rm-path examples/plugins/reward.py

A plain function runs in a thread and may take its time; `async def` is awaited. Raising fails the sample, which is
then left out of training; a reward of 0 says that the answer is wrong.
"""


def reward(args, sample):
    """A number, or a dict of which --reward-key names an entry."""
    return float(str(sample.label) in sample.response)
