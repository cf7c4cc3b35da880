"""Padding of the embedding, and the heads that compute log-probs, logits or values from hidden states.

Invariant: the output layer of a stage returns the hidden states, whole on every rank of the tensor group, and a head
reads its weight later, for the tokens that predict something. So logits [T, V] exist only if a loss requests them.
Every rank of the last stage returns the numbers of the whole row, and each has the complete gradient of the hidden
states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from slime.algorithms.logprobs import VocabularyPart, linear_log_probs
from slime.models.heads import OutputHead
from slime.train.backend import ObjectiveInput
from slime.train.backends.megatron.cp_rows import RowSlices
from slime.train.backends.megatron.process_groups import MegatronGroups
from slime.train.topology import Ranks

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

OUTPUT_WEIGHT = "output_layer.weight"
"""The weight that a head reads; if it is tied to the embedding, only a stage without the embedding has it."""


class HiddenStatesOutput(nn.Module):
    """Replaces Megatron's output layer and has that layer's weight (None if it is the embedding's)."""

    def __init__(self, weight: nn.Parameter | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Return the hidden states [t, 1, H] of the whole tensor group, gathered if they are sequence parallel."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None


def emit_hidden_states(stage: GPTModel) -> None:
    """Make the forward of a last stage return hidden states [1, t, H]."""
    old = stage.output_layer
    stage.output_layer = HiddenStatesOutput(old.weight, sequence_parallel=stage.config.sequence_parallel)


def freeze_padding_lookups(stage: GPTModel, token: int, ranks: Ranks) -> None:
    """Exclude lookups of the padding token from the gradient of its embedding, as transformers' embeddings do."""

    def detach_padding(
        _module: nn.Module, _args: tuple[object, ...], given: dict[str, Tensor], embedded: Tensor
    ) -> Tensor:
        tokens = given["input_ids"].t()
        if len(tokens) != len(embedded):  # sequence parallel: a rank has its part of the row
            tokens = tokens.chunk(ranks.size)[ranks.rank]
        return torch.where((tokens == token)[..., None], embedded.detach(), embedded)

    stage.embedding.register_forward_hook(detach_padding, with_kwargs=True)


@dataclass(frozen=True)
class Head:
    """Computes a policy's log-probs, at the temperature with which the tokens were sampled, or a critic's values."""

    vocab_size: int = 0
    output: OutputHead | None = None
    """The transform of a policy's logits; None for a critic: the expected return before each response token."""
    temperature: float = 1.0
    chunk_rows: int = -1

    def __call__(
        self,
        stage: GPTModel,
        hidden: Tensor,
        slices: RowSlices,
        groups: MegatronGroups,
        *,
        reads: ObjectiveInput,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (numbers [R], entropies [R] or zeros) of the row; or logits [1, T, V] and a zero."""
        ranks, context = groups.tensor, groups.topology.context
        if self.output is None:
            chosen = hidden[0].index_select(0, slices.predict_index)
            own = nn.functional.linear(chosen, stage.output_layer.weight).float().squeeze(-1)
            values = slices.responses(own, context)
            return values, torch.zeros_like(values)
        is_shared = stage.share_embeddings_and_output_weights  # this rank's rows may be those of the embedding
        weight: Tensor = stage.shared_embedding_or_output_weight() if is_shared else stage.output_layer.weight
        softcap = self.output.softcap
        if reads == "logits":
            # [T, V] in float32, before the temperature
            own = nn.functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(hidden[0]), weight)
            projected = tensor_parallel.gather_from_tensor_model_parallel_region(own)[:, : self.vocab_size]
            logits = slices.whole(projected, context).float() * self.output.scale
            capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            return capped[None], hidden.new_zeros(1)
        log_probs, entropies = linear_log_probs(
            hidden[0].index_select(0, slices.predict_index),
            weight,
            None,
            slices.targets,
            part=VocabularyPart(ranks.rank * len(weight), self.vocab_size, ranks),
            temperature=self.temperature,
            softcap=softcap,
            scale=self.output.scale,
            chunk_rows=self.chunk_rows,
            with_entropy=entropy,
        )
        if entropies is None:
            log_probs = slices.responses(log_probs, context)
            return log_probs, torch.zeros_like(log_probs)
        both = slices.responses(torch.stack([log_probs, entropies], dim=1), context)
        return both[:, 0], both[:, 1]
