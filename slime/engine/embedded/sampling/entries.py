"""What each table row changes about logits, on the device: the tokens with a penalty, a bias or a ban.

Invariant: the entries of a row belong to the sequence that `hold` saw there last, and have taken in as many sampled
tokens as `included` says, read by the host or not. A sequence for which that is not so, because it is new to the row or
a step failed, has its entries made anew from its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.embedded.model.body import DrawBatch
from slime.engine.embedded.sampling.device import Launch, launch, put, send
from slime.engine.embedded.sampling.edit_kernels import ENDS, IN_PROMPT, SAMPLED, edit_kernel, note_kernel
from slime.engine.embedded.sequence import Sequence

_BLOCK = 1024


class Entries:
    """Room for all rows is made when somebody asks for an edit, and more of it as their texts grow."""

    def __init__(self, rows: int, vocab: int, device: torch.device, run: Launch = launch) -> None:
        self._run = run
        self._vocab = vocab
        self._device = device
        self._ids, self._marks = (torch.zeros(rows, 0, dtype=torch.int32, device=device) for _ in range(2))
        self._biases = torch.zeros(rows, 0, device=device)
        self._lengths, self._made = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self._owners: list[Sequence | None] = [None] * rows
        self._included = np.full(rows, -1)
        self._most = np.zeros(rows, np.int64)  # entries that a row may have by now

    def hold(self, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]) -> None:
        """See that the entries of these sequences are theirs, and that each has room for one more."""
        rows = [seq.row for seq in sequences]
        wanted = [len(seq.output_ids) + more for seq, more in zip(sequences, ahead, strict=True)]
        included, owners = self._included[rows].tolist(), self._owners
        stale = [i for i, seq in enumerate(sequences) if owners[seq.row] is not seq or included[i] != wanted[i]]
        if unread := [sequences[i] for i in stale if ahead[i]]:
            raise RuntimeError(f"the tokens that request {unread[0].rid} has on the device are not those of its row")
        fresh = [Fresh.of(sequences[i], self._vocab) for i in stale]
        for made in fresh:
            self._most[made.row] = made.length
        self._make_room(int(self._most[rows].max()) + 1)
        if fresh:
            self._load(fresh)
        for i in stale:
            seq = sequences[i]
            owners[seq.row] = seq
            self._included[seq.row] = wanted[i]

    def follow(self, seq: Sequence) -> bool:
        """Whether the entries of its row have taken in all that was drawn for this sequence, read or not."""
        return self._owners[seq.row] is seq and self._included.item(seq.row) == len(seq.output_ids) + seq.ahead

    def edit(self, logits: torch.Tensor, batch: DrawBatch, settings: torch.Tensor) -> None:
        """Edit the rows whose settings ask for it, in place."""
        self._run(
            edit_kernel, (len(logits),),
            logits, batch.rows, settings, self._ids, self._marks, self._biases, self._lengths, self._made,
            logits.stride(0), self._ids.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip

    def note(self, batch: DrawBatch, settings: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        """The tokens that were drawn belong to the entries of these sequences from now on."""
        rows = [seq.row for seq in sequences]
        included = self._included[rows] + 1
        self._included[rows] = -1
        self._run(
            note_kernel, (len(batch.rows),),
            batch.rows, settings, batch.tokens, self._ids, self._marks, self._biases, self._lengths, self._made,
            self._ids.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
        self._included[rows] = included
        self._most[rows] += 1

    def _make_room(self, needed: int) -> None:
        """Every row gets at least so many places; what they hold stays."""
        room = self._ids.shape[1]
        if needed > room:
            more = max(room, -(-needed // 1024) * 1024 - room)
            self._ids, self._marks, self._biases = (
                torch.nn.functional.pad(x, (0, more)) for x in (self._ids, self._marks, self._biases)
            )

    def _load(self, fresh: list[Fresh]) -> None:
        """The entries of some rows, in one copy that nobody waits for."""
        room = self._ids.shape[1]
        places = np.concatenate([f.row * room + np.arange(len(f.ids)) for f in fresh])
        columns = [np.concatenate([getattr(f, name) for f in fresh]) for name in ("ids", "marks", "biases")]
        heads = [np.array([getattr(f, name) for f in fresh]) for name in ("row", "length", "made")]
        there = send(np.concatenate([places, *columns, *heads]).astype(np.float64), self._device)
        count = len(places)
        at, ids, marks, biases = there[: 4 * count].view(4, count).unbind(0)
        rows, lengths, made = there[4 * count :].view(3, len(fresh)).unbind(0)
        for tensor, values in ((self._ids, ids), (self._marks, marks), (self._biases, biases)):
            put(tensor.view(-1), at, values)
        for tensor, values in ((self._lengths, lengths), (self._made, made)):
            put(tensor, rows, values)


@dataclass(frozen=True)
class Fresh:
    """The entries of one sequence, made of its tokens."""

    row: int
    made: int
    ids: np.ndarray
    marks: np.ndarray
    biases: np.ndarray

    @property
    def length(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, seq: Sequence, vocab: int) -> Fresh:
        params = seq.params
        nobody = np.zeros(0, np.int64)
        prompt = np.unique(seq.prompt_ids) if params.repetition_penalty != 1.0 else nobody
        counts_outputs = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        sampled, times = np.unique(seq.output_ids if counts_outputs else nobody, return_counts=True)
        biases = {int(name): bias for name, bias in (params.logit_bias or {}).items()}
        ends = [token for token in seq.stop_ids if token < vocab] if params.min_new_tokens else []
        ids = np.unique(np.concatenate([prompt, sampled, list(biases), ends]).astype(np.int64))
        marks = np.zeros(len(ids), np.int64)
        marks[np.searchsorted(ids, prompt)] += IN_PROMPT.value
        marks[np.searchsorted(ids, sampled)] += SAMPLED.value * times
        marks[np.searchsorted(ids, ends)] += ENDS.value
        added = np.zeros(len(ids))
        added[np.searchsorted(ids, list(biases))] = list(biases.values())
        return cls(seq.row, len(seq.output_ids), ids, marks, added)
