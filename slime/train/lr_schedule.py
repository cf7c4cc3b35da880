"""Computes the learning rate and the weight decay of each update.

Invariant: both are pure functions of the number of finished updates of the model, so a resumed run continues with the
same values, and critic-only steps do not advance the policy's warm-up. The values equal those of Megatron's scheduler
after as many steps of `--global-batch-size` rollouts: the first update of a warm-up has `--lr-warmup-init`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from slime.config import Config
from slime.errors import UserError


class Rates(NamedTuple):
    """Learning rate and weight decay of an update."""

    learning_rate: float
    weight_decay: float


def rates_at(config: Config, step: int, *, without: int = 0) -> Rates:
    """Return the rates of the update after `step` finished updates.

    The learning rate warms up linearly, then decays from `--lr` to `--min-lr` at the horizon; with WSD only at its end.
    The weight decay changes from `--start-weight-decay` to `--end-weight-decay` over the updates of the run. Without a
    flag the horizon is that of the run without its `without` initial critic-only rollouts.
    """
    batch = config.global_batch_size or 1
    run: float | None = None  # updates of the whole run; None when it depends on the length of the data
    if config.num_rollout is not None:
        run = max(config.num_rollout - without, 0) * (config.num_steps_per_rollout or 1)
    elif config.weight_decay_incr_style != "constant":
        raise UserError(f"--weight-decay-incr-style {config.weight_decay_incr_style} needs --num-rollout: set it")
    horizon: float | None = run if config.lr_decay_iters is None else config.lr_decay_iters
    if config.lr_decay_samples is not None:
        horizon = config.lr_decay_samples / batch
    warmup = config.lr_warmup_iters + config.lr_warmup_samples / batch
    if config.lr_warmup_fraction is not None:
        if horizon is None:
            raise UserError("--lr-warmup-fraction needs --lr-decay-iters or --num-rollout: set one of them")
        warmup = config.lr_warmup_fraction * horizon
    peak, floor, style = config.lr, config.min_lr, config.lr_decay_style
    if style != "constant" and horizon is None:
        raise UserError(f"--lr-decay-style {style} needs an end: set --lr-decay-iters, or --num-rollout to derive it")
    if warmup > 0 and step <= warmup:
        rate = config.lr_warmup_init + (peak - config.lr_warmup_init) * step / warmup
    elif style == "constant" or horizon is None:
        rate = peak
    elif step > horizon:
        rate = floor
    elif style == "inverse-square-root":
        rate = max(floor, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    elif style == "WSD":
        anneal = config.lr_wsd_decay_iters or 0
        done = step - (horizon - anneal)
        rate = floor + (peak - floor) * (1.0 if done <= 0 else _remaining(config.lr_wsd_decay_style, done, anneal))
    else:
        rate = floor + (peak - floor) * _remaining(style, step - warmup, horizon - warmup)
    first = config.weight_decay if config.start_weight_decay is None else config.start_weight_decay
    decay = config.weight_decay if config.end_weight_decay is None else config.end_weight_decay
    style = config.weight_decay_incr_style
    if style != "constant" and run is not None and step <= run:
        decay = first + (decay - first) * (1.0 - _remaining(style, step, run))
    return Rates(rate, decay)


def _remaining(style: str, done: float, whole: float) -> float:
    """Return the remaining value of a decay from 1 to 0 after `done` of `whole` steps."""
    part = min(done / whole, 1.0) if whole > 0 else 1.0
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * part))
    if style == "exponential":
        return 2.0 * 0.5**part - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(part)
    return 1.0 - part
