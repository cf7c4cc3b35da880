"""Tests the policy loss and its gradient against per-token formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, derive
from slime.train.losses.policy import PolicyObjective
from slime.train.samples.micro_batch import MicroBatch, StepShare
from slime.train.samples.packing import PackedLayout, PackedRow

Sequences = list[list[torch.Tensor]]

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "clip_higher_dual": {"eps_clip": 0.1, "eps_clip_high": 0.4, "eps_clip_c": 1.5},
    "entropy_and_kl": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    "kl_k2_unbiased": {"use_kl_loss": True, "kl_loss_coef": 0.7, "kl_loss_type": "k2", "use_unbiased_kl": True},
    "kl_unbiased_gspo": {
        "advantage_estimator": "gspo",
        "use_kl_loss": True,
        "kl_loss_coef": 0.7,
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
    },
    "kl_unbiased_clamped": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.7,
        "kl_loss_type": "low_var_kl",
        "use_unbiased_kl": True,
    },
    "kl_clamped": {"use_kl_loss": True, "kl_loss_coef": 0.7, "kl_loss_type": "low_var_kl"},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05},
    "gspo_of_rloo": {"advantage_estimator": "rloo", "policy_loss": "gspo", "eps_clip": 0.05},
    "clip_of_cispo": {"advantage_estimator": "cispo", "policy_loss": "ppo"},
    "gspo_opsm": {"advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 0.05},
    "opsm": {"use_opsm": True, "opsm_delta": 0.05},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.3},
    "rollout_log_probs": {"use_rollout_logprobs": True},
    "tis": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8},
    "tis_truncate_sequence": {"use_tis": True, "tis_level": "sequence", "tis_mode": "truncate", "tis_clip": 1.5},
    "icepop": {"use_tis": True, "tis_mode": "mask", "tis_clip": 1.3, "tis_clip_low": 0.7},
    "mis_geometric_rejection": {
        "use_tis": True,
        "tis_level": "geometric",
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.9,
        "rs_upper_bound": 1.1,
        "rs_veto_threshold": 0.5,
    },
    "rejection_entropy_and_kl": {
        "use_rs": True,
        "rs_level": "token",
        "rs_lower_bound": 0.8,
        "rs_upper_bound": 1.2,
        "entropy_coef": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "kl_loss_type": "k2",
    },
    "only_looking": {"get_mismatch_metrics": True},
}


def reference(config: Config, rows: Sequences, weights: Sequences) -> torch.Tensor:
    """Loss token by token; `rows` holds [log_probs, old, rollout, ref, advantage, entropy, mask] by sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for (lp, old, rollout, ref, adv, entropy, mask), (weight,) in zip(rows, weights, strict=True):
        base = rollout if config.use_rollout_logprobs else old
        used = [t for t in range(len(lp)) if mask[t]]
        count = max(len(used), 1)
        mean_ratio = sum((lp[t] - base[t] for t in used), torch.zeros((), dtype=torch.float64)) / count
        for t in used:
            log_ratio = mean_ratio if config.policy_loss == "gspo" else lp[t] - base[t]
            ratio = torch.exp(log_ratio)
            low, high = 1 - config.eps_clip, 1 + config.eps_clip_high
            if config.policy_loss == "cispo":
                loss = -torch.clamp(ratio.detach(), low, high) * adv[t] * lp[t]
            else:
                loss = torch.maximum(-ratio * adv[t], -torch.clamp(ratio, low, high) * adv[t])
                if config.eps_clip_c is not None and adv[t] < 0:
                    loss = torch.minimum(loss, -config.eps_clip_c * adv[t])
            drift = sum(float(rollout[i] - lp[i]) for i in used) / count
            if config.use_opsm and adv[t] < 0 and drift > config.opsm_delta:
                loss = loss * 0.0
            gaps = [float(old[i] - rollout[i]) for i in used]
            loss = loss * importance(config, gaps, used.index(t))
            kl = torch.zeros((), dtype=torch.float64)
            if config.use_kl_loss:
                d = lp[t] - ref[t]
                kl = {
                    "k1": d,
                    "k2": d * d / 2,
                    "k3": torch.exp(-d) - 1 + d,
                    "low_var_kl": torch.exp(-d) - 1 + d,
                }[config.kl_loss_type]
                kl = kl * torch.exp(lp[t] - base[t]) if config.use_unbiased_kl else kl
                kl = torch.clamp(kl, -10, 10) if config.kl_loss_type == "low_var_kl" else kl
            terms = loss - config.entropy_coef * entropy[t] + config.kl_loss_coef * kl
            total = total + weight[t] * terms * is_kept(config, gaps, used.index(t))
    return total


