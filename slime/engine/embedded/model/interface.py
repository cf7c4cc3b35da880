"""What computes a step's numbers on CUDA: a body gives logits or hidden states, a draw turns logits into tokens.

Invariant: what a captured step reads and writes lies at fixed addresses, and all state of a sequence lies at the row
that it has in the slot table. The token that a sequence got last is at `tokens[row]`, whichever step it came from, so a
step can be launched before the one before it was read.
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
    """One token for each of b sequences; padding is the last row of the table, of length 1, at slot 0."""

    rows: torch.Tensor  # int64 [b]
    lens: torch.Tensor  # int64 [b], the new token counted
    slots: torch.Tensor  # int64 [b], where the new token's keys and values go
    known: torch.Tensor  # int64 [b], the last token where the host knows it, else -1: it is at `tokens[row]`
    tokens: torch.Tensor  # int64 [rows of the table]


@dataclass(frozen=True)
class DrawBatch:
    """How tokens are drawn for b sequences, and where they go."""

    rows: torch.Tensor  # int64 [b]
    uniform: torch.Tensor  # float32 [b], in [0, 1)
    temperature: torch.Tensor  # float32 [b]
    greedy: torch.Tensor  # float32 [b], 1 where the arg-max is wanted
    tokens: torch.Tensor  # int64 [rows of the table]
    results: torch.Tensor  # float64 [b, 2]: token, log-prob


class Body(Protocol):
    fewest_rows: int
    """Smaller batches are padded to so many."""
    extends_in_graphs: bool
    """Whether `extend` can be captured: it reads nothing but its arguments, the table and the slots."""

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """fp32 logits `[b, V]`; writes `slots` to `table[row, len - 1]` first. Captured in a graph."""
        ...

    def extend(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tiles: ExtendTiles
    ) -> torch.Tensor:
        """Last hidden states `[T, H]`, after the final norm; the table has the slots of all tokens that are seen."""
        ...


class Draw(Protocol):
    def plain(self, logits: torch.Tensor, batch: DrawBatch) -> None:
        """Temperature and arg-max only: a token for each row of fp32 logits `[b, V]`. Captured in a graph."""
        ...

    def special(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> Callable[[], None] | None:
        """After `plain`: draw anew for the sequences that want more than that; the logits are theirs to change.

        What it returns is called when the step has come to its end and somebody reads it.
        """
        ...

    def foresees(self, seq: Sequence) -> bool:
        """Whether a token can be drawn for `seq` before the host has read its last one."""
        ...


class GeneralBody:
    """Any model, through transformers' own modules; with `compile_layers` decode steps go through compiled layers."""

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
