"""Triton kernels that find where top-k, top-p and min-p cut a row, without sorting it.

Tokens are ordered by their distance below the most likely one, in nats, and by index where it is equal. The kept ones
are the beginning of that order: fewer than `k` tokens come before each, less mass than `p` of the whole, and none is
further than `reach`. So a cut is a distance and an index, and it is searched for:

- `probe` narrows a bracket (a, b]: all tokens within `a` stay, none beyond `b` does. It measures the mass (and the
  number) of tokens within eight distances in the bracket; the next one begins by reading what came out.
- `gather` lists the tokens in the bracket once they are few, by tiles of the row, and the mass within `a` of each tile.
- `settle` probes that list until one token or one distance is left, and counts who of those at that distance stays.

A row whose bracket is still too full for the list (thousands of equal logits) is probed to the end by `settle` itself.
A token more than 87 nats below the first weighs nothing in fp32, so nobody looks further.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.embedded.sampling.draw_kernels import (
    BY_PLACE,
    CUTS,
    REACH,
    TOP_K,
    TOP_P,
    distance,
    inverse_of,
    kind_of,
    settings_of,
    tile_masses,
)

PROBES = tl.constexpr(8)  # distances measured at once
STATE = tl.constexpr(8)  # numbers kept of a bracket
MOST = tl.constexpr(1024.0)  # tokens in a bracket that is worth a list


@triton.jit
def key_of(far):
    """Distances as integers of the same order; -1: nothing is that near."""
    return tl.where(far < 0, -1, far.to(tl.int32, bitcast=True))


@triton.jit
def is_narrow(a, b, mass_a, mass_b):
    """Whether what is left in the bracket can be listed, or is at one distance: each token there weighs exp(-b)."""
    return (key_of(b) - key_of(a) <= 1) | ((mass_b - mass_a) * tl.exp(b) <= MOST)


@triton.jit
def wanted(own, total):
    """How many tokens may stay, and the mass at which enough have."""
    k, p = tl.load(own + TOP_K), tl.load(own + TOP_P)
    return tl.where(k > 0, k, float("inf")), tl.where(p < 1, p * total, float("inf"))


@triton.jit
def beginning(own, total, vocab):
    """The first bracket's end: beyond it lies less than 1 - p of the mass even if every token were just there."""
    p = tl.load(own + TOP_P)
    rest = tl.where(p < 1, (1 - p) * total, 0.0)
    b = tl.minimum(tl.load(own + REACH), 87.0)
    b = tl.where(rest > 0, tl.minimum(b, tl.maximum(tl.log(vocab / rest) + 0.01, 0.0)), b)
    return tl.where(total > 0, b, 0.0)


@triton.jit
def limits_in(a, b, mass_a, mass_b, count_a, count_b, k, target):
    """Distances to measure inside the bracket: some evenly, some around where the target lies if it grows evenly.

    The first bracket reaches from nothing (a < 0) and has more of them near its beginning, and its end, among them.
    """
    j = tl.arange(0, PROBES)
    is_first = a < 0
    by_count = tl.where(k < float("inf"), (k - count_a) / (count_b - count_a), 1.0)
    share = tl.minimum((target - mass_a) / (mass_b - mass_a), by_count)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    side = tl.where(j % 2 == 0, -1.0, 1.0) * tl.where(j < 6, 1.0 / 96, 1.0 / 12)
    part = tl.where(j < 4, (j + 1) / 5, tl.minimum(tl.maximum(share + side, 0.0), 1.0))
    even = j / (PROBES - 1)
    part = tl.where(is_first, even * even, part)
    low = tl.maximum(a, 0.0)
    below, above = key_of(a), key_of(b)
    key = key_of(low + (b - low) * part)
    key = tl.where(above - below <= PROBES, below + 1 + j, key)
    key = tl.minimum(tl.maximum(key, below + 1), tl.where(is_first, above, above - 1))
    return key.to(tl.float32, bitcast=True)


