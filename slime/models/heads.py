"""Output heads: scale and soft cap of the logits after the output projection, and value heads.

Invariant: `logits = softcap * tanh((scale * (hidden @ weight.T + bias)) / softcap)` for every family, with the identity
where a family has no scale or no soft cap. Code that computes log-probs from hidden states needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from slime.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class OutputHead:
    """`scale` multiplies the projected logits, `softcap` bounds them afterwards."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> OutputHead:
        facts = config.get_text_config().to_dict()
        scale = 1.0
        for multiplier in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
            scale *= float(facts.get(multiplier) or 1.0)
        # Granite and MiniCPM3 divide: Granite has a field for it, MiniCPM3 computes it from other fields
        scale /= float(getattr(config.get_text_config(), "logits_scaling", None) or 1.0)
        softcap = facts.get("final_logit_softcapping")  # Gemma 2 and its relatives
        return cls(scale=scale, softcap=float(softcap) if softcap else None)


def output_projection(model: PreTrainedModel) -> nn.Linear:
    """The module with the output weight [V, H] and possibly a bias."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(model).__name__} has no plain linear output layer (found {type(head).__name__}): choose a model "
            "folder of a causal language model"
        )
    return head


def put_value_head(model: PreTrainedModel) -> None:
    """Turn a language model into a value model: one output per token, initially zero, so a new critic predicts 0."""
    old = output_projection(model)
    head = nn.Linear(old.in_features, 1, bias=False, dtype=old.weight.dtype, device=old.weight.device)
    with torch.no_grad():
        head.weight.zero_()
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
