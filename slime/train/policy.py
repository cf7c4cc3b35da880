"""The policy as training sees it: packed tokens in, log-probs and entropies of the response tokens out.

Invariant: the output projection is applied inside this module's forward. A sharding backend that wraps this module
therefore has the head's weight whole when the log-probs are computed from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.algorithms.logprobs import linear_log_probs
from slime.errors import UserError
from slime.models.head import OutputHead, output_projection
from slime.train.attention import attach_context
from slime.train.packing import PackedRow


class PolicyModel(nn.Module):
    """A Hugging Face causal language model (loaded with the packed attention) and how its tokens were sampled."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, chunk_rows: int = -1) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_rows = chunk_rows
        self.head = OutputHead.from_config(model.config)
        self.context = attach_context(model)

    def forward(self, row: PackedRow, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probs [R] of the targets at the sampling temperature, and entropies [R] (zeros when not asked for)."""
        self.context.begin(row.layout)
        body = self.model.base_model
        hidden = body(input_ids=row.tokens, position_ids=row.position_ids, use_cache=False).last_hidden_state[0]
        if self.context.reads == 0:
            raise UserError(
                f"{type(self.model).__name__} does not use transformers' attention interface, so packed training would "
                "mix sequences: choose a model that does"
            )
        projection = output_projection(self.model)
        log_probs, entropy = linear_log_probs(
            hidden.index_select(0, row.predict_index),
            projection.weight,
            projection.bias,
            row.targets,
            temperature=self.temperature,
            softcap=self.head.softcap,
            scale=self.head.scale,
            chunk_rows=self.chunk_rows,
            with_entropy=with_entropy,
        )
        return log_probs, entropy if entropy is not None else torch.zeros_like(log_probs)
