"""Triton kernels that find where top-k, top-p and min-p cut a row, without sorting it.

Tokens are ordered by their distance below the most likely one, in nats, and by index where distances are equal. The
kept tokens are a prefix of that order: fewer than `k` tokens and less mass than `p` of the total precede each of them,
and none is further than `reach`. So a cut is a distance and an index. Three kernels search for it:

- `probe` narrows a bracket (a, b]: all tokens within `a` are kept, none beyond `b` is. It measures the mass (and the
  number) of tokens within eight distances in the bracket; the next kernel starts by reading the result. It does nothing
  once the bracket has few tokens.
- `gather` lists the tokens in the bracket by tiles of the row, and computes for each tile the mass within `a` and the
  smallest and largest distance in the bracket.
- `settle` bisects that range until one distance is left, and counts how many of the tokens at that distance are kept.

Distances are bisected as integers, which have the same order, and both ends move to distances of actual tokens: there
are at most 31 bisections, and a thousand equal logits need none. If a tile has more tokens in the bracket than its list
holds, `settle` reads the whole row in each iteration, which is slower and gives the same result. The weight of a token
more than 87 nats below the first is zero in fp32, so the search ends there.

These kernels branch and loop on sums of floats, and all threads of a program must take the same branch, or they
deadlock. A sum over threads is the same in each thread only if no product is fused into its additions: two threads that
exchange a * b and c * d would have a * b + (c * d) and (a * b) + c * d, each with a different product unrounded. They
are therefore compiled with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.embedded.sampling.sample_kernels import (
    CUTS,
    REACH,
    TOP_K,
    TOP_P,
    UNALIGNED_ARGUMENTS,
    distance,
    inverse_of,
    kind_of,
    settings_of,
    tile_masses,
)

PROBES = tl.constexpr(8)  # distances measured per pass
STATE = tl.constexpr(8)  # stored values per bracket
MAX_LISTED = tl.constexpr(1024.0)  # maximum tokens in a bracket that is listed
NO_KEY = tl.constexpr(2147483647)  # larger than the key of every distance


@triton.jit
def key_of(far):
    """Distances as integers of the same order; -1 for negative distances, which no token has."""
    return tl.where(far < 0, -1, far.to(tl.int32, bitcast=True))


@triton.jit
def is_narrow(a, b, mass_a, mass_b):
    """True if the bracket's tokens fit a list or are at one distance; each of them weighs at least exp(-b)."""
    return (key_of(b) - key_of(a) <= 1) | ((mass_b - mass_a) * tl.exp(b) <= MAX_LISTED)


@triton.jit
def wanted(own, total):
    """Load the number of tokens and the mass at which the kept tokens are complete."""
    k, p = tl.load(own + TOP_K), tl.load(own + TOP_P)
    return tl.where(k > 0, k, float("inf")), tl.where(p < 1, p * total, float("inf"))


@triton.jit
def initial_limit(own, total, vocab):
    """End of the first bracket: beyond it is less than 1 - p of the mass, even if every token were just there."""
    p = tl.load(own + TOP_P)
    rest = tl.where(p < 1, (1 - p) * total, 0.0)
    b = tl.minimum(tl.load(own + REACH), 87.0)
    b = tl.where(rest > 0, tl.minimum(b, tl.maximum(tl.log(vocab / rest) + 0.01, 0.0)), b)
    return tl.where(total > 0, b, 0.0)


