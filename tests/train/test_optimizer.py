"""The learning rate as a function of the step, and which parameters are trained."""

from __future__ import annotations

import math

import pytest
from torch import nn

from slime.errors import UserError
from slime.train.optimizer import LearningRate, choose_trainable


def test_constant_with_warm_up() -> None:
    rate = LearningRate(peak=2.0, floor=0.0, style="constant", warmup=4, horizon=None)
    assert [rate.at(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_and_cosine_end_at_the_floor() -> None:
    linear = LearningRate(peak=1.0, floor=0.2, style="linear", warmup=0, horizon=4)
    assert [linear.at(step) for step in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = LearningRate(peak=1.0, floor=0.0, style="cosine", warmup=2, horizon=10)
    assert cosine.at(6) == pytest.approx(0.5)
    assert cosine.at(4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine.at(10) == pytest.approx(0.0)


def test_decay_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="--lr-decay-style cosine needs an end"):
        LearningRate(peak=1.0, floor=0.0, style="cosine", warmup=0, horizon=None)


def test_freezing_by_pattern() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    choose_trainable(module, freeze=["first"], only_train=None)
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]
    with pytest.raises(UserError, match="leaves no parameter to train"):
        choose_trainable(module, freeze=None, only_train=["third"])
