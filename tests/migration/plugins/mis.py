"""Masked importance sampling: weights for the gap between training and inference engine, and rejection.

--custom-config-path mis.yaml --custom-tis-function-path mis.compute_mis_weights_with_cp
"""

import math
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

SAFETY_BOUND = 20.0


def aggregated(log_ratio: torch.Tensor, loss_mask: torch.Tensor, level: str) -> torch.Tensor:
    """The log-ratio of every token at a level."""
    masked = torch.where(loss_mask.bool(), log_ratio, torch.zeros_like(log_ratio))
    if level == "token":
        return masked
    total = masked.sum()
    if level == "geometric":
        total = total / loss_mask.sum().clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"Unknown level: {level}")
    return total.expand_as(log_ratio)


def bounded(ratio: torch.Tensor, args) -> torch.Tensor:
    low, high = args.tis_lower_bound, args.tis_upper_bound
    if args.tis_mode == "truncate":
        return ratio.clamp(max=high)
    if args.tis_mode == "clip":
        return ratio.clamp(min=low, max=high)
    if args.tis_mode == "mask":
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    raise ValueError(f"Unknown tis_mode: {args.tis_mode}")


def kept_tokens(log_ratio: torch.Tensor, loss_mask: torch.Tensor, args) -> torch.Tensor:
    """What rejection leaves of a loss mask."""
    low = args.rs_lower_bound if args.rs_lower_bound is not None else args.tis_lower_bound
    high = args.rs_upper_bound if args.rs_upper_bound is not None else args.tis_upper_bound
    level = args.rs_level if args.rs_level is not None else args.tis_level
    ratio = aggregated(log_ratio, loss_mask, level).exp()
    kept = loss_mask.bool() & (ratio >= low) & (ratio <= high)
    if args.rs_veto_threshold is not None:
        catastrophic = (log_ratio < math.log(args.rs_veto_threshold)) & loss_mask.bool()
        kept = kept & ~catastrophic.any()
    return kept.to(loss_mask.dtype)


def compute_mis_weights(args, *, train_log_probs, rollout_log_probs, loss_masks):
    weights, masks, metrics = [], [], {"ratio": [], "tis_clipped": [], "rejected": []}
    for train, rollout, loss_mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        log_ratio = train.detach() - rollout
        ratio = aggregated(log_ratio, loss_mask, args.tis_level).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
        weight = bounded(ratio, args)
        mask = kept_tokens(log_ratio, loss_mask, args) if args.use_rs else loss_mask
        weights.append(weight)
        masks.append(mask)
        metrics["ratio"].append(ratio)
        metrics["tis_clipped"].append((weight != ratio).float())
        metrics["rejected"].append((loss_mask - mask).float())
    if args.tis_batch_normalize:
        weights = normalized(weights, loss_masks, args.tis_level)
    return (weights if args.use_tis else None), masks, metrics


def normalized(weights, loss_masks, level):
    """Mean weight 1, over tokens or over sequences."""
    if level == "token":
        total = sum((w * m).sum() for w, m in zip(weights, loss_masks, strict=True))
        count = sum(m.sum() for m in loss_masks)
    elif level == "sequence":
        valid = [w[0] for w, m in zip(weights, loss_masks, strict=True) if m.sum() > 0]
        total, count = sum(valid), len(valid)
    else:
        raise ValueError("tis_batch_normalize supports token and sequence only")
    mean = total / max(count, 1)
    return [w / mean for w in weights] if mean > 0 else weights


def compute_mis_weights_with_cp(
    args,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    lengths = list(zip(total_lengths, response_lengths, strict=True))

    def gathered(values):
        return [all_gather_with_cp(v, total, response) for v, (total, response) in zip(values, lengths, strict=True)]

    def sliced(values):
        parts = zip(values, lengths, strict=True)
        return torch.cat([slice_log_prob_with_cp(v, total, response) for v, (total, response) in parts])

    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=gathered(train_log_probs),
        rollout_log_probs=gathered(rollout_log_probs),
        loss_masks=loss_masks,
    )
    if weights is not None:
        pg_loss = pg_loss * sliced(weights)
    return pg_loss, masks, {f"mis_{name}": sliced(values) for name, values in metrics.items()}
