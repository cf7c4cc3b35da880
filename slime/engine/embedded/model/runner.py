"""From scheduled tokens to sampled ones, through transformers' own model code.

Invariant: what a sequence computes does not depend on what else is in the batch, beyond floating-point rounding.
Logits are fp32 before anything is done to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from slime.engine.embedded.model.attention import (
    PREFILL_SLACK,
    AttentionContext,
    Zeros,
    group_spans,
    register_attention,
    zeros_on,
)
from slime.engine.embedded.model.cpu_layers import inputs_of_linears, prepare_layers
from slime.engine.embedded.model.delta_net import adopt_states, lay_out
from slime.engine.embedded.model.experts import watch_experts
from slime.engine.embedded.model.sampler import draw, draw_each, temperature_of, uniforms
from slime.engine.embedded.model.sparse import replace_indexers
from slime.engine.embedded.scheduler import Extend
from slime.engine.embedded.sequence import Sequence
from slime.errors import UserError
from slime.models.head import OutputHead, output_projection

log = logging.getLogger(__name__)

Sampled = tuple[list[int], list[float]]


@dataclass
class Launched:
    """A decode step that has been started: where its tokens and log-probs will be."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


class Decoder(Protocol):
    """One token for every running sequence, in two halves, so that the next step can start before this one is read."""

    looks_ahead: bool

    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, previous: Any) -> Any: ...

    def collect(self, launched: Any) -> Sampled: ...


_LOGPROB_ROWS = 512  # prompt positions scored at once