def level_ratio(log_ratios: list[float], at: int, level: str) -> float:
    """Return the importance ratio of token `at` among a sequence's unmasked tokens."""
    value = {"token": log_ratios[at], "sequence": sum(log_ratios), "geometric": sum(log_ratios) / len(log_ratios)}
    return math.exp(max(-20.0, min(20.0, value[level])))


def importance(config: Config, log_ratios: list[float], at: int) -> float:
    """Return the importance weight on the surrogate of one token."""
    if not config.use_tis:
        return 1.0
    weight = level_ratio(log_ratios, at, config.tis_level)
    low, high = config.tis_clip_low, config.tis_clip
    return {
        "truncate": min(weight, high),
        "clip": min(max(weight, low), high),
        "mask": weight if low <= weight <= high else 0.0,
    }[config.tis_mode]


def is_kept(config: Config, log_ratios: list[float], at: int) -> float:
    """Return 0 if rejection drops the token, including its entropy and KL terms, else 1."""
    if not config.use_rs:
        return 1.0
    inside = config.rs_lower_bound <= level_ratio(log_ratios, at, config.rs_level) <= config.rs_upper_bound
    veto = config.rs_veto_threshold
    return float(inside and not (veto is not None and any(math.exp(r) < veto for r in log_ratios)))


@pytest.mark.parametrize("case", CASES)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_policy_loss_and_gradient_match_float64_reference(case: str, seed: int, lengths: list[int]) -> None:
    config = derive(
        Config(hf_checkpoint="x", rollout_batch_size=1, n_samples_per_prompt=2, num_rollout=1, **CASES[case])
    )
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    base = -2.0 + draw(1.0)
    mask = (torch.rand(size, generator=generator) < 0.8).double()
    columns = {
        "log_probs": base + draw(0.2),
        "rollout_log_probs": base + draw(0.3),
        "ref_log_probs": base + draw(1.0),
        "advantages": draw(1.0),
    }
    log_probs = (columns["log_probs"] + draw(0.3)).requires_grad_()
    entropy = draw(1.0).abs()
    share = StepShare(num_rollouts=len(lengths))
    sums = torch.cat([mask[slice_].sum().expand(n) for slice_, n in sequence_slices(lengths)])
    weights = mask / sums.clamp_min(1) / len(lengths)
    micro = MicroBatch(empty_row(lengths), list(range(len(lengths))), mask, weights, weights, share.scale, columns)
    outcome = PolicyObjective(config)(micro, log_probs, entropy)
    loss, metrics = outcome.loss, outcome.sums
    (gradient,) = torch.autograd.grad(loss, log_probs, allow_unused=True)

    again = log_probs.detach().clone().requires_grad_()
    parts = (again, *(columns[n] for n in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")), entropy)
    rows = [[part[slice_] for part in (*parts, mask)] for slice_, _ in sequence_slices(lengths)]
    wanted = reference(config, rows, [[weights[slice_]] for slice_, _ in sequence_slices(lengths)])
    torch.testing.assert_close(loss, wanted, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(metrics["loss"], wanted.detach(), atol=1e-9, rtol=1e-6)
    if wanted.requires_grad:
        (wanted_gradient,) = torch.autograd.grad(wanted, again, allow_unused=True)
        torch.testing.assert_close(
            torch.zeros_like(again) if gradient is None else gradient,
            torch.zeros_like(again) if wanted_gradient is None else wanted_gradient,
            atol=1e-9,
            rtol=1e-6,
        )


def sequence_slices(lengths: list[int]) -> list[tuple[slice, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(slice(end - n, end), n) for end, n in zip(ends, lengths, strict=True)]


def empty_row(lengths: list[int]) -> PackedRow:
    nothing = torch.zeros(0, dtype=torch.int64)
    layout = PackedLayout(lengths=tuple(n + 1 for n in lengths), cu_seqlens=nothing, max_length=max(lengths) + 1)
    return PackedRow(nothing, nothing, layout, nothing, nothing, tuple(lengths))
