"""Tests learning rate and weight decay of every update against Megatron's scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import Config
from slime.errors import UserError
from slime.train.actor import rates_at
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
BATCH = 8


def megatron_rates(flags: dict[str, Any], updates: int) -> list[tuple[float, float]]:
    """Return (learning rate, weight decay) of each update; the rollout counter grows by the batch size after each."""
    num_rollouts = flags["num_rollout"]
    lr, floor, style = flags["lr"], flags.get("min_lr", 0.0), flags.get("lr_decay_style", "constant")
    decay = flags.get("lr_decay_iters", num_rollouts) * BATCH
    warmup: float = flags.get("lr_warmup_iters", 0) * BATCH
    if "lr_warmup_fraction" in flags:
        warmup = flags["lr_warmup_fraction"] * decay
    init = flags.get("lr_warmup_init", 0.0)
    anneal = flags.get("lr_wsd_decay_iters", 0) * BATCH

    def rate(n: int) -> float:
        if warmup > 0 and n <= warmup:
            return init + (lr - init) * n / warmup
        if style == "constant":
            return lr
        if n > decay:
            return floor
        if style == "inverse-square-root":
            return max(floor, lr * max(warmup, 1) ** 0.5 / max(n, 1) ** 0.5)
        done = (n - warmup) / (decay - warmup)
        left = {"linear": 1 - done, "cosine": 0.5 * (math.cos(math.pi * done) + 1)}.get(style)
        if left is None:
            start = decay - anneal
            r = (n - start) / anneal
            shape = flags.get("lr_wsd_decay_style", "exponential")
            left = 1.0 if n <= start else {"exponential": 2 * 0.5**r - 1, "linear": 1 - r,
                                           "cosine": 0.5 * (math.cos(math.pi * r) + 1),
                                           "minus_sqrt": 1 - max(r, 0) ** 0.5}[shape]  # fmt: skip
        return floor + left * (lr - floor)

    def weight_decay(n: int) -> float:
        whole = num_rollouts * BATCH
        first, last = flags.get("start_weight_decay"), flags.get("end_weight_decay")
        if first is None or last is None:
            return float(flags.get("weight_decay", 0.0))
        if n > whole:
            return float(last)
        r = n / whole
        part = r if flags["weight_decay_incr_style"] == "linear" else 0.5 * (math.cos(math.pi * (1 - r)) + 1)
        return float(first + part * (last - first))

    return [(rate(update * BATCH), weight_decay(update * BATCH)) for update in range(updates)]


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"lr_warmup_iters": 4},
    {"lr_warmup_fraction": 0.25},
    {"lr_warmup_fraction": 0.3, "lr_warmup_init": 1e-4},
    {"lr_warmup_fraction": 0.05},
    {"lr_decay_style": "linear", "min_lr": 2e-4},
    {"lr_decay_style": "cosine", "min_lr": 1e-4, "lr_warmup_fraction": 0.2, "lr_decay_iters": 15},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 3},
    *({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6, "lr_wsd_decay_style": style, "lr_warmup_iters": 2}
      for style in ("exponential", "linear", "cosine", "minus_sqrt")),
    {"weight_decay": 0.1},
    {"start_weight_decay": 0.01, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"},
    {"start_weight_decay": 0.2, "end_weight_decay": 0.1, "weight_decay_incr_style": "cosine"},
]  # fmt: skip


@pytest.mark.parametrize("flags", SCHEDULES, ids=str)
def test_rates_match_megatron_scheduler(flags: dict[str, Any]) -> None:
    flags = {"lr": 1e-3, "num_rollout": 20, **flags}
    config = Config(**flags, global_batch_size=BATCH, num_steps_per_rollout=1)
    ours = [tuple(rates_at(config, step)) for step in range(25)]
    assert ours == [pytest.approx(expected, abs=1e-12) for expected in megatron_rates(flags, 25)]


def test_warmup_and_decay_in_samples_match_iterations() -> None:
    sizes = {"global_batch_size": BATCH, "num_steps_per_rollout": 2, "num_rollout": 10, "lr_decay_style": "cosine"}
    by_steps = Config(**sizes, lr_warmup_iters=3, lr_decay_iters=12)
    by_rollouts = Config(**sizes, lr_warmup_samples=24, lr_decay_samples=96)
    assert [rates_at(by_steps, step) for step in range(20)] == [rates_at(by_rollouts, step) for step in range(20)]


def test_rejects_decay_or_warmup_fraction_without_an_end() -> None:
    with pytest.raises(UserError, match="--lr-decay-style cosine needs an end"):
        rates_at(Config(lr_decay_style="cosine"), 0)
    with pytest.raises(UserError, match="--lr-warmup-fraction needs --lr-decay-iters or --num-rollout"):
        rates_at(Config(lr_warmup_fraction=0.1), 0)


def test_updates_use_the_scheduled_rates(model_folder: Folder, tmp_path: Path) -> None:
    """Two of eight updates are warm-up: the first has rate 0, the second half the rate of the third."""
    flags: dict[str, Any] = {
        "num_rollout": 8, "lr": 1e-3, "lr_warmup_fraction": 0.25,
        "start_weight_decay": 0.0, "end_weight_decay": 0.8, "weight_decay_incr_style": "linear",
    }  # fmt: skip
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    backend = run.trainer.actor.backend
    before = {name: tensor.clone() for name, tensor in backend.full_parameters()}
    seen = []
    for rollout_id in range(4):
        metrics = run.train(rollout_id, make_samples(3, 3))["metrics"][0]
        decay = {group["weight_decay"] for group in backend.optimizer.param_groups}
        seen.append((metrics["train/lr-pg_0"], decay))
        same = all(torch.equal(before[name], tensor) for name, tensor in backend.full_parameters())
        assert same == (rollout_id == 0)
    assert [rate for rate, _ in seen] == pytest.approx([0.0, 5e-4, 1e-3, 1e-3])
    assert [max(decay) for _, decay in seen] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert all(min(decay) == 0.0 for _, decay in seen), "norms are never decayed"
