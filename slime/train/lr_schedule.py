"""Computes the learning rate and the weight decay of each update.

Invariant: both are pure functions of the number of finished updates of the model, so a resumed run continues with the
same values, and critic-only steps do not advance the policy's warm-up. The values equal those of Megatron's scheduler
after as many steps of `--global-batch-size` rollouts: the first update of a warm-up has `--lr-warmup-init`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from slime.config import Config
from slime.errors import UserError


class Rates(NamedTuple):
    """Learning rate and weight decay of an update."""

    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from `first` over `warmup` updates, then a decay of `style` from `peak` to `floor` at `horizon`.

    `anneal` is the number of updates of the decay at the end of a WSD schedule, `anneal_style` its shape.
    """

    peak: float
    floor: float
    style: str
    warmup: float
    horizon: float | None
    first: float = 0.0
    anneal: float = 0.0
    anneal_style: str = "exponential"

    def __post_init__(self) -> None:
        if self.style != "constant" and self.horizon is None:
            raise UserError(
                f"--lr-decay-style {self.style} needs an end: set --lr-decay-iters, or --num-rollout to derive it"
            )

    @classmethod
    def from_config(cls, config: Config, *, without: int = 0) -> LearningRate:
        """Take the flags' values; the default horizon is the run without its `without` initial critic-only rollouts."""
        batch = config.global_batch_size or 1
        horizon: float | None = config.lr_decay_iters
        if config.lr_decay_samples is not None:
            horizon = config.lr_decay_samples / batch
        if horizon is None:
            horizon = _updates(config, without=without)
        warmup = config.lr_warmup_iters + config.lr_warmup_samples / batch
        if config.lr_warmup_fraction is not None:
            if horizon is None:
                raise UserError("--lr-warmup-fraction needs --lr-decay-iters or --num-rollout: set one of them")
            warmup = config.lr_warmup_fraction * horizon
        return cls(
            config.lr,
            config.min_lr,
            config.lr_decay_style,
            warmup,
            horizon,
            first=config.lr_warmup_init,
            anneal=config.lr_wsd_decay_iters or 0,
            anneal_style=config.lr_wsd_decay_style,
        )

    def at(self, step: int) -> float:
        """Return the learning rate of the update after `step` finished updates."""
        if self.warmup > 0 and step <= self.warmup:
            return self.first + (self.peak - self.first) * step / self.warmup
        if self.style == "constant" or self.horizon is None:
            return self.peak
        if step > self.horizon:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        if self.style == "WSD":
            begin = self.horizon - self.anneal
            remaining = (
                1.0
                if step <= begin
                else _remaining_value(self.anneal_style, _finished_fraction(step - begin, self.anneal))
            )
        else:
            remaining = _remaining_value(self.style, _finished_fraction(step - self.warmup, self.horizon - self.warmup))
        return self.floor + (self.peak - self.floor) * remaining


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that changes from `first` to `last` over the updates of the run."""

    first: float
    last: float
    style: str
    horizon: float | None

    @classmethod
    def from_config(cls, config: Config, *, without: int = 0) -> WeightDecay:
        first = config.weight_decay if config.start_weight_decay is None else config.start_weight_decay
        last = config.weight_decay if config.end_weight_decay is None else config.end_weight_decay
        horizon = _updates(config, without=without)
        if horizon is None and config.weight_decay_incr_style != "constant":
            raise UserError(f"--weight-decay-incr-style {config.weight_decay_incr_style} needs --num-rollout: set it")
        return cls(first, last, config.weight_decay_incr_style, horizon)

    def at(self, step: int) -> float:
        """Return the weight decay of the update after `step` finished updates."""
        if self.style == "constant" or self.horizon is None or step > self.horizon:
            return self.last
        return self.first + (self.last - self.first) * (
            1.0 - _remaining_value(self.style, _finished_fraction(step, self.horizon))
        )


@dataclass(frozen=True)
class RateSchedule:
    """The schedules of the learning rate and the weight decay of one model."""

    learning_rate: LearningRate
    weight_decay: WeightDecay

    @classmethod
    def from_config(cls, config: Config, *, without: int = 0) -> RateSchedule:
        return cls(LearningRate.from_config(config, without=without), WeightDecay.from_config(config, without=without))

    def at(self, step: int) -> Rates:
        return Rates(self.learning_rate.at(step), self.weight_decay.at(step))


def _updates(config: Config, *, without: int) -> float | None:
    """Count the updates of the whole run; None when it depends on the length of the data."""
    if config.num_rollout is None:
        return None
    return max(config.num_rollout - without, 0) * (config.num_steps_per_rollout or 1)


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
