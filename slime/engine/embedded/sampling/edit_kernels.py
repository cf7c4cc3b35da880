"""Triton kernels for penalties, biases and bans: the tokens that a row changes, one entry each, and no others.

Of an entry there are the token, its bias and its marks: whether it is in the prompt, whether it ends the sequence, and
how often it was sampled. The kernels keep these as tokens are drawn, so that nobody waits for the host to read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.embedded.sampling.draw_kernels import (
    BY_PLACE,
    EDITS,
    FREQUENCY,
    MIN_NEW,
    PRESENCE,
    REPETITION,
    kind_of,
    settings_of,
)

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
