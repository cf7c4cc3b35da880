"""What stands before the layers and after them: embeddings, and the numbers that objectives read of hidden states.

Invariant: the output layer of a stage hands the hidden states on, whole on every rank of the tensor group, and a head
reads its weight afterwards, for the tokens that predict something. So logits [T, V] exist only where a loss asks for
them. Every rank of the last stage returns the numbers of the whole row, and the gradient that goes back into the hidden
states is the whole one on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from slime.algorithms.vocab_parallel import VocabularyPart, vocab_parallel_log_probs
from slime.models.heads import OutputHead
from slime.train.backends.megatron.cp_rows import RowSlices
from slime.train.backends.megatron.process_groups import Groups
from slime.train.backends.protocol import Reads
from slime.train.topology import Ranks

OUTPUT_WEIGHT = "output_layer.weight"
"""What a head reads; where it is the embedding's, only a stage without that has it."""


class HiddenOutput(nn.Module):
    """Stands where Megatron has its output layer, with that layer's weight (None where it is the embedding's)."""

    def __init__(self, weight: nn.Parameter | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[t, 1, H] of all tokens of the tensor group's ranks, each of which has a part under sequence parallelism."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None


def hand_on_hidden(stage: Any) -> None:
    """From now on the forward of a last stage returns hidden states [1, t, H]."""
    old = stage.output_layer
    stage.output_layer = HiddenOutput(old.weight, sequence_parallel=stage.config.sequence_parallel)


def leave_padding(stage: Any, token: int, ranks: Ranks) -> None:
    """The row of the padding token is not trained by where it is read, as in transformers' embeddings."""

    def kept(_module: nn.Module, _args: Any, given: dict[str, Any], embedded: Tensor) -> Tensor:
        tokens: Tensor = given["input_ids"].t()
        if len(tokens) != len(embedded):  # sequence parallel: a rank has its part of the row
            tokens = tokens.chunk(ranks.size)[ranks.rank]
        return torch.where((tokens == token)[..., None], embedded.detach(), embedded)

    stage.embedding.register_forward_hook(kept, with_kwargs=True)


class Head(Protocol):
    def __call__(
        self, stage: Any, hidden: Tensor, slices: RowSlices, groups: Groups, *, reads: Reads, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """(numbers [R], entropies [R] or zeros) of the row; or logits [1, T, V] and a zero."""


@dataclass(frozen=True)
class PolicyHead:
    """Log-probs at the temperature that the tokens were sampled with."""

    vocab_size: int
    output: OutputHead
    temperature: float = 1.0
    chunk_rows: int = -1

    def __call__(
        self, stage: Any, hidden: Tensor, slices: RowSlices, groups: Groups, *, reads: Reads, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        weight = output_weight(stage)
        if reads == "logits":
            return self._logits(weight, hidden[0], slices, groups)[None], hidden.new_zeros(1)
        ranks = groups.tensor
        log_probs, entropies = vocab_parallel_log_probs(
            hidden[0].index_select(0, slices.predict_index),
            weight,
            None,
            slices.targets,
            VocabularyPart(ranks.rank * len(weight), self.vocab_size, ranks),
            temperature=self.temperature,
            softcap=self.output.softcap,
            scale=self.output.scale,
            chunk_rows=self.chunk_rows,
            with_entropy=entropy,
        )
        context = groups.topology.context
        if entropies is None:
            log_probs = slices.responses(log_probs, context)
            return log_probs, torch.zeros_like(log_probs)
        both = slices.responses(torch.stack([log_probs, entropies], dim=1), context)
        return both[:, 0], both[:, 1]

    def _logits(self, weight: Tensor, hidden: Tensor, slices: RowSlices, groups: Groups) -> Tensor:
        """[T, V] in float32, before the temperature."""
        own = nn.functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(hidden), weight)
        projected = tensor_parallel.gather_from_tensor_model_parallel_region(own)[:, : self.vocab_size]
        logits = slices.whole(projected, groups.topology.context).float() * self.output.scale
        softcap = self.output.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True)
class ValueHead:
    """The critic: the expected return before each response token."""

    def __call__(
        self, stage: Any, hidden: Tensor, slices: RowSlices, groups: Groups, *, reads: Reads, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        chosen = hidden[0].index_select(0, slices.predict_index)
        own = nn.functional.linear(chosen, stage.output_layer.weight).float().squeeze(-1)
        values = slices.responses(own, groups.topology.context)
        return values, torch.zeros_like(values)


def output_weight(stage: Any) -> Tensor:
    """This rank's rows of the output layer, which may be those of the embedding."""
    shared = stage.share_embeddings_and_output_weights
    weight: Tensor = stage.shared_embedding_or_output_weight() if shared else stage.output_layer.weight
    return weight
