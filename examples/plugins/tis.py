"""A correction of one's own between engine and trainer: tokens whose ratio is far from 1 are masked.

--use-tis --custom-tis-function-path examples/plugins/tis.py
"""

import torch


def tis(
    args,
    *,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **kwargs,
):
    """(token losses, masks, metrics per token); lists have one tensor for each sample."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    keep = ((ratio > 0.5) & (ratio < args.tis_clip)).float()
    masks = [mask * kept for mask, kept in zip(loss_masks, keep.split(response_lengths), strict=True)]
    return pg_loss * ratio, masks, {"own_ratio": ratio}