@triton.jit
def probe_limits(a, b, mass_a, mass_b, count_a, count_b, k, target):
    """Distances to measure inside the bracket: some evenly spaced, some around the interpolated target.

    The first bracket starts below every token (a < 0); its distances are denser near its start and include its end.
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
def narrow_bracket(a, b, mass_a, mass_b, count_a, count_b, limits, masses, counts, k, target):
    """Bracket narrowed by the masses and counts measured at the limits."""
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
def load_bracket(
    own, SUMS, STATES, b, total, vocab, tiles, k, target, FIRST: tl.constexpr, COUNTS: tl.constexpr, TP: tl.constexpr
):  # fmt: skip
    """Bracket after the previous probe; the initial one if there was none.

    SUMS [b, tiles, 2, PROBES] has the measurements of each tile, STATES [b, STATE] the bracket of these measurements.
    """
    if FIRST:
        end = initial_limit(own, total, vocab)
        a, mass_a, count_a = end * 0.0 - 1.0, end * 0.0, end * 0.0
        mass_b, count_b = total, end * 0.0 + vocab
    else:
        a, end, mass_a, mass_b, count_a, count_b = load_state(STATES, b)
        if is_narrow(a, end, mass_a, mass_b) == 0:
            limits = probe_limits(a, end, mass_a, mass_b, count_a, count_b, k, target)
            t, j = tl.arange(0, TP), tl.arange(0, PROBES)
            at = SUMS + b * tiles * 2 * PROBES + t[:, None] * 2 * PROBES + j[None, :]
            masses = tl.sum(tl.load(at, mask=t[:, None] < tiles, other=0.0), 0)
            if COUNTS:
                counts = tl.sum(tl.load(at + PROBES, mask=t[:, None] < tiles, other=0.0), 0)
            else:
                counts = tl.zeros((PROBES,), tl.float32)
            a, end, mass_a, mass_b, count_a, count_b = narrow_bracket(
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


@triton.jit
def load_distances(logits, start, end, top, inverse, WIDTH: tl.constexpr):
    """Indices and distances of the tokens from `start` on; distances beyond `end` are infinite."""
    i = start + tl.arange(0, WIDTH)
    return i, distance(top, tl.load(logits + i, mask=i < end, other=-float("inf")), inverse)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def probe_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, SUMS_BEFORE, STATES_BEFORE, SUMS, STATES, vocab, stride, tiles,
    FIRST: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Measure one tile of one row; every tile of a row computes the same bracket independently.

    The loop over limits is outermost, so a thread reuses a token's distance and weight for all limits.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    total = tl.sum(masses, 0)
    k, target = wanted(own, total)
    a, end, mass_a, mass_b, count_a, count_b = load_bracket(
        own, SUMS_BEFORE, STATES_BEFORE, b, total, vocab, tiles, k, target, FIRST, COUNTS, TP
    )
    if tile == 0:
        store_state(STATES, b, a, end, mass_a, mass_b, count_a, count_b)
    if is_narrow(a, end, mass_a, mass_b) == 0:
        limits = probe_limits(a, end, mass_a, mass_b, count_a, count_b, k, target)
        _, far = load_distances(LOGITS + b.to(tl.int64) * stride, tile * TILE, vocab, top, inverse, TILE)
        weights = tl.exp(-far)
        at = SUMS + (b * tiles + tile) * 2 * PROBES
        for j in tl.static_range(PROBES):
            limit = tl.sum(tl.where(tl.arange(0, PROBES) == j, limits, 0.0), 0)
            tl.store(at + j, tl.sum(tl.where(far <= limit, weights, 0.0), 0))
            if COUNTS:
                tl.store(at + PROBES + j, tl.sum((far <= limit).to(tl.int32), 0).to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def gather_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, SUMS_BEFORE, STATES_BEFORE, STATES, KEPT, SPANS, LISTED, INDEX,
    vocab, stride, tiles,
    COUNTS: tl.constexpr, TILE: tl.constexpr, TP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """List the tokens in the bracket for one tile of one row.

    KEPT [b, tiles] gets the mass of each tile within `a`. SPANS [b, 3, tiles] gets the nearest and the furthest key in
    the bracket and the number of its tokens; if they fit, LISTED [b, tiles, ROOM] gets their distances and INDEX their
    indices, in order.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    total = tl.sum(masses, 0)
    k, target = wanted(own, total)
    a, end, mass_a, mass_b, count_a, count_b = load_bracket(
        own, SUMS_BEFORE, STATES_BEFORE, b, total, vocab, tiles, k, target, False, COUNTS, TP
    )
    if tile == 0:
        store_state(STATES, b, a, end, mass_a, mass_b, count_a, count_b)
    i, far = load_distances(LOGITS + b.to(tl.int64) * stride, tile * TILE, vocab, top, inverse, TILE)
    place = b * tiles + tile
    tl.store(KEPT + place, tl.sum(tl.where(far <= a, tl.exp(-far), 0.0), 0))
    inside = (far > a) & (far <= end)
    key = key_of(far)
    span = SPANS + b * 3 * tiles + tile
    tl.store(span, tl.min(tl.where(inside, key, NO_KEY), 0))
    tl.store(span + tiles, tl.max(tl.where(inside, key, -1), 0))
    found = tl.sum(inside.to(tl.int32), 0)
    tl.store(span + 2 * tiles, found)
    if (found > 0) & (found <= ROOM):
        at = tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(LISTED + place * ROOM + at, far, mask=inside)
        tl.store(INDEX + place * ROOM + at, i, mask=inside)


@triton.jit
def measure_span(far, low, middle, high):
    """For each distance: mass and count within (low, middle], its key there, and its key in (middle, high]."""
    key = key_of(far)
    is_near, is_beyond = (key > low) & (key <= middle), (key > middle) & (key <= high)
    return (
        tl.where(is_near, tl.exp(-far), 0.0),
        is_near.to(tl.int32),
        tl.where(is_near, key, -1),
        tl.where(is_beyond, key, NO_KEY),
    )


