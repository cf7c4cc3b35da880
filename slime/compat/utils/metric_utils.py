"""Reward and text statistics, under the import path of slime plugins."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import UserError
from slime.rollout.metrics import has_repetition, pass_at_k
from slime.rollout.metrics import statistics_of as compute_statistics

__all__ = [
    "compression_ratio",
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the same values with the prefix added to every name."""
    return {f"{prefix}{name}": value for name, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Compute `pass@k` for k = 1, 2, 4, ... of consecutive groups of equal size; a reward of 1 is a correct answer."""
    if group_size == 1:
        return {}
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if count * group_size != len(flat_rewards):
        raise UserError(f"compute_pass_rate: {len(flat_rewards)} rewards are not {count} groups of {group_size}")
    right = [reward == 1 for reward in flat_rewards]
    return pass_at_k(right[begin : begin + group_size] for begin in range(0, len(right), group_size))


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Return (compression factor, percentage saved)."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    match algorithm:
        case "zlib":
            small = zlib.compress(raw, level)
        case "gzip":
            small = gzip.compress(raw, compresslevel=level)
        case "bz2":
            small = bz2.compress(raw, compresslevel=level)
        case "lzma":
            small = lzma.compress(raw)
        case _:
            raise UserError(f"compression_ratio: unknown algorithm {algorithm!r}: choose zlib, gzip, bz2 or lzma")
    return len(raw) / len(small), 100.0 * (1.0 - len(small) / len(raw))


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return the step of a rollout's metrics: its id, or the optimizer step with `--wandb-always-use-train-step`."""
    if args.wandb_always_use_train_step:
        return rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    return rollout_id