class ModelRunner:
    """The model and its KV slots; on the CPU it is its own `Decoder`."""

    looks_ahead = False  # the CPU would only wait for itself

    def __init__(self, model: PreTrainedModel, table: np.ndarray) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.context = AttentionContext(self.device)
        self.experts = watch_experts(model, self.context)
        self.states = adopt_states(model, len(table), self.device)
        self.body = model.get_decoder()
        self._head = OutputHead.from_config(model.config)
        self._table = table
        self._forget_weights: Callable[[], None] | None = None
        if not self.cuda and self.dtype == torch.float32:
            with inputs_of_linears(model) as inputs:
                self._probe()
            self._forget_weights = prepare_layers(model, inputs, pack=torch.backends.mkldnn.is_acl_available())
        else:
            self._probe()
        self._projection = output_projection(model)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def _probe(self) -> None:
        """One forward pass that tells each layer's KV shape; refuses models that keep state elsewhere."""
        mask = torch.zeros(1, 1, 1, 1, device=self.device) if replace_indexers(self.model) else None
        self.model.set_attn_implementation(register_attention(self.context, mask))
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.states.spans = lay_out([0], [0], [2], self.device)
        with torch.inference_mode():
            self.hidden(ids, torch.arange(2, device=self.device)[None])
        layers = self.model.config.get_text_config().num_hidden_layers
        if sorted([*self.context.shapes, *self.states.shapes]) != list(range(layers)):
            raise UserError(
                f"{type(self.model).__name__} keeps state outside transformers' attention interface "
                f"({len(self.context.shapes)} of {layers} layers use it): serve it with SGLang instead"
            )

    def weights_changed(self) -> None:
        """Somebody wrote to the model's weights: what was made of them is made anew."""
        if self._forget_weights is not None:
            self._forget_weights()

    def kv_bytes_per_token(self) -> int:
        values = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.context.shapes.values())
        return values * self.dtype.itemsize

    def allocate_kv(self, slots: int, zeros: Zeros | None = None) -> None:
        """Room for `slots` tokens, made by `zeros` or as torch does."""
        zeros = zeros or partial(zeros_on, self.device)
        self.context.allocate(slots, self.dtype, zeros)
        self.experts.allocate(slots, zeros)
        self.states.allocate(self.dtype, zeros)
        if self.cuda:
            self.context.table = torch.zeros(self._table.shape, dtype=torch.int32, device=self.device)

    def forget_kv(self) -> None:
        """What the slots and states hold is gone; their tensors stay."""
        self.context.window.forget()
        self.states.held[:] = -1

    def free_kv(self) -> None:
        self.context.free()
        self.experts.free()
        self.states.free()

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Last hidden states `[T, H]` of one row of tokens."""
        return self.body(input_ids=ids, position_ids=positions, use_cache=False)[0][0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._project(hidden)
        if self._head.scale != 1.0:
            logits = logits * self._head.scale
        if self._head.softcap is not None:
            logits = self._head.softcap * torch.tanh(logits / self._head.softcap)
        return logits

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits; CUDA accumulates half-precision products in fp32 and hands that out unrounded."""
        if not self.cuda or self.dtype == torch.float32:
            return self._projection(hidden).float()
        logits = torch.mm(hidden, self._projection.weight.t(), out_dtype=torch.float32)
        return logits if self._projection.bias is None else logits + self._projection.bias

    # extend

    @torch.inference_mode()
    def extend(self, extends: list[Extend]) -> Sampled:
        """Compute the pieces; sample one token for every sequence that is now complete (in order)."""
        self.make_states([e.sequence for e in extends], [e.start for e in extends])
        hidden = self._pieces(extends)
        ends = np.cumsum([e.end - e.start for e in extends])
        self._score_prompts(extends, hidden, ends)
        complete = [(i, e.sequence) for i, e in enumerate(extends) if e.end == e.sequence.length]
        wanted = [(i, s) for i, s in complete if s.max_new_tokens > 0]
        if not wanted:
            return [], []
        last = torch.from_numpy(ends[[i for i, _ in wanted]] - 1).to(self.device)
        return self._sample(self.logits(hidden[last]), [s for _, s in wanted])

    def _pieces(self, extends: list[Extend]) -> torch.Tensor:
        """Last hidden states `[T, H]` of the pieces, one behind the other."""
        rows, lens = [e.sequence.row for e in extends], [e.end - e.start for e in extends]
        ids = torch.tensor([t for e in extends for t in e.sequence.tokens[e.start : e.end]], device=self.device)
        positions = torch.from_numpy(np.concatenate([np.arange(e.start, e.end) for e in extends])).to(self.device)
        self.context.slots = torch.from_numpy(np.concatenate([e.slots for e in extends])).to(self.device)
        self._place_extend(extends)
        if self.states:
            self.states.spans = lay_out(rows, [e.start for e in extends], lens, self.device)
        self.states.held[rows] = -1
        hidden = self.hidden(ids[None], positions[None])
        self.states.held[rows] = [e.end for e in extends]
        return hidden

    def make_states(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> None:
        """See that the state of each sequence has taken in the first `count` tokens, whatever a failed step left there.

        What is not so is computed anew from the beginning, over the slots that the tokens have.
        """
        if not self.states:
            return
        stale = [
            Extend(seq, 0, count, self._table[seq.row, :count].astype(np.int64))
            for seq, count in zip(sequences, counts, strict=True)
            if count and self.states.held[seq.row] != count
        ]
        if stale:
            self._pieces(stale)

    def _place_extend(self, extends: list[Extend]) -> None:
        rows = [e.sequence.row for e in extends]
        query_lens = [e.end - e.start for e in extends]
        if not self.cuda:
            self.context.attend = self.context.extend_cpu
            self.context.window.forget()  # the next decode step has other sequences
            kept = [self._table[row, : e.end] for row, e in zip(rows, extends, strict=True)]
            self.context.groups = group_spans(query_lens, kept, PREFILL_SLACK)
            return
        from slime.engine.embedded.model.attention_cuda import attend_extend
        from slime.engine.embedded.model.kernels import ExtendTiles

        self.upload_rows(rows, [e.end for e in extends])
        self.context.tiles = ExtendTiles.build(rows, query_lens, [e.end for e in extends], self.device)
        self.context.attend = attend_extend(self.context)

    def set_table(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """The host's copy of the table; the device's is written by the decode graph."""
        self._table[rows, positions] = slots

    def upload_rows(self, rows: list[int], ends: list[int]) -> None:
        """Copy the first `end` entries of each table row to the device."""
        row = np.concatenate([np.full(n, r) for r, n in zip(rows, ends, strict=True)])
        column = np.concatenate([np.arange(n) for n in ends])
        packed = torch.from_numpy(np.stack([row, column, self._table[row, column]])).to(self.device)
        self.context.table[packed[0], packed[1]] = packed[2].int()

    def _score_prompts(self, extends: list[Extend], hidden: torch.Tensor, ends: np.ndarray) -> None:
        """Log-probs of prompt tokens for the requests that asked; position i scores token i + 1, at temperature 1."""
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
    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, previous: Launched | None) -> Launched:
        """Start one decode step: `slots` keep the tokens that were sampled last.

        With `previous`, the step after that one: its tokens are still on the device and nobody has read them yet.
        """
        ahead = 0 if previous is None else 1
        rows = np.array([s.row for s in running])
        lens = np.array([s.length + ahead for s in running])
        self.make_states(running, (lens - 1).tolist())
        self.set_table(rows, lens - 1, slots)
        self.states.spans, self.states.rows = None, torch.from_numpy(rows)
        self.states.held[rows] = -1
        ids = last_tokens(running) if previous is None else previous.tokens
        self.context.attend = self.context.decode_cpu
        self.context.slots = torch.from_numpy(slots)
        self.context.window.advance(rows.tolist(), lens.tolist(), self._table)
        hidden = self.hidden(ids[None], torch.from_numpy(lens - 1)[None])
        self.states.held[rows] = lens
        return Launched(*self._draw(self.logits(hidden), running, ahead))

    def collect(self, launched: Launched) -> Sampled:
        return launched.tokens.tolist(), launched.logprobs.tolist()

    def _sample(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> Sampled:
        tokens, logprobs = self._draw(logits, sequences, 0)
        return tokens.tolist(), logprobs.tolist()

    def _draw(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uniform = torch.from_numpy(uniforms(sequences, ahead)).to(self.device)
        greedy = torch.tensor([s.params.greedy for s in sequences], device=self.device)
        if all(s.plain for s in sequences):
            degrees = [temperature_of(s) for s in sequences]
            temperature = torch.tensor(degrees, device=self.device) if set(degrees) != {1.0} else None
            return draw(logits, temperature, uniform, greedy if any(s.params.greedy for s in sequences) else None)
        record_top(logits, sequences)
        return draw_each(logits, sequences, uniform, greedy)


def last_tokens(running: SequenceOf[Sequence]) -> torch.Tensor:
    return torch.tensor([s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in running])


def record_top(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
    """The most likely tokens at this position, for the sequences that asked."""
    for row, seq in zip(logits, sequences, strict=True):
        if seq.top_logprobs:
            best = (row / temperature_of(seq)).log_softmax(-1).topk(seq.top_logprobs)
            seq.output_top.append(list(zip(best.values.tolist(), best.indices.tolist(), strict=True)))
