"""What each table row changes about logits, on the device: the tokens with a penalty, a bias or a ban.

Invariant: the entries of a row belong to the sequence that `hold` saw there last, and have taken in as many sampled
tokens as `included` says, read by the host or not. A sequence for which that is not so, because it is new to the row or
a step failed, has its entries made anew from its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.sampling.sample_kernels import (
    BY_PLACE,
    EDITS,
    FREQUENCY,
    MIN_NEW,
    PRESENCE,
    REPETITION,
    kind_of,
    settings_of,
)
from slime.engine.embedded.scheduler import Sequence

# Triton kernels for penalties, biases and bans: the tokens that a row changes, one entry each, and no others.
#
# Of an entry there are the token, its bias and its marks: whether it is in the prompt, whether it ends the sequence,
# and how often it was sampled. The kernels keep these as tokens are drawn, so that nobody waits for the host to read
# them.

IN_PROMPT = tl.constexpr(1)
ENDS = tl.constexpr(2)
SAMPLED = tl.constexpr(4)  # times how often


@triton.jit(do_not_specialize_on_alignment=BY_PLACE)
def edit_kernel(LOGITS, ROWS, SETTINGS, IDS, MARKS, BIASES, LENGTHS, MADE, stride, room, BLOCK: tl.constexpr):
    """Edits the logits of one row in place."""
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


@triton.jit(do_not_specialize_on_alignment=BY_PLACE)
def note_kernel(ROWS, SETTINGS, TOKENS, IDS, MARKS, BIASES, LENGTHS, MADE, room, BLOCK: tl.constexpr):
    """Takes the token that was drawn into the entries of its row."""
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


# To the device and back without waiting, and how a kernel is launched there, or only compiled.

Launch = Callable[..., None]
"""Takes a kernel, its grid, its arguments, and by name what it is compiled for."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled_for: Any) -> None:
    kernel[grid](*arguments, **compiled_for)


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled_for: Any) -> None:
    """Compile for arguments like these, whose tensors need not lie on the device."""
    types = (x.dtype if isinstance(x, torch.Tensor) else x for x in arguments)
    kernel.warmup(*types, grid=grid, **compiled_for)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def put(into: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Rows to their places, in the dtype there; nothing on `meta`, where torch would import sympy, seconds, for it."""
    if not into.is_meta:
        into.index_copy_(0, at.long(), values.to(into.dtype))


def bring(there: torch.Tensor) -> torch.Tensor:
    """To memory that may be read when the stream has come so far."""
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    host.copy_(there, non_blocking=True)
    return host


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
