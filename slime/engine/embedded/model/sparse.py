"""Attention to the tokens that an indexer picks (DeepSeek V3.2, GLM-5), where it picks all of them.

An indexer scores every earlier token and keeps the best `index_topk`. In a sequence of no more tokens than that its
scores change nothing, and the engine's context ends there: so they are not computed, and no keys are kept for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SeesAll(nn.Module):
    """In the place of an indexer, with its parameters under their names."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in plain.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """No index is read: attention over slots sees every token of its sequence."""
        return hidden_states.new_zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)


def replace_indexers(model: nn.Module) -> bool:
    """Whether there were any."""
    found = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("Indexer") and hasattr(child, "index_topk"):
                setattr(parent, name, SeesAll(child))
                found = True
    return found
