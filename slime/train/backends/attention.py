"""Causal attention within the sequences of a packed row, for every backend.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else, so a packed row gives every
sequence what it would get alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slime.train.samples.packing import PackedLayout

# Causal attention with a window, capped scores or sinks, in memory that grows with the length and not its square.
#
# The queries are taken some at a time, with the keys they can see; backward computes the weights again from the
# normaliser of each query, which is all that is kept. Invariant: values and gradients are those of the whole matrix.

CELLS = {"cpu": 1 << 22, "cuda": 1 << 25}  # scores at once: enough to keep the device busy
SMALLEST_WINDOW = 64  # queries of a narrow window that are taken together all the same


@dataclass(frozen=True)
class Rules:
    """softmax(cap(scale q k)) over the last `window` positions."""

    scale: float
    window: int | None
    softcap: float | None
    cells: int  # scores held at once

    @classmethod
    def on(cls, device: torch.device, scale: float, window: int | None, softcap: float | None) -> Rules:
        return cls(scale, window, softcap, CELLS.get(device.type, CELLS["cuda"]))


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
    """[n, heads, L, D] and keys and values [n, kv heads, L, D] to [n, heads, L, Dv]; `sinks`: a logit for each head."""
    output: Tensor = _Chunked.apply(query, key, value, sinks, rules)
    return output


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        normaliser = query.new_empty(query.shape[:3], dtype=_wide(query))
        for chunk in _chunks(query, key, rules):
            scores = chunk.hide(chunk.scores(query, key))
            total = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, _per_head(sinks, total))
            weights = scores.sub_(total[..., None]).exp_()
            output[:, :, chunk.queries] = (chunk.fold(weights.to(value.dtype)) @ chunk.seen(value)).view(
                *query.shape[:2], -1, value.shape[3]
            )
            normaliser[:, :, chunk.queries] = total.flatten(1, 2)
        ctx.rules, ctx.has_sinks = rules, sinks is not None
        ctx.save_for_backward(query, key, value, output, normaliser, *([sinks] if sinks is not None else []))
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser, *rest = ctx.saved_tensors
        grad = upstream[0]
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(states, dtype=_wide(query)) for states in (key, value))
        inner = (grad.to(_wide(query)) * output).sum(-1)  # what the weights of a query give its gradient, together
        for chunk in _chunks(query, key, ctx.rules):
            scores = chunk.scores(query, key)
            weights = (chunk.hide(scores) - chunk.rows(normaliser)[..., None]).exp_()
            out = chunk.fold(chunk.rows(grad))
            d_value[:, :, chunk.keys] += chunk.fold(weights.to(grad.dtype)).transpose(2, 3) @ out
            toward = (out @ chunk.seen(value).transpose(2, 3)).view_as(weights)
            d_scores = weights.mul_(toward - chunk.rows(inner)[..., None])
            if ctx.rules.softcap is not None:
                d_scores.mul_(1 - (scores / ctx.rules.softcap).square_())
            folded = chunk.fold(d_scores.mul_(ctx.rules.scale).to(query.dtype))
            d_query[:, :, chunk.queries] = (folded @ chunk.seen(key)).view(*query.shape[:2], -1, query.shape[3])
            d_key[:, :, chunk.keys] += folded.transpose(2, 3) @ chunk.fold(chunk.rows(query))
        d_sinks = None
        if rest:
            share = (rest[0].to(_wide(query)).view(1, -1, 1) - normaliser).exp()
            d_sinks = -(share * inner).sum((0, 2)).to(rest[0].dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


@dataclass(frozen=True)
class _Chunk:
    """Some queries and the keys that any of them sees. Scores are [n, kv heads, heads of each, queries, keys]."""

    queries: slice
    keys: slice
    kv_heads: int
    rules: Rules

    def rows(self, states: Tensor) -> Tensor:
        """[n, heads, L, ...] to the chunk's part [n, kv heads, heads of each, queries, ...]."""
        return states[:, :, self.queries].unflatten(1, (self.kv_heads, -1))

    def fold(self, states: Tensor) -> Tensor:
        """Heads that share a key side by side: one product for all of them."""
        return states.flatten(2, 3)

    def seen(self, states: Tensor) -> Tensor:
        return states[:, :, self.keys]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        rows = self.rows(query)
        scores = (self.fold(rows) @ self.seen(key).transpose(2, 3)).to(_wide(query)).mul_(self.rules.scale)
        if self.rules.softcap is not None:
            scores = scores.div_(self.rules.softcap).tanh_().mul_(self.rules.softcap)
        return scores.view(*rows.shape[:4], -1)

    def hide(self, scores: Tensor) -> Tensor:
        """Minus infinity where a key is in the future of a query or out of its window."""
        at = torch.arange(self.queries.start, self.queries.stop, device=scores.device)
        distance = at[:, None] - torch.arange(self.keys.start, self.keys.stop, device=scores.device)
        hidden = distance < 0
        if self.rules.window is not None:
            hidden |= distance >= self.rules.window
        return scores.masked_fill(hidden, float("-inf"))