@triton.jit
def measure_row_span(logits, vocab, top, inverse, low, middle, high, BLOCK: tl.constexpr):
    """Total mass and count of a row within (low, middle], the furthest key there, and the nearest key beyond."""
    mass, count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    furthest, nearest = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), NO_KEY, tl.int32)
    for start in range(0, vocab, BLOCK):
        _, far = load_distances(logits, start, vocab, top, inverse, BLOCK)
        more, others, near, beyond = measure_span(far, low, middle, high)
        mass += more
        count += others
        furthest, nearest = tl.maximum(furthest, near), tl.minimum(nearest, beyond)
    return tl.sum(mass, 0), tl.sum(count, 0), tl.max(furthest, 0), tl.min(nearest, 0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def settle_kernel(
    LOGITS, ROWS, TEMPERATURE, SETTINGS, TOPS, MASSES, STATES, KEPT, SPANS, LISTED, INDEX, LIMIT, LAST,
    vocab, stride, tiles,
    TILE: tl.constexpr, TP: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the last kept token of one row and the mass that each tile keeps.

    Invariant of the loop: the tokens within `low` are too few, the last kept one is at most at `high`. Each iteration
    halves the range between, so the loop ends.
    """
    b, t = tl.program_id(0), tl.arange(0, TP)
    own = settings_of(SETTINGS, ROWS, b)
    if (kind_of(SETTINGS, ROWS, b) & CUTS) == 0:
        return
    inverse = inverse_of(TEMPERATURE, b)
    top, masses = tile_masses(TOPS, MASSES, b, tiles, inverse, TP)
    k, target = wanted(own, tl.sum(masses, 0))
    a, _, mass, _, count, _ = load_state(STATES, b)
    logits = LOGITS + b.to(tl.int64) * stride
    span, real = SPANS + b * 3 * tiles + t, t < tiles
    high = tl.max(tl.load(span + tiles, mask=real, other=-1), 0)
    low = tl.minimum(tl.min(tl.load(span, mask=real, other=NO_KEY), 0), high) - 1
    found = tl.load(span + 2 * tiles, mask=real, other=0)
    is_listed = tl.max(found, 0) <= ROOM
    slot = tl.arange(0, ROOM)[None, :]
    place = (b * tiles + t[:, None]) * ROOM + slot
    is_there = is_listed & (slot < found[:, None])
    listed = tl.load(LISTED + place, mask=is_there, other=float("inf"))
    while high - low > 1:
        middle = low + (high - low) // 2
        if is_listed:
            masses_2d, counts_2d, near, beyond = measure_span(listed, low, middle, high)
            more, others = tl.sum(tl.sum(masses_2d, 1), 0), tl.sum(tl.sum(counts_2d, 1), 0)
            furthest, nearest = tl.max(tl.max(near, 1), 0), tl.min(tl.min(beyond, 1), 0)
        else:
            more, others, furthest, nearest = measure_row_span(logits, vocab, top, inverse, low, middle, high, BLOCK)
        if (mass + more >= target) | (count + others >= k):
            high = tl.where(others > 0, furthest, middle)
        else:
            low = tl.minimum(nearest, high) - 1
            mass += more
            count += others
    end = tl.maximum(high, 0).to(tl.float32, bitcast=True)
    staying = tl.minimum(k - count, tl.ceil((target - mass) * tl.exp(end)))  # kept tokens at the last distance
    last = -1
    if is_listed:
        key = key_of(listed)
        ties = (key == high).to(tl.int32)
        in_tile = tl.sum(ties, 1)
        rank = tl.cumsum(ties, 1) + (tl.cumsum(in_tile, 0) - in_tile)[:, None]
        stays = (key < high) | ((ties != 0) & (rank <= staying))
        kept = tl.load(KEPT + b * tiles + t, mask=real, other=0.0)
        kept += tl.sum(tl.where(stays, tl.exp(-listed), 0.0), 1)
        tl.store(KEPT + b * tiles + t, kept, mask=real)
        index = tl.load(INDEX + place, mask=is_there, other=-1)
        last = tl.max(tl.max(tl.where(stays & (ties != 0), index, -1), 1), 0)
    else:
        seen = 0
        for tile in range(0, tiles):
            i, far = load_distances(logits, tile * TILE, vocab, top, inverse, TILE)
            ties = (far == end).to(tl.int32)
            stays = (far < end) | ((ties != 0) & (seen + tl.cumsum(ties, 0) <= staying))
            tl.store(KEPT + b * tiles + tile, tl.sum(tl.where(stays, tl.exp(-far), 0.0), 0))
            last = tl.maximum(last, tl.max(tl.where(stays & (ties != 0), i, -1), 0))
            seen += tl.sum(ties, 0)
    is_empty = high < 0  # no token in the bracket: those within `a` are kept
    tl.store(LIMIT + b, tl.where(is_empty, tl.maximum(a, 0.0), end))
    tl.store(LAST + b, tl.where(is_empty, vocab, last))
