"""The same place in transformers' attention interface, filled with the Triton kernels; imported only on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.engine.embedded.model import kernels
from slime.engine.embedded.model.attention import AttentionContext, Rules

Attend = Callable[..., torch.Tensor]


def attend_extend(context: AttentionContext) -> Attend:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        return kernels.paged_extend(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            context.slots, context.keys[layer], context.values[layer], context.table, context.tiles,
            rules.sinks, rules.scale, rules.softcap or 0.0, rules.window or 0,
        )  # fmt: skip

    return attend


def attend_decode(context: AttentionContext) -> Attend:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        return kernels.paged_decode(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            context.slots, context.keys[layer], context.values[layer], context.table, context.rows, context.lens,
            rules.sinks, rules.scale, rules.softcap or 0.0, rules.window or 0,
        )  # fmt: skip

    return attend
