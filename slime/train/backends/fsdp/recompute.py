"""`--recompute-activations`: a decoder layer keeps its input for the backward, and runs once more there.

Invariant: the numbers are those without it. transformers recomputes layers only in training mode, so the layers alone
are in it, and only from outside: nothing inside one ever is, neither dropout nor the noise of a router.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from slime.errors import UserError


def recompute_layers(model: PreTrainedModel) -> None:
    """From now on, for every backward."""
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --recompute-activations")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            module._gradient_checkpointing_func = partial(_recomputed, module)


def _recomputed(layer: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *arguments, use_reentrant=False, preserve_rng_state=False)
