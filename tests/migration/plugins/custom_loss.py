"""GRPO or GSPO with a KL term, put together from the helpers of the Megatron backend.

--loss-type custom_loss --custom-loss-function-path custom_loss.loss_function
"""

import torch

from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
    slice_with_cp,
)
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function
from slime.utils.ppo_utils import compute_approx_kl, compute_gspo_kl, compute_policy_loss


def loss_function(args, batch, logits, sum_of_sample_mean):
    total_lengths, response_lengths = batch["total_lengths"], batch["response_lengths"]
    check(batch, logits)

    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        with_entropy=True,
    )
    log_probs, old_log_probs = found["log_probs"], batch["log_probs"]

    if args.advantage_estimator == "gspo":
        full_log_probs = [
            all_gather_with_cp(log_prob, total_length, response_length)
            for log_prob, total_length, response_length in zip(log_probs, total_lengths, response_lengths, strict=True)
        ]
        full_old_log_probs = [
            all_gather_with_cp(log_prob, total_length, response_length)
            for log_prob, total_length, response_length in zip(
                old_log_probs, total_lengths, response_lengths, strict=True
            )
        ]
        ppo_kl = compute_gspo_kl(full_log_probs, full_old_log_probs, log_probs, batch["loss_masks"])
    else:
        ppo_kl = torch.cat(old_log_probs, dim=0) - torch.cat(log_probs, dim=0)

    advantages = torch.cat(
        [
            slice_log_prob_with_cp(advantage, total_length, response_length)
            for advantage, total_length, response_length in zip(
                batch["advantages"], total_lengths, response_lengths, strict=True
            )
        ]
    )
    pg_loss, pg_clipfrac = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    pg_loss = sum_of_sample_mean(pg_loss)
    entropy_loss = sum_of_sample_mean(torch.cat(found["entropy"], dim=0))
    loss = pg_loss - args.entropy_coef * entropy_loss
    metrics = {"pg_loss": pg_loss.clone().detach(), "pg_clipfrac": sum_of_sample_mean(pg_clipfrac).detach()}

    if args.use_kl_loss:
        kl = compute_approx_kl(
            torch.cat(log_probs, dim=0), torch.cat(batch["ref_log_probs"], dim=0), kl_loss_type=args.kl_loss_type
        )
        kl_loss = sum_of_sample_mean(kl)
        loss = loss + args.kl_loss_coef * kl_loss
        metrics["kl_loss"] = kl_loss.clone().detach()

    with torch.no_grad():
        mean_advantage = get_sum_of_sample_mean(total_lengths, response_lengths, batch["loss_masks"])(advantages)
        shipped, _ = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    metrics.update(
        loss=loss.clone().detach(), my_advantage=mean_advantage, shipped_loss=shipped, my_samples=len(total_lengths)
    )
    return loss, metrics


def check(batch, logits):
    """What the training loop promises about a micro-batch."""
    assert logits.dtype == torch.float32
    assert logits.shape[:2] == batch["tokens"].shape, logits.shape
    assert batch["full_loss_masks"].shape == batch["tokens"].shape
    assert batch["full_loss_masks"].sum() == sum(mask.sum() for mask in batch["loss_masks"])
    params = batch["packed_seq_params"]
    assert params.qkv_format == "thd"
    assert params.max_seqlen_q == max(batch["total_lengths"])
    assert params.cu_seqlens_q.tolist()[0] == 0
    assert len(params.cu_seqlens_q) > len(batch["total_lengths"])
    for tokens, total_length in zip(batch["unconcat_tokens"], batch["total_lengths"], strict=True):
        assert len(slice_with_cp(tokens, 0)) >= total_length
    for key in ("ref_log_probs", "values", "returns", "rollout_log_probs", "multimodal_train_inputs"):
        if batch[key] is not None:
            assert len(batch[key]) == len(batch["total_lengths"])
