"""A reward model as a class: made once, then asked with lists of prompts and responses.

    --custom-rm-path examples/plugins/class_reward.py --custom-config-path mine.yaml

The constructor gets `args` (the config) and, by their names, flags and entries of --custom-config-path: here
`wanted_words: [sum, total]`. `compute_reward` may be async; it gets `labels` and `samples` too if it has them.
"""


class WordReward:
    """Counts words that responses should hold."""

    def __init__(self, wanted_words=("answer",)):
        self.wanted = list(wanted_words)

    def compute_reward(self, prompts, responses):
        """The share of the wanted words in each response."""
        return [sum(word in response for word in self.wanted) / len(self.wanted) for response in responses]
