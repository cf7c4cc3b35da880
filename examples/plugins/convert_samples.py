"""Samples to training data, in place of slime's own conversion: no normalisation, and a column of one's own.

    --custom-convert-samples-to-train-data-path examples/plugins/convert_samples.py

`tokens`, `response_lengths` and `rewards` are needed; what else training knows (`loss_masks`, `rollout_ids`,
`rollout_log_probs`, ...) has defaults; any other column reaches custom losses and hooks.
"""


def convert_samples(args, samples):
    """A dict of lists with one entry for each sample."""
    samples = [sample for sample in samples if sample.reward is not None]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) for sample in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status is sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "prompt_lengths": [sample.prompt_length for sample in samples],
    }