def _chunks(query: Tensor, key: Tensor, rules: Rules) -> Iterator[_Chunk]:
    count, heads, length = query.shape[:3]
    reach = min(length, rules.window or length)
    most = max(rules.cells // (count * heads * reach), 1)
    if reach < length:  # a chunk sees `reach` keys more than it has queries
        most = min(max(most // 2, 1), max(reach, SMALLEST_WINDOW))
    for begin in range(0, length, most):
        end = min(begin + most, length)
        yield _Chunk(slice(begin, end), slice(max(0, begin - reach + 1), end), key.shape[1], rules)


def _per_head(sinks: Tensor, like: Tensor) -> Tensor:
    return sinks.to(like.dtype).view(1, *like.shape[1:3], 1)


def _wide(states: Tensor) -> torch.dtype:
    """What scores and sums are computed in."""
    return torch.promote_types(states.dtype, torch.float32)


HALF = (torch.bfloat16, torch.float16)
_VARLEN = "torch.nn.attention.varlen"
_EQUAL_MULTIPLE, _NEARLY_ALL = 4, 7 / 8
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def causal_attention(
    query: Tensor,  # [T, heads, D]
    key: Tensor,  # [T, kv heads, D]
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, heads, Dv]; `sinks`: a logit for each head that no value belongs to."""
    plain = softcap is None and sinks is None and (sliding_window is None or _varlen_has_windows())
    if query.is_cuda and query.dtype in HALF and plain and query.shape[-1] == value.shape[-1]:
        equal = 0 if sliding_window is not None else equal_at_end(layout.lengths)
        return _gpu_attention(query, key, value, layout, scale, sliding_window, equal)
    pieces = [
        _causal_attention(q, k, v, scale, sliding_window, softcap, sinks)
        for q, k, v in zip(*(_split_by_length(states, layout) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(pieces)


def prepare_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Import what sequences of unequal lengths take on a GPU: two seconds that the first step with such would take."""
    if device.type == "cuda" and dtype in HALF:
        import_module(_VARLEN)


def runs(layout: PackedLayout) -> list[tuple[int, int]]:
    """(length, how many) of neighbouring sequences that have one length."""
    return [(length, len(list(run))) for length, run in groupby(layout.lengths)]


def _split_by_length(states: Tensor, layout: PackedLayout) -> Iterator[Tensor]:
    """[T, heads, D] to [n, heads, L, D] for every run of n neighbouring sequences of one length L.

    One split, not a slice for each run: the gradient of every slice would be as large as the whole row.
    """
    equal = runs(layout)
    blocks = states.split([length * count for length, count in equal])
    for (length, count), block in zip(equal, blocks, strict=True):
        yield block.reshape(count, length, *states.shape[1:]).transpose(1, 2)


def _causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention within each of n sequences of one length; [n, heads, L, D] to [n * L, heads, D]."""
    dtype = query.dtype
    if not query.is_cuda and dtype in HALF:  # the CPU's backward takes four times as long in half precision
        query, key, value = query.float(), key.float(), value.float()
    if window is not None and window >= query.shape[2]:
        window = None
    if window is None and softcap is None and sinks is None:
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        output = chunked_attention(query, key, value, sinks, Rules.on(query.device, scale, window, softcap))
    return output.to(dtype).transpose(1, 2).flatten(0, 1)


def equal_at_end(lengths: Sequence[int]) -> int:
    """How many sequences at a row's end are computed as a batch: of one length, and nearly all of the row.

    Rows are sorted by length, so they are those that were cut off at the longest. cuDNN makes a plan for every number
    and length of them, a tenth of a second: where lengths differ more, others would come with every row. For the same
    reason the number is a multiple of four, unless it is all of them.
    """
    last = len(list(takewhile(lambda length: length == lengths[-1], reversed(lengths))))
    count = last if last == len(lengths) else last // _EQUAL_MULTIPLE * _EQUAL_MULTIPLE
    return count if count > 1 and count * lengths[-1] >= _NEARLY_ALL * sum(lengths) else 0


def _gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None, equal: int
) -> Tensor:
    """The last `equal` sequences, which have one length, as a batch, and the others by their bounds."""
    if equal == len(layout.lengths):
        return _equal_attention(query, key, value, layout.lengths[-1], scale)
    if equal == 0:
        return _varlen_attention(query, key, value, layout, scale, window)
    others = len(layout.lengths) - equal
    lengths = layout.lengths[:others]
    before = PackedLayout(lengths, layout.cu_seqlens[: others + 1], max(lengths))
    (q, equal_q), (k, equal_k), (v, equal_v) = (states.tensor_split([sum(lengths)]) for states in (query, key, value))
    found = _varlen_attention(q, k, v, before, scale, window)
    return torch.cat([found, _equal_attention(equal_q, equal_k, equal_v, layout.lengths[-1], scale)])


def _equal_attention(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Sequences of one length are a batch, for which cuDNN is nearly twice as fast as variable-length attention.

    It makes a plan for every new shape, which takes longer than it saves where lengths change all the time.
    """
    q, k, v = (states.unflatten(0, (-1, length)).transpose(1, 2) for states in (query, key, value))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)


def _varlen_has_windows() -> bool:
    return "window_size" in inspect.signature(_varlen_attn()).parameters


def _varlen_attn() -> Callable[..., Any]:
    """torch's own. Importing it imports torch's compiler too, so nobody does who has no use for it."""
    found: Callable[..., Any] = import_module(_VARLEN).varlen_attn
    return found


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """torch's variable-length flash attention; [T, heads, D]. Its keywords differ between releases."""
    varlen_attn = _varlen_attn()
    known = inspect.signature(varlen_attn).parameters
    before = -1 if window is None else window - 1  # a window counts the token itself
    keywords: dict[str, Any] = {"window_size": (before, 0)} if "window_size" in known else {"is_causal": True}
    if key.shape[1] != query.shape[1] and "enable_gqa" in known:  # which earlier releases did without being told
        keywords["enable_gqa"] = True
    if "scale" in known:
        keywords["scale"] = scale
    else:
        query = query * (scale * query.shape[-1] ** 0.5)
    q, k, v = (states if states.stride(2) == 1 else states.contiguous() for states in (query, key, value))
    bounds, longest = layout.cu_seqlens, layout.max_length
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, **keywords)
    assert isinstance(output, Tensor)
    return output


# Attention to the tokens that an indexer picks (DeepSeek's sparse attention, in GLM-5), within packed sequences.
#
# Invariant: a token attends to at most `count` earlier tokens of its own sequence, those with the highest index
# scores, and to all of them where there are no more. Picks are positions in the sequence; what they name after the
# token itself counts for nothing. Nothing flows back into the scores: picking has no gradient.

QUERIES = 512
"""How many are scored at once: the scores of all indexer heads are that many times the length."""


@torch.no_grad()
def pick_tokens(query: Tensor, key: Tensor, weights: Tensor, layout: PackedLayout, count: int) -> Tensor:
    """[T, count], int32, of indexer queries [T, heads, D], keys [T, D] and a weight for each head [T, heads].

    [T, 0] stands for all tokens, where no sequence has more than `count`.
    """
    if layout.max_length <= count:
        return torch.empty(len(query), 0, dtype=torch.int32, device=query.device)
    lengths = list(layout.lengths)
    picked = [
        part
        for q, k, w in zip(query.split(lengths), key.split(lengths), weights.split(lengths), strict=True)
        for part in _pick(q, k, w, count)
    ]
    return torch.cat(picked)


def _pick(query: Tensor, key: Tensor, weights: Tensor, count: int) -> list[Tensor]:
    """Of one sequence, some queries at a time."""
    heads, width = query.shape[1:]
    everything = torch.arange(count, dtype=torch.int32, device=query.device)
    picked = []
    for begin, end in _blocks(len(query)):
        if end <= count:
            picked.append((everything % end).expand(end - begin, count))
            continue
        scores = torch.einsum("qhd,kd->qhk", query[begin:end].float(), key[:end].float()) * width**-0.5
        total = torch.einsum("qh,qhk->qk", weights[begin:end].float() * heads**-0.5, scores.relu())
        picked.append(total.masked_fill(_after(begin, end, query.device), -torch.inf).topk(count).indices.int())
    return picked


def picked_attention(
    query: Tensor, key: Tensor, value: Tensor, picked: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    """[T, heads, Dv] of queries and keys [T, heads, D] and what `pick_tokens` gave."""
    if picked.shape[1] == 0:
        return causal_attention(query, key, value, layout, scale)
    dtype, lengths = query.dtype, list(layout.lengths)
    if not query.is_cuda and dtype in HALF:  # the CPU's backward takes four times as long in half precision
        query, key, value = query.float(), key.float(), value.float()
    outputs = []
    for q, k, v, chosen in zip(*(states.split(lengths) for states in (query, key, value, picked)), strict=True):
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        for begin, end in _blocks(len(q)):
            seen = torch.zeros(end - begin, len(q), dtype=torch.bool, device=q.device)
            seen = seen.scatter_(1, chosen[begin:end].long(), True)[:, :end] & ~_after(begin, end, q.device)
            block = q[begin:end].transpose(0, 1)[None]
            output = functional.scaled_dot_product_attention(
                block, keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale
            )
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, length, QUERIES), length]))


def _after(begin: int, end: int, device: torch.device) -> Tensor:
    """[queries, keys]: the keys that come after the queries `begin` to `end`."""
    return torch.arange(end, device=device) > torch.arange(begin, end, device=device)[:, None]
