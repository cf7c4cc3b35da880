"""Penalties, biases and bans on the device: the tokens whose logits a table row changes, one entry each.

An entry has a token, its bias and its marks: whether it is in the prompt, whether it ends the sequence, and how often
it was sampled. The kernels update entries as tokens are sampled, so that no step waits for the host to read them.
Invariant: the entries of a row belong to the last sequence that `hold` saw there, and include `_included` sampled
tokens, read by the host or not. If that is not so, because the sequence is new to the row or a step failed, its entries
are rebuilt from its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.model.triton_launch import launch
from slime.engine.embedded.sampling.sample_kernels import (
    EDITS,
    FREQUENCY,
    MIN_NEW,
    PRESENCE,
    REPETITION,
    UNALIGNED_ARGUMENTS,
    kind_of,
    settings_of,
)
from slime.engine.embedded.scheduler import Sequence

# bits of an entry's marks
IN_PROMPT = tl.constexpr(1)
ENDS = tl.constexpr(2)
SAMPLED = tl.constexpr(4)  # times the number of samples


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def edit_kernel(LOGITS, ROWS, SETTINGS, IDS, MARKS, BIASES, LENGTHS, MADE, stride, room, BLOCK: tl.constexpr):
    """Edit the logits of one row in place."""
    b = tl.program_id(0)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & EDITS) == 0:
        return
    row = tl.load(ROWS + b)
    repetition, frequency = tl.load(own + REPETITION), tl.load(own + FREQUENCY)
    presence = tl.load(own + PRESENCE)
    banned = tl.where(tl.load(MADE + row) < tl.load(own + MIN_NEW), ENDS, 0)
    logits = LOGITS + b.to(tl.int64) * stride
    length = tl.load(LENGTHS + row)
    for start in range(0, length, BLOCK):
        j = start + tl.arange(0, BLOCK)
        real = j < length
        at = row * room + j
        token, marks = tl.load(IDS + at, mask=real, other=0), tl.load(MARKS + at, mask=real, other=0)
        bias = tl.load(BIASES + at, mask=real, other=0.0)
        x = tl.load(logits + token, mask=real, other=0.0)
        times = marks // SAMPLED
        penalised = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((marks & IN_PROMPT) + times > 0, penalised, x)
        x = tl.where(times > 0, x - (frequency * times + presence), x) + bias
        x = tl.where((marks & banned) != 0, -float("inf"), x)
        tl.store(logits + token, x, mask=real)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def note_kernel(ROWS, SETTINGS, TOKENS, IDS, MARKS, BIASES, LENGTHS, MADE, room, BLOCK: tl.constexpr):
    """Add the sampled token to the entries of its row."""
    b = tl.program_id(0)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & EDITS) == 0:
        return
    row = tl.load(ROWS + b)
    tl.store(MADE + row, tl.load(MADE + row) + 1)
    if (tl.load(own + REPETITION) != 1) | (tl.load(own + FREQUENCY) != 0) | (tl.load(own + PRESENCE) != 0):
        token, length = tl.load(TOKENS + row).to(tl.int32), tl.load(LENGTHS + row)
        at = length
        for start in range(0, length, BLOCK):
            j = start + tl.arange(0, BLOCK)
            same = tl.load(IDS + row * room + j, mask=j < length, other=-1) == token
            at = tl.minimum(at, tl.min(tl.where(same, j, length), 0))
        place = row * room + at
        if at < length:
            tl.store(MARKS + place, tl.load(MARKS + place) + SAMPLED)
        elif length < room:
            tl.store(IDS + place, token)
            tl.store(MARKS + place, SAMPLED)
            tl.store(BIASES + place, 0.0)
            tl.store(LENGTHS + row, length + 1)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device asynchronously; torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def put(into: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows at the indices `at`, in the dtype of `into`.

    Does nothing on `meta`, where torch would import sympy, which takes seconds.
    """
    if not into.is_meta:
        into.index_copy_(0, at.long(), values.to(into.dtype))


def copy_to_host(there: torch.Tensor) -> torch.Tensor:
    """Copy to the host asynchronously; the result may be read once the stream has reached this point."""
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    host.copy_(there, non_blocking=True)
    return host


_BLOCK = 1024


class PenaltyEntries:
    """The entries of all table rows; memory is allocated at the first edit and grows with the sequences."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._ids, self._marks = (torch.zeros(rows, 0, dtype=torch.int32, device=device) for _ in range(2))
        self._biases = torch.zeros(rows, 0, device=device)
        self._lengths, self._made = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self._owners: list[Sequence | None] = [None] * rows
        self._included = np.full(rows, -1)
        self._most = np.zeros(rows, np.int64)  # upper bound on the entries of a row

    def hold(self, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]) -> None:
        """Rebuild the entries of sequences that are new or out of date, and make room for one more entry each."""
        rows = [seq.row for seq in sequences]
        wanted = [len(seq.output_ids) + more for seq, more in zip(sequences, ahead, strict=True)]
        included, owners = self._included[rows].tolist(), self._owners
        stale = [i for i, seq in enumerate(sequences) if owners[seq.row] is not seq or included[i] != wanted[i]]
        if unread := [sequences[i] for i in stale if ahead[i]]:
            raise RuntimeError(f"request {unread[0].rid} has unread tokens that the entries of its row do not include")
        fresh = [SequenceEntries.of(sequences[i], self._vocab) for i in stale]
        for made in fresh:
            self._most[made.row] = made.length
        needed, room = int(self._most[rows].max()) + 1, self._ids.shape[1]
        if needed > room:
            more = max(room, -(-needed // 1024) * 1024 - room)
            self._ids, self._marks, self._biases = (
                torch.nn.functional.pad(x, (0, more)) for x in (self._ids, self._marks, self._biases)
            )
        if fresh:
            self._load(fresh)
        for i in stale:
            seq = sequences[i]
            owners[seq.row] = seq
            self._included[seq.row] = wanted[i]

    def follow(self, seq: Sequence) -> bool:
        """Return True if the entries of its row include all sampled tokens of this sequence, read or not."""
        return self._owners[seq.row] is seq and self._included.item(seq.row) == len(seq.output_ids) + seq.ahead

    def edit(self, logits: torch.Tensor, batch: DrawBatch, settings: torch.Tensor) -> None:
        """Edit, in place, the rows whose settings require it."""
        launch(
            edit_kernel, (len(logits),),
            logits, batch.rows, settings, self._ids, self._marks, self._biases, self._lengths, self._made,
            logits.stride(0), self._ids.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip

    def note(self, batch: DrawBatch, settings: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        """Add the sampled tokens to the entries of these sequences."""
        rows = [seq.row for seq in sequences]
        included = self._included[rows] + 1
        self._included[rows] = -1
        launch(
            note_kernel, (len(batch.rows),),
            batch.rows, settings, batch.tokens, self._ids, self._marks, self._biases, self._lengths, self._made,
            self._ids.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
        self._included[rows] = included
        self._most[rows] += 1

    def _load(self, fresh: list[SequenceEntries]) -> None:
        """Write the entries of some rows with one asynchronous copy."""
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
class SequenceEntries:
    """Entries of one sequence, built from its tokens."""

    row: int
    made: int
    ids: np.ndarray
    marks: np.ndarray
    biases: np.ndarray

    @property
    def length(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, seq: Sequence, vocab: int) -> SequenceEntries:
        params = seq.params
        empty = np.zeros(0, np.int64)
        prompt = np.unique(seq.prompt_ids) if params.repetition_penalty != 1.0 else empty
        counts_outputs = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        sampled, times = np.unique(seq.output_ids if counts_outputs else empty, return_counts=True)
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
