"""Triton kernels that sample one token per row from fp32 logits, in one pass over the vocabulary plus one tile.

A row is split into tiles. `mass` stores the largest logit of each tile and the sum of exp relative to it; `pick` finds
the tile and then the token at which the cumulative mass exceeds `uniform` of the total. Log-probs are those of the
whole row, scaled by the temperature. A row that has a NaN, or only -inf, gets a token of the vocabulary and the
log-prob NaN.

Temperatures, greedy flags and uniform numbers are indexed by position in the batch. Settings that only some sequences
use are indexed by table row: `settings[row]`, whose columns are named here.
"""

from __future__ import annotations

import triton
import triton.language as tl

KIND = tl.constexpr(0)  # a bit mask of the three below
EDITS = tl.constexpr(1)  # penalties, biases or a ban
CUTS = tl.constexpr(2)  # top-k, top-p, min-p
COUNTS = tl.constexpr(4)  # the cuts include top-k
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
REACH = tl.constexpr(3)  # -log(min_p): the largest distance below the most likely token that min-p allows
REPETITION = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
MIN_NEW = tl.constexpr(7)
COLUMNS = tl.constexpr(8)

UNALIGNED_ARGUMENTS = ("ROWS", "TEMPERATURE", "GREEDY", "UNIFORM", "RESULTS")
"""Arguments whose start depends on the batch; without alignment specialisation, kernels are not recompiled in a run."""


@triton.jit
def settings_of(SETTINGS, ROWS, b):
    """Pointer to the settings of the sequence at index `b` of the batch."""
    return SETTINGS + tl.load(ROWS + b) * COLUMNS


@triton.jit
def kind_of(SETTINGS, ROWS, b):
    return tl.load(settings_of(SETTINGS, ROWS, b) + KIND).to(tl.int32)


@triton.jit
def inverse_of(TEMPERATURE, b):
    """Inverse temperature, clamped: above 2 ** 126, where all tokens are equally likely, it would be subnormal."""
    return 1.0 / tl.minimum(tl.load(TEMPERATURE + b), 8.5e37)


@triton.jit
def distance(top, x, inverse):
    """Distance below the most likely token, in nats; subtracts first, so that no compiler fuses the operations."""
    return (top - x) * inverse


@triton.jit
def finite_max(tops):
    """Largest logit; 0 when all are -inf, so that differences are not NaN."""
    top = tl.max(tops, 0)
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def mass_kernel(
    LOGITS, ROWS, TEMPERATURE, GREEDY, SETTINGS, TOPS, MASSES, BEST, vocab, stride, tiles, idle,
    REDRAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Process one tile of one row; `idle` is the table row of padding. A redraw processes only edited rows."""
    b, t = tl.program_id(0), tl.program_id(1)
    if REDRAW:
        kind = kind_of(SETTINGS, ROWS, b)
        if (kind & EDITS) == 0:
            return
    else:
        if tl.load(ROWS + b) == idle:
            return
    i = t * TILE + tl.arange(0, TILE)
    x = tl.load(LOGITS + b.to(tl.int64) * stride + i, mask=i < vocab, other=-float("inf"))
    inverse = inverse_of(TEMPERATURE, b)
    top = tl.max(x, 0)
    tl.store(TOPS + b * tiles + t, top)
    tl.store(MASSES + b * tiles + t, tl.sum(tl.exp(-distance(finite_max(x), x, inverse)), 0))
    if tl.load(GREEDY + b) != 0:
        tl.store(BEST + b * tiles + t, tl.min(tl.where(x == top, i, vocab - 1), 0))


@triton.jit
def tile_masses(TOPS, MASSES, b, tiles, inverse, TP: tl.constexpr):
    """Largest logit of a row, and the mass of each of its tiles relative to it."""
    t = tl.arange(0, TP)
    tops = tl.load(TOPS + b * tiles + t, mask=t < tiles, other=-float("inf"))
    masses = tl.load(MASSES + b * tiles + t, mask=t < tiles, other=0.0)
    top = finite_max(tops)
    return top, masses * tl.exp(-distance(top, tops, inverse))


@triton.jit
def first_crossing(weights, places, target):
    """First of `places` at which the cumulative weight exceeds `target`; never one of weight zero."""
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    over = (tl.cumsum(weights, 0) > target) & (weights > 0)
    return tl.minimum(tl.min(tl.where(over, places, 2147483647), 0), last)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def pick_kernel(
    LOGITS, ROWS, TEMPERATURE, GREEDY, UNIFORM, SETTINGS, TOPS, MASSES, BEST, KEPT, LIMIT, LAST, TOKENS, RESULTS,
    vocab, stride, tiles, idle,
    REDRAW: tl.constexpr, TILE: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row and its log-prob.

    The next step reads TOKENS [rows]; RESULTS [b, 2] goes to the host, in fp64, which holds both exactly. For a row
    with cuts, KEPT has the tiles' masses after them, LIMIT the distance and LAST the index of the last kept token.
    """
    b = tl.program_id(0)
    if REDRAW:
        kind = kind_of(SETTINGS, ROWS, b)
        if kind == 0:
            return
    else:
        kind = 0
        if tl.load(ROWS + b) == idle:
            return
    t = tl.arange(0, TP)
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    total = tl.sum(masses, 0)
    logits = LOGITS + b.to(tl.int64) * stride
    token = 0
    if tl.load(GREEDY + b) != 0:
        tops = tl.load(TOPS + b * tiles + t, mask=t < tiles, other=-float("inf"))
        tile = tl.min(tl.where(tops == tl.max(tops, 0), t, tiles - 1), 0)
        token = tl.load(BEST + b * tiles + tile)
    else:
        if (kind & CUTS) != 0:
            masses = tl.load(KEPT + b * tiles + t, mask=t < tiles, other=0.0)
        target = tl.load(UNIFORM + b) * tl.sum(masses, 0)
        tile = first_crossing(masses, t, target)
        rest = target - tl.sum(tl.where(t < tile, masses, 0.0), 0)
        i = tile * TILE + tl.arange(0, TILE)
        far = distance(top, tl.load(logits + i, mask=i < vocab, other=-float("inf")), inverse)
        weights = tl.exp(-far)
        if (kind & CUTS) != 0:
            limit = tl.load(LIMIT + b)
            stays = (far < limit) | ((far == limit) & (i <= tl.load(LAST + b)))
            weights = tl.where(stays, weights, 0.0)
        token = first_crossing(weights, i, rest)
    token = tl.minimum(token, vocab - 1)
    score = -distance(top, tl.load(logits + token), inverse) - tl.log(total)
    score = tl.where(total > 0, score, float("nan"))
    tl.store(TOKENS + tl.load(ROWS + b), token.to(tl.int64))
    tl.store(RESULTS + b * 2, token.to(tl.float64))
    tl.store(RESULTS + b * 2 + 1, score.to(tl.float64))
