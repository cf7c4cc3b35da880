"""Causal attention within the sequences of a packed row, for every backend.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else, so a packed row gives every
sequence what it would get alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slime.train.backends.chunked_attention import Rules, chunked_attention
from slime.train.samples.packing import PackedLayout

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
