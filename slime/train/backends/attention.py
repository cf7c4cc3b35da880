"""Causal attention within the sequences of a packed row, for every backend.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else, so every sequence of a packed row
gets the output that it would get alone.

Attention with a window, capped scores or sinks is computed in chunks of queries with the keys they can see, in memory
that grows with the length and not its square; backward recomputes the weights from the normaliser of each query, which
is all that is kept. Invariant: values and gradients are those of the whole matrix.

Sparse attention reads only the tokens that an indexer picks (DeepSeek's sparse attention, in GLM-5). Invariant: a token
attends to at most `count` earlier tokens of its own sequence, those with the highest index scores, and to all of them
if there are at most `count`. Picks are positions in the sequence; picks after the token itself are ignored. Picking has
no gradient, so the scores get none.
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

MAX_CHUNK_SCORES = {"cpu": 1 << 22, "cuda": 1 << 25}  # scores of one chunk: enough to keep the device busy
SMALLEST_WINDOW = 64  # least number of queries in a chunk, however narrow the window


@dataclass(frozen=True)
class Rules:
    """Parameters of chunked attention: softmax(cap(scale q k)) over the last `window` positions."""

    scale: float
    window: int | None
    softcap: float | None
    cells: int  # scores of one chunk

    @classmethod
    def on(cls, device: torch.device, scale: float, window: int | None, softcap: float | None) -> Rules:
        return cls(scale, window, softcap, MAX_CHUNK_SCORES.get(device.type, MAX_CHUNK_SCORES["cuda"]))


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
    """Attend from queries [n, heads, L, D] to keys and values [n, kv heads, L, D]; returns [n, heads, L, Dv].

    `sinks`: a logit for each head.
    """
    output: Tensor = _ChunkedAttention.apply(query, key, value, sinks, rules)
    return output


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        normaliser = query.new_empty(query.shape[:3], dtype=_wide(query))
        for chunk in _chunks(query, key, rules):
            scores = chunk.hide(chunk.scores(query, key))
            total = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.to(total.dtype).view(1, *total.shape[1:3], 1))
            weights = scores.sub_(total[..., None]).exp_()
            output[:, :, chunk.queries] = (chunk.fold(weights.to(value.dtype)) @ chunk.seen(value)).view(
                *query.shape[:2], -1, value.shape[3]
            )
            normaliser[:, :, chunk.queries] = total.flatten(1, 2)
        ctx.rules = rules
        ctx.save_for_backward(query, key, value, output, normaliser, *([sinks] if sinks is not None else []))
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser, *rest = ctx.saved_tensors
        grad = upstream[0]
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(states, dtype=_wide(query)) for states in (key, value))
        inner = (grad.to(_wide(query)) * output).sum(-1)  # each query's sum of weight times gradient of the weight
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
    """A range of queries and the keys visible to them. Scores are [n, kv heads, heads of each, queries, keys]."""

    queries: slice
    keys: slice
    kv_heads: int
    rules: Rules

    def rows(self, states: Tensor) -> Tensor:
        """Select the chunk's queries: [n, heads, L, ...] to [n, kv heads, heads of each, queries, ...]."""
        return states[:, :, self.queries].unflatten(1, (self.kv_heads, -1))

    def fold(self, states: Tensor) -> Tensor:
        """Join heads that share a key, so that one product computes all of them."""
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
        """Set scores to minus infinity where a key is in the future of a query or out of its window."""
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
    if reach < length:  # a chunk has `reach` keys more than queries
        most = min(max(most // 2, 1), max(reach, SMALLEST_WINDOW))
    for begin in range(0, length, most):
        end = min(begin + most, length)
        yield _Chunk(slice(begin, end), slice(max(0, begin - reach + 1), end), key.shape[1], rules)


def _wide(states: Tensor) -> torch.dtype:
    """Dtype of scores and sums: at least float32."""
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
    """Attend within each sequence; returns [T, heads, Dv]. `sinks`: a logit for each head, without a value."""
    plain = (
        softcap is None
        and sinks is None
        and (sliding_window is None or "window_size" in inspect.signature(_varlen_attn()).parameters)
    )
    if query.is_cuda and query.dtype in HALF and plain and query.shape[-1] == value.shape[-1]:
        equal = 0 if sliding_window is not None else equal_length_tail(layout.lengths)
        return _gpu_attention(query, key, value, layout, scale, sliding_window, equal)
    # one split instead of a slice for each run: the gradient of every slice would be as large as the whole row
    dtype, runs = query.dtype, equal_length_runs(layout)
    sizes = [length * count for length, count in runs]
    rows = zip(*(states.split(sizes) for states in (query, key, value)), strict=True)
    outputs = []
    for (length, count), row in zip(runs, rows, strict=True):
        q, k, v = (block.reshape(count, length, *block.shape[1:]).transpose(1, 2) for block in row)  # [n, heads, L, D]
        if not query.is_cuda and dtype in HALF:  # the CPU's backward takes four times as long in half precision
            q, k, v = q.float(), k.float(), v.float()
        window = None if sliding_window is None or sliding_window >= length else sliding_window
        if window is None and softcap is None and sinks is None:
            output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            output = chunked_attention(q, k, v, sinks, Rules.on(q.device, scale, window, softcap))
        outputs.append(output.to(dtype).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def prepare_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Import torch's variable-length attention for GPUs ahead of the first step, which it would slow by 2 s."""
    if device.type == "cuda" and dtype in HALF:
        import_module(_VARLEN)


def equal_length_runs(layout: PackedLayout) -> list[tuple[int, int]]:
    """(length, count) of each run of neighbouring sequences with equal lengths."""
    return [(length, len(list(run))) for length, run in groupby(layout.lengths)]


def equal_length_tail(lengths: Sequence[int]) -> int:
    """Count the sequences at a row's end that are computed as a batch: of one length, and nearly all of the row.

    Rows are sorted by length, so these are the sequences that were truncated at the longest length. cuDNN makes a plan
    for every (count, length), in 0.1 s; with more varied lengths every row would need new ones. For the same reason
    the count is a multiple of four, unless it is the whole row.
    """
    last = len(list(takewhile(lambda length: length == lengths[-1], reversed(lengths))))
    count = last if last == len(lengths) else last // _EQUAL_MULTIPLE * _EQUAL_MULTIPLE
    return count if count > 1 and count * lengths[-1] >= _NEARLY_ALL * sum(lengths) else 0


def _gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None, equal: int
) -> Tensor:
    """Compute the last `equal` sequences, which have one length, as a batch, and the others by their bounds."""
    if equal == len(layout.lengths):
        return _batched_gpu_attention(query, key, value, layout.lengths[-1], scale)
    if equal == 0:
        return _varlen_attention(query, key, value, layout, scale, window)
    others = len(layout.lengths) - equal
    lengths = layout.lengths[:others]
    before = PackedLayout(lengths, layout.cu_seqlens[: others + 1], max(lengths))
    (q, equal_q), (k, equal_k), (v, equal_v) = (states.tensor_split([sum(lengths)]) for states in (query, key, value))
    found = _varlen_attention(q, k, v, before, scale, window)
    return torch.cat([found, _batched_gpu_attention(equal_q, equal_k, equal_v, layout.lengths[-1], scale)])


def _batched_gpu_attention(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Compute sequences of one length as a batch: cuDNN is then nearly twice as fast as variable-length attention.

    cuDNN makes a plan for every new shape, which costs more than it saves if lengths change all the time.
    """
    q, k, v = (states.unflatten(0, (-1, length)).transpose(1, 2) for states in (query, key, value))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)


def _varlen_attn() -> Callable[..., object]:
    """torch's variable-length attention, imported on first use: the import loads torch's compiler too."""
    found: Callable[..., object] = import_module(_VARLEN).varlen_attn
    return found


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """Compute torch's variable-length flash attention on [T, heads, D]; its keywords differ between releases."""
    varlen_attn = _varlen_attn()
    known = inspect.signature(varlen_attn).parameters
    before = -1 if window is None else window - 1  # a window counts the token itself
    keywords: dict[str, object] = {"window_size": (before, 0)} if "window_size" in known else {"is_causal": True}
    if key.shape[1] != query.shape[1] and "enable_gqa" in known:  # earlier releases did it without a keyword
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


QUERIES = 512
"""Queries scored at once: the scores of all indexer heads take this many times the length."""


@torch.no_grad()
def pick_tokens(query: Tensor, key: Tensor, weights: Tensor, layout: PackedLayout, count: int) -> Tensor:
    """Pick tokens by indexer queries [T, heads, D], keys [T, D] and a weight for each head [T, heads].

    Returns [T, count], int32, or [T, 0] (all tokens) if no sequence is longer than `count`.
    """
    if layout.max_length <= count:
        return torch.empty(len(query), 0, dtype=torch.int32, device=query.device)
    lengths = list(layout.lengths)
    heads, width = query.shape[1:]
    everything = torch.arange(count, dtype=torch.int32, device=query.device)
    picked = []
    for q, k, w in zip(query.split(lengths), key.split(lengths), weights.split(lengths), strict=True):
        for begin, end in _blocks(len(q)):
            if end <= count:
                picked.append((everything % end).expand(end - begin, count))
                continue
            scores = torch.einsum("qhd,kd->qhk", q[begin:end].float(), k[:end].float()) * width**-0.5
            total = torch.einsum("qh,qhk->qk", w[begin:end].float() * heads**-0.5, scores.relu())
            picked.append(total.masked_fill(_after(begin, end, q.device), -torch.inf).topk(count).indices.int())
    return torch.cat(picked)


def picked_attention(
    query: Tensor, key: Tensor, value: Tensor, picked: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    """Attend from queries to the picked keys [T, heads, D]; returns [T, heads, Dv]. `picked`: as from `pick_tokens`."""
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
    """Mask [queries, keys] of the keys after each of the queries `begin` to `end`."""
    return torch.arange(end, device=device) > torch.arange(begin, end, device=device)[:, None]
