"""Runs scheduled tokens through transformers' model code and samples the next tokens.

Invariant: the result of a sequence does not depend on the rest of the batch, beyond floating-point rounding. Logits
are fp32 before any processing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from slime.engine.embedded.model.attention import (
    PREFILL_SLACK,
    AttentionContext,
    MakeZeros,
    group_spans,
    register_attention,
    replace_indexers,
    zeros_on,
)
from slime.engine.embedded.model.cpu_layers import PackedWeights, inputs_of_linears, prepare_layers
from slime.engine.embedded.model.cpu_sampler import draw, draw_each, temperature_of, uniforms
from slime.engine.embedded.model.experts import watch_experts
from slime.engine.embedded.model.gated_delta_net import group_pieces, replace_delta_nets
from slime.engine.embedded.scheduler import Extend, Sequence
from slime.errors import UserError
from slime.models.heads import OutputHead, output_projection

if TYPE_CHECKING:  # importing transformers takes longer than the rest of a start
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Sampled = tuple[list[int], list[float]]


CpuStep = tuple[torch.Tensor, torch.Tensor]
"""The sampled tokens and their log-probs."""


class StepDecoder(Protocol):
    """Runs steps in two halves, launch and collect, so that the next step can start before this one is read.

    Steps are computed in launch order, and each passes the sampled token of a sequence on to the next one. A launched
    step may be dropped instead of collected.
    """

    looks_ahead: bool
    """True if launching returns before the step is computed."""

    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, ahead: SequenceOf[int]) -> Any:
        """Compute one token for each sequence and store its last one at `slots`; `ahead` tokens each are unread."""
        ...

    def launch_extend(self, extends: list[Extend]) -> Any:
        """Compute the pieces and sample one token for each piece that `is_sampled`, in order."""
        ...

    def collect(self, launched: Any) -> Sampled:
        """Wait for a launched step; returns its sampled tokens and their log-probs."""
        ...

    def capture_next(self) -> bool:
        """Prepare one more step size; returns False when all are prepared.

        Steps of any size can be launched before that.
        """
        ...

    def foresees(self, seq: Sequence) -> bool:
        """Return True if a step for `seq` can be launched before its last token is read."""
        ...


_LOGPROB_ROWS = 512  # prompt positions scored at once


class ModelRunner:
    """Holds a model and its KV slots; on the CPU it is also the decoder that runs the steps."""

    looks_ahead = False  # the CPU computes a step when it is launched
    _packed: list[PackedWeights]

    def __init__(self, model: PreTrainedModel, table: np.ndarray) -> None:
        self._hold(model, table)
        self.experts = watch_experts(model, self.context)
        self.body = model.get_decoder()
        self._head = OutputHead.from_config(model.config)
        if not self.cuda and self.dtype == torch.float32:
            with inputs_of_linears(model) as inputs:
                self._probe()
            self._packed = prepare_layers(model, inputs, pack=torch.backends.mkldnn.is_acl_available())
        else:
            self._probe()
        self._projection = output_projection(model)

    def _hold(self, model: Any, table: np.ndarray) -> None:
        """Set the state that all runners share."""
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.context = AttentionContext(self.device)
        self.states = replace_delta_nets(model, len(table), self.device)
        self._table = table
        self._packed = []
        self._tokens = torch.zeros(len(table), dtype=torch.int64)  # the last token of each row

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def _probe(self) -> None:
        """Learn each layer's KV shape from one forward pass; UserError for models that keep state elsewhere."""
        mask = torch.zeros(1, 1, 1, 1, device=self.device) if replace_indexers(self.model) else None
        self.model.set_attn_implementation(register_attention(self.context, mask))
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.states.spans = group_pieces([0], [0], [2], self.device)
        with torch.inference_mode():
            self.hidden(ids, torch.arange(2, device=self.device)[None])
        self.context.is_probed = False
        layers = self.model.config.get_text_config().num_hidden_layers
        if sorted([*self.context.shapes, *self.states.shapes]) != list(range(layers)):
            raise UserError(
                f"{type(self.model).__name__} keeps state outside transformers' attention interface "
                f"({len(self.context.shapes)} of {layers} layers use it): serve it with SGLang instead"
            )

    def weights_changed(self) -> None:
        """Discard data derived from the weights; must be called after a write to the weights."""
        for packed in self._packed:
            packed.forget()

    def kv_bytes_per_token(self) -> int:
        values = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.context.shapes.values())
        return values * self.dtype.itemsize

    def allocate_kv(self, slots: int, zeros: MakeZeros | None = None) -> None:
        """Allocate KV slots for `slots` tokens, with `zeros` or in torch's memory."""
        zeros = zeros or partial(zeros_on, self.device)
        self.context.allocate(slots, self.dtype, zeros)
        self.experts.allocate(slots, zeros)
        self.states.allocate(self.dtype, zeros)
        if self.cuda:
            self.context.table = torch.zeros(self._table.shape, dtype=torch.int32, device=self.device)

    def forget_kv(self) -> None:
        """Invalidate the contents of slots and states; their tensors stay allocated."""
        self.context.window.forget()
        self.states.held[:] = -1

    def free_kv(self) -> None:
        self.context.free()
        self.experts.free()
        self.states.free()

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states `[T, H]` of one row of tokens."""
        return self.body(input_ids=ids, position_ids=positions, use_cache=False)[0][0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits; CUDA accumulates half-precision products in fp32 and returns them unrounded."""
        if not self.cuda or self.dtype == torch.float32:
            logits = self._projection(hidden).float()
        else:
            logits = torch.mm(hidden, self._projection.weight.t(), out_dtype=torch.float32)
            if self._projection.bias is not None:
                logits = logits + self._projection.bias
        if self._head.scale != 1.0:
            logits = logits * self._head.scale
        if self._head.softcap is not None:
            logits = self._head.softcap * torch.tanh(logits / self._head.softcap)
        return logits

    # extend

    @torch.inference_mode()
    def launch_extend(self, extends: list[Extend]) -> CpuStep:
        self._rebuild_states([e.sequence for e in extends], [e.start for e in extends])
        hidden = self._pieces(extends)
        ends = np.cumsum([e.end - e.start for e in extends])
        self.score_prompts(extends, hidden, ends)
        wanted = [i for i, e in enumerate(extends) if e.is_sampled]
        if not wanted:
            return self._tokens[:0], torch.empty(0)
        logits = self.logits(hidden[torch.from_numpy(ends[wanted] - 1)])
        return self._drawn(logits, [extends[i].sequence for i in wanted], [0] * len(wanted))

    def _pieces(self, extends: list[Extend]) -> torch.Tensor:
        """Return the last hidden states `[T, H]` of the pieces, concatenated."""
        rows, lens = [e.sequence.row for e in extends], [e.end - e.start for e in extends]
        ids = torch.from_numpy(np.concatenate([e.sequence.array[e.start : e.end] for e in extends]))
        positions = torch.from_numpy(np.concatenate([np.arange(e.start, e.end) for e in extends]))
        context = self.context
        context.slots = torch.from_numpy(np.concatenate([e.slots for e in extends]))
        context.attend = context.extend_cpu
        context.window.forget()  # the next decode step has other sequences
        key_slots = [self._table[row, : e.end] for row, e in zip(rows, extends, strict=True)]
        context.groups = group_spans(lens, key_slots, PREFILL_SLACK)
        if self.states:
            self.states.spans = group_pieces(rows, [e.start for e in extends], lens, self.device)
        self.states.held[rows] = -1
        hidden = self.hidden(ids[None], positions[None])
        self.states.held[rows] = [e.end for e in extends]
        return hidden

    def _rebuild_states(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> None:
        if stale := self.stale_states(sequences, counts):
            self._pieces(stale)

    def stale_states(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[Extend]:
        """Return the pieces to compute so that the state of each sequence includes its first `count` tokens.

        A state that does not, after a failed step, is rebuilt from the first token, over the slots of the tokens.
        """
        if not self.states:
            return []
        return [
            Extend(seq, 0, count, self._table[seq.row, :count].astype(np.int64))
            for seq, count in zip(sequences, counts, strict=True)
            if count and self.states.held[seq.row] != count
        ]

    def set_table(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Write the host's copy of the table; a decode step writes the device's copy."""
        self._table[rows, positions] = slots

    def table_entries(self, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `end` entries of each table row: their indices in the flattened table, and their values."""
        places = np.concatenate([row * self._table.shape[1] + np.arange(n) for row, n in zip(rows, ends, strict=True)])
        return places, self._table.reshape(-1)[places]

    def score_prompts(self, extends: list[Extend], hidden: torch.Tensor, ends: np.ndarray) -> None:
        """Append prompt log-probs to the sequences that request them.

        Position i scores token i + 1, at temperature 1.
        """
        for e, stop in zip(extends, ends, strict=True):
            seq = e.sequence
            if seq.logprob_start is None:
                continue
            first = max(e.start, seq.logprob_start)
            targets = seq.prompt_ids[first + 1 : e.end + 1]
            begin = stop - (e.end - first)
            rows = hidden[begin : begin + len(targets)]
            for at in range(0, len(targets), _LOGPROB_ROWS):
                logprobs = self.logits(rows[at : at + _LOGPROB_ROWS]).log_softmax(-1)
                chosen = torch.tensor(targets[at : at + _LOGPROB_ROWS], device=self.device)
                seq.input_logprobs.extend(logprobs.gather(1, chosen[:, None])[:, 0].tolist())

    # decode

    @torch.inference_mode()
    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, ahead: SequenceOf[int]) -> CpuStep:
        rows = np.array([s.row for s in running])
        lens = np.array([s.length + more for s, more in zip(running, ahead, strict=True)])
        self._rebuild_states(running, (lens - 1).tolist())
        self.set_table(rows, lens - 1, slots)
        self.states.spans, self.states.rows = None, torch.from_numpy(rows)
        self.states.held[rows] = -1
        known = torch.tensor([-1 if more else last_token(s) for s, more in zip(running, ahead, strict=True)])
        ids = torch.where(known < 0, self._tokens[torch.from_numpy(rows)], known) if any(ahead) else known
        self.context.attend = self.context.decode_cpu
        self.context.slots = torch.from_numpy(slots)
        self.context.window.advance(rows.tolist(), lens.tolist(), self._table)
        hidden = self.hidden(ids[None], torch.from_numpy(lens - 1)[None])
        self.states.held[rows] = lens
        return self._drawn(self.logits(hidden), running, ahead)

    def collect(self, launched: CpuStep) -> Sampled:
        tokens, logprobs = launched
        return tokens.tolist(), logprobs.tolist()

    def foresees(self, seq: Sequence) -> bool:
        return seq.plain

    def capture_next(self) -> bool:
        return False

    def _drawn(self, logits: torch.Tensor, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]) -> CpuStep:
        tokens, logprobs = self._draw(logits, sequences, ahead)
        if self.looks_ahead:  # the next step is launched before they are read
            self._tokens[[s.row for s in sequences]] = tokens
        return tokens, logprobs

    def _draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uniform = torch.from_numpy(uniforms(sequences, ahead))
        is_greedy = [s.params.greedy for s in sequences]
        if all(s.plain for s in sequences):
            degrees = [temperature_of(s) for s in sequences]
            temperature = torch.tensor(degrees) if set(degrees) != {1.0} else None
            return draw(logits, temperature, uniform, torch.tensor(is_greedy) if any(is_greedy) else None)
        record_top(logits, sequences)
        return draw_each(logits, sequences, uniform, torch.tensor(is_greedy))


def last_token(seq: Sequence) -> int:
    return seq.output_ids[-1] if seq.output_ids else seq.prompt_ids[-1]


def record_top(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
    """Append the most likely tokens at this position to the sequences that request them."""
    for row, seq in zip(logits, sequences, strict=True):
        if seq.top_logprobs:
            best = (row / temperature_of(seq)).log_softmax(-1).topk(seq.top_logprobs)
            seq.output_top.append(list(zip(best.values.tolist(), best.indices.tolist(), strict=True)))
