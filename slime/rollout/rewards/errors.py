"""The one way a verifier says that it could not judge: an outcome of its own, never a reward of 0."""


class RewardError(Exception):
    """No reward could be found for a sample, for a reason that says nothing about the response."""
