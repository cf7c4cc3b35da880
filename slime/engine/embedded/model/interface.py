"""Interfaces of a step on CUDA: a model computes logits or hidden states, a sampler draws tokens from logits.

Invariant: a captured step reads and writes fixed addresses, and all state of a sequence is at its row of the slot
table. The last token of a sequence is at `tokens[row]`, independent of the step that sampled it, so a step can be
launched before the previous one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch

from slime.engine.embedded.model.cpu_layers import CompiledLayers
from slime.engine.embedded.model.decode_kernels import attend_decode, attend_extend
from slime.engine.embedded.model.prefill_kernels import ExtendTiles
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.scheduler import Sequence


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each of b sequences; padding uses the last row of the table, length 1 and slot 0."""

    rows: torch.Tensor  # int64 [b]
    lens: torch.Tensor  # int64 [b], the new token included
    slots: torch.Tensor  # int64 [b], slot of the new token's keys and values
    known: torch.Tensor  # int64 [b], the last token if the host knows it, else -1: it is at `tokens[row]`
    tokens: torch.Tensor  # int64 [rows of the table]


@dataclass(frozen=True)
class DrawBatch:
    """Sampling inputs and outputs of b sequences."""

    rows: torch.Tensor  # int64 [b]
    uniform: torch.Tensor  # float32 [b], in [0, 1)
    temperature: torch.Tensor  # float32 [b]
    greedy: torch.Tensor  # float32 [b], 1 for arg-max
    tokens: torch.Tensor  # int64 [rows of the table]
    results: torch.Tensor  # float64 [b, 2]: token, log-prob


class DeviceModel(Protocol):
    """Computes the forward pass of decode and extend steps on CUDA."""

    fewest_rows: int
    """Minimum batch size; smaller batches are padded."""
    extends_in_graphs: bool
    """True if `extend` can be captured: it reads only its arguments, the table and the slots."""

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """Write `slots` to `table[row, len - 1]` and return fp32 logits `[b, V]`. Captured in a graph."""
        ...

    def extend(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tiles: ExtendTiles
    ) -> torch.Tensor:
        """Return the last hidden states `[T, H]`, after the final norm.

        The table must have the slots of all visible tokens.
        """
        ...


class DeviceSampler(Protocol):
    """Samples tokens from logits on CUDA."""

    def plain(self, logits: torch.Tensor, batch: DrawBatch) -> None:
        """Sample each row of fp32 logits `[b, V]` by temperature or arg-max only. Captured in a graph."""
        ...

    def special(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> Callable[[], None] | None:
        """Sample again, after `plain`, the sequences that need more than that; may modify the logits.

        The caller calls the returned function once the results are on the host.
        """
        ...

    def foresees(self, seq: Sequence) -> bool:
        """Return True if a token can be sampled for `seq` before the host has read its last one."""
        ...


class TransformersModel:
    """Runs transformers' own modules, for every model; with `compile_layers`, decode steps use compiled layers."""

    def __init__(self, runner: ModelRunner, *, compile_layers: bool) -> None:
        self._runner = runner
        self._context = runner.context
        self._decode, self._extend = attend_decode(runner.context), attend_extend(runner.context)
        self._compiled = CompiledLayers(runner.body, runner.context) if compile_layers else None
        self.fewest_rows = 2 if compile_layers else 1  # compilers specialise on 1
        self.extends_in_graphs = not runner.states

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        context, states = self._context, self._runner.states
        rows, lens, slots = batch.rows, batch.lens, batch.slots
        ids = torch.where(batch.known < 0, batch.tokens[rows], batch.known)
        context.table[rows, lens - 1] = slots.int()
        context.rows, context.lens, context.slots = rows, lens.int(), slots
        context.attend = self._decode
        states.spans, states.rows = None, rows
        if self._compiled is None:
            hidden = self._runner.hidden(ids[None], (lens - 1)[None])
        else:
            hidden = self._compiled.run(lambda: self._runner.hidden(ids[None], (lens - 1)[None]))
        return self._runner.logits(hidden)

    def extend(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tiles: ExtendTiles
    ) -> torch.Tensor:
        self._context.slots, self._context.tiles, self._context.attend = slots, tiles, self._extend
        return self._runner.hidden(ids[None], positions[None])
