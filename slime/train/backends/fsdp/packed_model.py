"""The models as training sees them: a packed row of tokens in, numbers for its response tokens out.

Invariant: the output layer is applied inside the module's forward. A sharding backend that wraps the module therefore
has the layer's weight whole when it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.algorithms.logprobs import linear_log_probs
from slime.errors import UserError
from slime.models.head import OutputHead, output_projection
from slime.train.backends.fsdp.attention import attach_context
from slime.train.backends.protocol import Reads
from slime.train.samples.packing import PackedRow


class PackedModel(nn.Module):
    """A Hugging Face causal language model that was loaded with the packed attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.context = attach_context(model)

    def hidden_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [T, H] of the row; a sequence sees only itself."""
        self.context.begin(row.layout)
        body = self.model.base_model
        hidden = body(input_ids=row.tokens, position_ids=row.position_ids, use_cache=False).last_hidden_state[0]
        if self.context.reads == 0:
            raise UserError(
                f"{type(self.model).__name__} does not use transformers' attention interface, so packed training would "
                "mix sequences: choose a model that does"
            )
        return hidden


class PolicyModel(PackedModel):
    """Log-probs at the temperature that the tokens were sampled with."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, chunk_rows: int = -1) -> None:
        super().__init__(model)
        self.temperature = temperature
        self.chunk_rows = chunk_rows
        self.head = OutputHead.from_config(model.config)

    def forward(self, row: PackedRow, *, reads: Reads = "log_probs", entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probs [R] of the targets, and entropies [R] (zeros when not asked for).

        For losses that read logits: these [1, T, V] in float32, before the temperature.
        """
        projection = output_projection(self.model)
        hidden = self.hidden_states(row)
        if reads == "logits":
            return self._logits(projection(hidden[None])), hidden.new_zeros(1)  # no view: losses may change it in place
        log_probs, entropies = linear_log_probs(
            hidden.index_select(0, row.predict_index),
            projection.weight,
            projection.bias,
            row.targets,
            temperature=self.temperature,
            softcap=self.head.softcap,
            scale=self.head.scale,
            chunk_rows=self.chunk_rows,
            with_entropy=entropy,
        )
        return log_probs, entropies if entropies is not None else torch.zeros_like(log_probs)

    def _logits(self, projected: Tensor) -> Tensor:
        logits = projected.float() * self.head.scale
        return logits if self.head.softcap is None else self.head.softcap * torch.tanh(logits / self.head.softcap)


class ValueModel(PackedModel):
    """The critic: the expected return before each response token."""

    def forward(self, row: PackedRow, *, reads: Reads = "log_probs", entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Values [R], float32, where a policy has log-probs."""
        hidden = self.hidden_states(row).index_select(0, row.predict_index)
        values = output_projection(self.model)(hidden).float().squeeze(-1)
        return values, torch.zeros_like(values)
