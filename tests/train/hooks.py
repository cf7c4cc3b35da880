"""Training plugins of the kind that users write."""

from __future__ import annotations

import torch


def zero_advantages(args, rollout_data):
    rollout_data["advantages"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def advantages_of_the_wrong_length(args, rollout_data):
    rollout_data["advantages"] = [torch.zeros(n + 1) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def double_advantages(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [2 * a for a in rollout_data["advantages"]]


def likelihood_by_metadata(args, batch, logits, sum_of_sample_mean):
    """Negative log-likelihood, weighted by `train_metadata["weight"]` of each sample."""
    log_p = torch.log_softmax(logits[0].float(), -1)
    parts, begin = [], 0
    for tokens, total, response, facts in zip(
        batch["unconcat_tokens"],
        batch["total_lengths"],
        batch["response_lengths"],
        batch["train_metadata"],
        strict=True,
    ):
        rows = torch.arange(begin + total - response - 1, begin + total - 1)
        parts.append(-facts["weight"] * log_p[rows, tokens[-response:]])
        begin += total
    loss = sum_of_sample_mean(torch.cat(parts))
    return loss, {"samples": torch.tensor(float(len(parts)))}


def half_weights(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    assert [len(t) for t in train_log_probs] == list(response_lengths)
    return 0.5 * pg_loss, loss_masks, {"my_gap": torch.cat(train_log_probs) - torch.cat(rollout_log_probs)}


def constant_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / 16


def convert(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "loss_masks": [s.loss_mask for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "colour": ["red" if s.index % 2 else "blue" for s in samples],
    }


def remembered_rewards(args, samples):
    args.rewards_seen = len(samples)
    rewards = [float(sample.reward) for sample in samples]
    return rewards, rewards


def remembered_advantages(args, rollout_data):
    assert (args.rank, args.world_size, args.context_parallel_size) == (0, 1, 1)
    args.seen = 1.0
    rollout_data["advantages"] = [torch.ones(n) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def what_is_remembered(args, rollout_id, rollout_data):
    args.seen += 1


def remembered_weights(args, *, pg_loss, train_log_probs, loss_masks, **rest):
    args.seen = min(args.seen + 1, 3.0)
    return pg_loss, loss_masks, {"seen": torch.full_like(pg_loss, args.seen)}