@triton.jit
def measured(X, begin, end, top, inverse, limits, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass and number of the tokens in [begin, end) within each of the limits."""
    masses = tl.zeros((PROBES, BLOCK), tl.float32)
    counts = tl.zeros((PROBES, BLOCK), tl.float32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        far = distance(top, tl.load(X + i, mask=i < end, other=-float("inf")), inverse)
        within = far[None, :] <= limits[:, None]
        masses += tl.where(within, tl.exp(-far)[None, :], 0.0)
        if COUNTS:
            counts += tl.where(within, 1.0, 0.0)
    return tl.sum(masses, 1), tl.sum(counts, 1)


@triton.jit
def narrowed(a, b, mass_a, mass_b, count_a, count_b, limits, masses, counts, k, target):
    """The bracket after what was measured at the limits."""
    enough = (counts >= k) | (masses >= target)
    end = tl.min(tl.where(enough, limits, float("inf")), 0)
    short = (limits < end) & (enough == 0)
    new_a = tl.maximum(a, tl.max(tl.where(short, limits, -1.0), 0))
    mass_a = tl.maximum(mass_a, tl.max(tl.where(short, masses, 0.0), 0))
    count_a = tl.maximum(count_a, tl.max(tl.where(short, counts, 0.0), 0))
    is_nearer = end <= b
    mass_b = tl.where(is_nearer, tl.min(tl.where(limits == end, masses, float("inf")), 0), mass_b)
    count_b = tl.where(is_nearer, tl.min(tl.where(limits == end, counts, float("inf")), 0), count_b)
    return new_a, tl.minimum(b, end), mass_a, mass_b, count_a, count_b


@triton.jit
def load_state(STATES, b):
    s = STATES + b * STATE
    return tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5)


@triton.jit
def bracket(
    own, SUMS, STATES, b, total, vocab, tiles, k, target, FIRST: tl.constexpr, COUNTS: tl.constexpr, TP: tl.constexpr
):  # fmt: skip
    """The bracket after the probe before this one; the first one where there was none.

    SUMS [b, tiles, 2, PROBES] has what each tile measured, STATES [b, STATE] the bracket it measured in.
    """
    if FIRST:
        end = beginning(own, total, vocab)
        a, mass_a, count_a = end * 0.0 - 1.0, end * 0.0, end * 0.0
        mass_b, count_b = total, end * 0.0 + vocab
    else:
        a, end, mass_a, mass_b, count_a, count_b = load_state(STATES, b)
        if is_narrow(a, end, mass_a, mass_b) == 0:
            limits = limits_in(a, end, mass_a, mass_b, count_a, count_b, k, target)
            t, j = tl.arange(0, TP), tl.arange(0, PROBES)
            at = SUMS + b * tiles * 2 * PROBES + t[:, None] * 2 * PROBES + j[None, :]
            masses = tl.sum(tl.load(at, mask=t[:, None] < tiles, other=0.0), 0)
            if COUNTS:
                counts = tl.sum(tl.load(at + PROBES, mask=t[:, None] < tiles, other=0.0), 0)
            else:
                counts = tl.zeros((PROBES,), tl.float32)
            a, end, mass_a, mass_b, count_a, count_b = narrowed(
                a, end, mass_a, mass_b, count_a, count_b, limits, masses, counts, k, target
            )
    return a, end, mass_a, mass_b, count_a, count_b


@triton.jit
def store_state(STATES, b, a, end, mass_a, mass_b, count_a, count_b):
    s = STATES + b * STATE
    tl.store(s, a)
    tl.store(s + 1, end)
    tl.store(s + 2, mass_a)
    tl.store(s + 3, mass_b)
    tl.store(s + 4, count_a)
    tl.store(s + 5, count_b)


@triton.jit(do_not_specialize_on_alignment=BY_PLACE)
def probe_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, SUMS_BEFORE, STATES_BEFORE, SUMS, STATES, vocab, stride, tiles,
    FIRST: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one row; every tile of a row comes to the same bracket by itself."""
    b, tile = tl.program_id(0), tl.program_id(1)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    total = tl.sum(masses, 0)
    k, target = wanted(own, total)
    a, end, mass_a, mass_b, count_a, count_b = bracket(
        own, SUMS_BEFORE, STATES_BEFORE, b, total, vocab, tiles, k, target, FIRST, COUNTS, TP
    )
    if tile == 0:
        store_state(STATES, b, a, end, mass_a, mass_b, count_a, count_b)
    if is_narrow(a, end, mass_a, mass_b) == 0:
        limits = limits_in(a, end, mass_a, mass_b, count_a, count_b, k, target)
        begin = tile * TILE
        within, counts = measured(
            LOGITS + b.to(tl.int64) * stride,
            begin,
            tl.minimum(begin + TILE, vocab),
            top,
            inverse,
            limits,
            COUNTS,
            BLOCK,
        )
        at = SUMS + (b * tiles + tile) * 2 * PROBES + tl.arange(0, PROBES)
        tl.store(at, within)
        if COUNTS:
            tl.store(at + PROBES, counts)


@triton.jit(do_not_specialize_on_alignment=BY_PLACE)
def gather_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, SUMS_BEFORE, STATES_BEFORE, STATES, KEPT, FOUND, LISTED, INDEX,
    vocab, stride, tiles,
    COUNTS: tl.constexpr, TILE: tl.constexpr, TP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """LISTED [b, tiles, ROOM] gets the negated distances in the bracket, INDEX their tokens, FOUND how many a tile has.

    FOUND is more than there is room for where nothing was listed.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    total = tl.sum(masses, 0)
    k, target = wanted(own, total)
    a, end, mass_a, mass_b, count_a, count_b = bracket(
        own, SUMS_BEFORE, STATES_BEFORE, b, total, vocab, tiles, k, target, False, COUNTS, TP
    )
    if tile == 0:
        store_state(STATES, b, a, end, mass_a, mass_b, count_a, count_b)
    place = b * tiles + tile
    found = ROOM + 1
    if is_narrow(a, end, mass_a, mass_b):
        i = tile * TILE + tl.arange(0, TILE)
        logits = LOGITS + b.to(tl.int64) * stride
        far = distance(top, tl.load(logits + i, mask=i < vocab, other=-float("inf")), inverse)
        tl.store(KEPT + place, tl.sum(tl.where(far <= a, tl.exp(-far), 0.0), 0))
        inside = ((far > a) & (far <= end)).to(tl.int32)
        at = tl.cumsum(inside, 0) - 1
        found = tl.sum(inside, 0)
        fits = (inside != 0) & (at < ROOM)
        tl.store(LISTED + place * ROOM + at, -far, mask=fits)
        tl.store(INDEX + place * ROOM + at, i, mask=fits)
        empty = tl.arange(0, ROOM)
        tl.store(LISTED + place * ROOM + empty, -float("inf"), mask=empty >= found)
    tl.store(FOUND + place, found)


@triton.jit(do_not_specialize_on_alignment=BY_PLACE)
def settle_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, STATES, KEPT, FOUND, LISTED, INDEX, LIMIT, LAST,
    vocab, stride, tiles,
    TILE: tl.constexpr, TP: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: from the bracket to the last token that stays, and the mass that each tile keeps."""
    b, t = tl.program_id(0), tl.arange(0, TP)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    k, target = wanted(own, tl.sum(masses, 0))
    a, end, mass_a, mass_b, count_a, count_b = load_state(STATES, b)
    logits = LOGITS + b.to(tl.int64) * stride
    listed = LISTED + b * tiles * ROOM
    is_listed = tl.max(tl.load(FOUND + b * tiles + t, mask=t < tiles, other=0), 0) <= ROOM
    mass, count = tl.where(is_listed, mass_a, 0.0), tl.where(is_listed, count_a, 0.0)  # what is not in the list
    count_b = tl.where(k < float("inf"), count_b, float("inf"))  # nobody has counted so far
    passes = 0  # a bracket with an end that is no number would never become narrow
    while (passes < 200) & (key_of(end) - key_of(a) > 1) & (count_b - count_a > 1):
        passes += 1
        limits = limits_in(a, end, mass_a, mass_b, count_a, count_b, k, target)
        if is_listed:
            more, others = measured(listed, 0, tiles * ROOM, 0.0, 1.0, limits, True, BLOCK)
        else:
            more, others = measured(logits, 0, vocab, top, inverse, limits, True, BLOCK)
        a, end, mass_a, mass_b, count_a, count_b = narrowed(
            a, end, mass_a, mass_b, count_a, count_b, limits, mass + more, count + others, k, target
        )
    a = tl.where(count_b - count_a > 1, a, end)  # the first one in a bracket always stays
    staying = tl.minimum(k - count_a, tl.ceil((target - mass_a) * tl.exp(end)))  # of those at the last distance
    last = -1
    if is_listed:
        place = t[:, None] * ROOM + tl.arange(0, ROOM)[None, :]
        real = t[:, None] < tiles
        far = -tl.load(listed + place, mask=real, other=-float("inf"))
        ties = (far == end).to(tl.int32)
        in_tile = tl.sum(ties, 1)
        rank = tl.cumsum(ties, 1) + (tl.cumsum(in_tile, 0) - in_tile)[:, None]
        stays = (far <= a) | ((ties != 0) & (rank <= staying))
        kept = tl.load(KEPT + b * tiles + t, mask=t < tiles, other=0.0)
        kept += tl.sum(tl.where(stays, tl.exp(-far), 0.0), 1)
        tl.store(KEPT + b * tiles + t, kept, mask=t < tiles)
        index = tl.load(INDEX + b * tiles * ROOM + place, mask=real, other=-1)
        last = tl.max(tl.max(tl.where(stays & (ties != 0), index, -1), 1), 0)
    else:
        seen = 0
        for tile in range(0, tiles):
            i = tile * TILE + tl.arange(0, TILE)
            far = distance(top, tl.load(logits + i, mask=i < vocab, other=-float("inf")), inverse)
            ties = (far == end).to(tl.int32)
            stays = (far <= a) | ((ties != 0) & (seen + tl.cumsum(ties, 0) <= staying))
            tl.store(KEPT + b * tiles + tile, tl.sum(tl.where(stays, tl.exp(-far), 0.0), 0))
            last = tl.maximum(last, tl.max(tl.where(stays & (ties != 0), i, -1), 0))
            seen += tl.sum(ties, 0)
    tl.store(LIMIT + b, end)
    tl.store(LAST + b, tl.where(a == end, vocab, last))
