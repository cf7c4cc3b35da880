"""Something done with every sample after generation, before its reward: the thinking is cut from the response text.

    --rollout-sample-hook-path examples/plugins/sample_hook.py

May be given several times; the hooks are called in that order. Tokens stay as they were sampled.
"""


def sample_hook(args, sample, *, rollout_id=None, evaluation=False):
    """The sample, another one in its place, or nothing; may be async."""
    sample.metadata["whole_response"] = sample.response
    sample.metadata["sampled_in"] = rollout_id
    sample.response = sample.response.rpartition("</think>")[2]
