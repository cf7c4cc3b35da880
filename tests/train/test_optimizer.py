"""Which parameters are trained."""

from __future__ import annotations

import pytest
from torch import nn

from slime.errors import UserError
from slime.train.optimizer import choose_trainable


def test_freezing_by_pattern() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    choose_trainable(module, freeze=["first"], only_train=None)
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]
    with pytest.raises(UserError, match="leaves no parameter to train"):
        choose_trainable(module, freeze=None, only_train=["third"])
