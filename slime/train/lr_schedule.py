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


class RateSchedule:
    """The rates of one model, from the flags.

    The default horizon of both schedules is the run without its `without` initial critic-only rollouts.
    """

    def __init__(self, config: Config, *, without: int = 0) -> None:
        self._config = config
        batch = config.global_batch_size or 1
        self._run: float | None = None  # updates of the whole run; None when it depends on the length of the data
        if config.num_rollout is not None:
            self._run = max(config.num_rollout - without, 0) * (config.num_steps_per_rollout or 1)
        elif config.weight_decay_incr_style != "constant":
            raise UserError(f"--weight-decay-incr-style {config.weight_decay_incr_style} needs --num-rollout: set it")
        self._horizon: float | None = self._run if config.lr_decay_iters is None else config.lr_decay_iters
        if config.lr_decay_samples is not None:
            self._horizon = config.lr_decay_samples / batch
        self._warmup = config.lr_warmup_iters + config.lr_warmup_samples / batch
        if config.lr_warmup_fraction is not None:
            if self._horizon is None:
                raise UserError("--lr-warmup-fraction needs --lr-decay-iters or --num-rollout: set one of them")
            self._warmup = config.lr_warmup_fraction * self._horizon
        if config.lr_decay_style != "constant" and self._horizon is None:
            raise UserError(
                f"--lr-decay-style {config.lr_decay_style} needs an end: set --lr-decay-iters, or --num-rollout to "
                "derive it"
            )

    def at(self, step: int) -> Rates:
        """Return the rates of the update after `step` finished updates."""
        return Rates(self._learning_rate(step), self._weight_decay(step))

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then a decay from `--lr` to `--min-lr` at the horizon; of WSD only at its end."""
        config, warmup, horizon = self._config, self._warmup, self._horizon
        peak, floor, style = config.lr, config.min_lr, config.lr_decay_style
        if warmup > 0 and step <= warmup:
            return config.lr_warmup_init + (peak - config.lr_warmup_init) * step / warmup
        if style == "constant" or horizon is None:
            return peak
        if step > horizon:
            return floor
        if style == "inverse-square-root":
            return max(floor, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
        if style == "WSD":
            anneal = config.lr_wsd_decay_iters or 0
            done, style = step - (horizon - anneal), config.lr_wsd_decay_style
            remaining = 1.0 if done <= 0 else _remaining_value(style, _finished_fraction(done, anneal))
        else:
            remaining = _remaining_value(style, _finished_fraction(step - warmup, horizon - warmup))
        return floor + (peak - floor) * remaining

    def _weight_decay(self, step: int) -> float:
        """Change from `--start-weight-decay` to `--end-weight-decay` over the updates of the run."""
        config = self._config
        first = config.weight_decay if config.start_weight_decay is None else config.start_weight_decay
        last = config.weight_decay if config.end_weight_decay is None else config.end_weight_decay
        style = config.weight_decay_incr_style
        if style == "constant" or self._run is None or step > self._run:
            return last
        return first + (last - first) * (1.0 - _remaining_value(style, _finished_fraction(step, self._run)))


def _finished_fraction(done: float, whole: float) -> float:
    """Return the finished fraction, at most 1."""
    return min(done / whole, 1.0) if whole > 0 else 1.0


def _remaining_value(style: str, part: float) -> float:
    """Return the remaining value after the fraction `part` of a decay from 1 to 0."""
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * part))
    if style == "exponential":
        return 2.0 * 0.5**part - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(part)
    return 1.0 - part
