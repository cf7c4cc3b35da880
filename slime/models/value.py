"""A language model turned into a value model."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from slime.models.head import output_projection


def put_value_head(model: PreTrainedModel) -> None:
    """Replace the output layer by one number per token, zero at first: a new critic expects nothing."""
    old = output_projection(model)
    head = nn.Linear(old.in_features, 1, bias=False, dtype=old.weight.dtype, device=old.weight.device)
    with torch.no_grad():
        head.weight.zero_()
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
