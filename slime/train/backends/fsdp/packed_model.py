"""Models over packed rows: a row of tokens in, log-probs or values of its response tokens out.

Invariant: the output layer is applied inside the module's forward, so a sharding backend that wraps the module has the
layer's weight whole when it is used. If ranks share the row, each computes its own part of it, output layer included,
and all return the results of the whole row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.algorithms.logprobs import KEPT_BYTES, linear_log_probs
from slime.errors import UserError
from slime.models.heads import OutputHead, output_projection
from slime.models.tensor_sources import Source, zero_source
from slime.train.backend import ObjectiveInput
from slime.train.backends.fsdp.attention import PerSequenceRope, attach_context
from slime.train.backends.fsdp.fused.layer import is_plain
from slime.train.backends.fsdp.gated_delta_net import PackedDeltaNet
from slime.train.backends.fsdp.packed_context import PackedIndexer
from slime.train.backends.fsdp.routing_replay import RouterReplayHooks
from slime.train.backends.fsdp.shared_prompt_ops import expand_to_row
from slime.train.samples.micro_batch import Routing
from slime.train.samples.packing import PackedRow, RowPart
from slime.train.topology import Ranks, gather_parts


class PackedModel(nn.Module):
    """A Hugging Face causal language model that was loaded with the packed attention.

    Parameters on the meta device are read when it is sharded, each from the entry of `sources` with its name.
    """

    def __init__(
        self, model: PreTrainedModel, sources: Mapping[str, Source] | None = None, *, gdn_backend: str | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.sources: dict[str, Source] = dict(sources or {})
        self.placed: dict[str, nn.Parameter] = {}  # this rank's parts of the parameters, once the model is sharded
        self.context = attach_context(model, gdn_backend)
        self.routers: RouterReplayHooks | None = None
        mixing = (PackedDeltaNet, PackedIndexer, PerSequenceRope)
        self._mixing = sorted({type(module).__name__ for module in model.modules() if isinstance(module, mixing)})
        # attention reads no mask, but without one transformers synchronizes with the device to detect a packed row
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if any(map(is_plain, model.modules())) else None

    def use_zero_sources(self) -> None:
        """Replace the sources by zeros, for a model whose weights will all be overwritten."""
        self.sources = {name: zero_source(source.shape, source.dtype) for name, source in self.sources.items()}

    def set_context_ranks(self, ranks: Ranks) -> None:
        """Make each of these ranks compute a part of every row; all of them pass the same rows."""
        if self.context.is_indexed and ranks.size > 1:
            raise UserError(
                f"--context-parallel-size {ranks.size} needs full attention, and that of this model is sparse: set it "
                "to 1"
            )
        for module in self.model.modules():
            if isinstance(module, PackedDeltaNet):
                module.check_ranks(ranks.size)
        self.context.ranks = ranks

    def enable_routing_replay(self) -> None:
        """Make the routers of experts follow the routing given with each row."""
        self.routers = RouterReplayHooks(self.model)

    @property
    def _can_share_prompts(self) -> bool:
        """True if only attention depends on other tokens, routing is not replayed, and this rank has whole rows."""
        return not self._mixing and self.routers is None and self.context.sharing is None

    def check_prompt_sharing(self) -> None:
        """Raise UserError if `--share-prompts` does not support the model."""
        if self._mixing:
            raise UserError(
                f"--share-prompts needs a model in which only attention looks at other tokens, and "
                f"{type(self.model).__name__} has {' and '.join(self._mixing)} as well: drop the flag"
            )

    def own_part(self, row: PackedRow) -> RowPart:
        """This rank's part of a row."""
        ranks = self.context.sharing
        return row.part(0, 1) if ranks is None else row.part(ranks.rank, ranks.size)

    def whole(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the results of all ranks that share the row; `counts` are their numbers of results."""
        ranks = self.context.sharing
        return own if ranks is None else gather_parts(own, counts, ranks)

    def hidden_states(self, row: PackedRow, part: RowPart, routing: Routing | None = None) -> Tensor:
        """Compute the last hidden states [t, H] of this rank's part of the row, each sequence by itself."""
        shared = row.shared if self._can_share_prompts else None
        tokens, places = part.tokens, part.position_ids
        if shared is not None:
            tokens, places = (states.index_select(1, shared.first) for states in (tokens, places))
        self.context.begin(row.layout, shared)
        if self.routers is not None:
            first = 0 if self.context.sharing is None else self.context.sharing.rank * part.tokens.shape[1]
            self.routers.begin(routing, slice(first, first + part.tokens.shape[1]), part.tokens.device)
        body = self.model.base_model
        found = body(input_ids=tokens, position_ids=places, attention_mask=self._mask, use_cache=False)
        hidden: Tensor = found.last_hidden_state.squeeze(0)
        if shared is not None:
            hidden = expand_to_row(hidden, shared)
        if self.routers is not None:
            self.routers.keep()
        if self.context.reads == 0:
            raise UserError(
                f"{type(self.model).__name__} does not use transformers' attention interface, so packed training would "
                "mix sequences: choose a model that does"
            )
        return hidden


class PolicyModel(PackedModel):
    """The policy: log-probs at the temperature that the tokens were sampled with."""

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Mapping[str, Source] | None = None,
        *,
        temperature: float = 1.0,
        chunk_rows: int = -1,
        keep_bytes: int = KEPT_BYTES,
        gdn_backend: str | None = None,
    ) -> None:
        super().__init__(model, sources, gdn_backend=gdn_backend)
        self.temperature = temperature
        self.chunk_rows = chunk_rows
        self.keep_bytes = keep_bytes
        self.head = OutputHead.from_config(model.config)

    def forward(
        self,
        row: PackedRow,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = True,
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs [R] of the targets, and entropies [R] (zeros if not requested).

        For losses that read logits it returns these, [1, T, V] in float32, before the temperature.
        """
        projection, part = output_projection(self.model), self.own_part(row)
        hidden = self.hidden_states(row, part, routing)
        if reads == "logits":
            projected = self.whole(projection(hidden[None])[0], [len(hidden)] * len(part.counts))
            logits = projected[None].float() * self.head.scale  # no view: losses may change it in place
            if self.head.softcap is not None:
                logits = self.head.softcap * torch.tanh(logits / self.head.softcap)
            return logits, hidden.new_zeros(1)
        log_probs, entropies = linear_log_probs(
            hidden.index_select(0, part.predict_index),
            projection.weight,
            projection.bias,
            part.targets,
            temperature=self.temperature,
            softcap=self.head.softcap,
            scale=self.head.scale,
            chunk_rows=self.chunk_rows,
            with_entropy=entropy,
            keep_bytes=self.keep_bytes,
        )
        if entropies is None:
            log_probs = self.whole(log_probs, part.counts)
            return log_probs, torch.zeros_like(log_probs)
        if self.context.sharing is None:
            return log_probs, entropies
        both = self.whole(torch.stack([log_probs, entropies], dim=1), part.counts)
        return both[:, 0], both[:, 1]


class ValueModel(PackedModel):
    """The critic: predicts the expected return before each response token."""

    def forward(
        self,
        row: PackedRow,
        *,
        reads: ObjectiveInput = "log_probs",
        entropy: bool = True,
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute values [R], float32, instead of log-probs; its routers always choose themselves."""
        part = self.own_part(row)
        hidden = self.hidden_states(row, part).index_select(0, part.predict_index)
        values = self.whole(output_projection(self.model)(hidden).float().squeeze(-1), part.counts)
        return values, torch.zeros_like(values)
