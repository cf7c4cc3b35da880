"""A transformer layer that also norms what attention and MLP give, before it is added (GLM-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from slime.train.backends.megatron.spec.norm import Norm

WithBias = tuple[Tensor, Tensor | None]


class SandwichLayer(TransformerLayer):
    """`post_self_attn_layernorm` and `post_mlp_layernorm` stand between a block and the residual."""

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _normed(self.post_self_attn_layernorm)
        self.mlp_bda = _normed(self.post_mlp_layernorm)


def _normed(norm: nn.Module) -> Callable[..., Callable[..., Tensor]]:
    """Megatron's bias, dropout and addition, after the norm."""

    def chosen(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def added(output_with_bias: WithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            result: Tensor = add((norm(output if bias is None else output + bias), None), residual, dropout)
            return result

        return added

    return chosen
