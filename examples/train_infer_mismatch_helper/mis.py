"""Masked importance sampling between engine and trainer, with its settings in a YAML file of its own.

--use-tis with --tis-level, --tis-mode, --use-rs and --rs-* does the same without this file; it is here for commands
that name it:

    --custom-config-path examples/train_infer_mismatch_helper/mis.yaml
    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp
"""

import torch

from slime.algorithms.importance import importance_weights, rejection_mask, unit_mean_scale, weight_sums


def compute_mis_weights_with_cp(
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
    """(token losses times their weights, masks without what is rejected, metrics by token)."""
    train, rollout, mask = (torch.cat(list(parts)) for parts in (train_log_probs, rollout_log_probs, loss_masks))
    found = importance_weights(
        train,
        rollout,
        mask,
        response_lengths,
        level=args.tis_level,
        mode=args.tis_mode,
        lower=args.tis_lower_bound,
        upper=args.tis_upper_bound,
    )
    weights = found.weights
    if args.tis_batch_normalize:
        if args.tis_level == "geometric":
            raise ValueError("tis_batch_normalize is defined for tis_level token and sequence")
        weights = weights * unit_mean_scale(*weight_sums(weights, mask, response_lengths, args.tis_level).tolist())
    metrics = {
        "mis_ratio": found.ratio,
        "mis_weight": weights,
        "mis_out_of_bounds": found.out_of_bounds,
    }
    masks = list(loss_masks)
    if args.use_rs:
        kept = rejection_mask(
            train,
            rollout,
            mask,
            response_lengths,
            level=args.rs_level or args.tis_level,
            lower=args.tis_lower_bound if args.rs_lower_bound is None else args.rs_lower_bound,
            upper=args.tis_upper_bound if args.rs_upper_bound is None else args.rs_upper_bound,
            veto_threshold=args.rs_veto_threshold,
        )
        masks = list(kept.split(list(response_lengths)))
        metrics["mis_rejected"] = (mask != 0).float() - kept
    return pg_loss * weights if args.use_tis else pg_loss, masks, metrics
