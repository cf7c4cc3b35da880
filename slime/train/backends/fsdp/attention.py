"""Attention over packed rows, as an implementation of transformers' attention interface.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else, so a packed row gives every
sequence what it would get alone. The sequence boundaries travel in a `PackedContext` that the model's owner fills
before each forward and leaves in place until the next one; activation recompute during backward, in whatever thread
autograd runs it, therefore sees the boundaries of the forward it repeats (a backward always precedes the next forward).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from slime.errors import UserError
from slime.train.backends.delta_kernels import check_delta_kernels
from slime.train.backends.fsdp.chunked_attention import Rules, chunked_attention
from slime.train.backends.fsdp.delta_net import PackedDeltaNet, is_delta_net
from slime.train.backends.fsdp.packed_context import PackedContext
from slime.train.backends.fsdp.ulysses import to_own_heads, to_own_tokens
from slime.train.samples.packing import PackedLayout

ATTENTION_NAME = "slime_packed"
CONTEXT_ATTRIBUTE = "slime_packed_context"
HALF = (torch.bfloat16, torch.float16)
PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention"}
DELTA_LAYER_TYPE = "linear_attention"


def register_packed_attention() -> None:
    """Make `attn_implementation="slime_packed"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


def attach_context(model: PreTrainedModel, gdn_backend: str | None = None) -> PackedContext:
    """Give every module of the model the same context; refuses models whose layers mix tokens in another way."""
    context = PackedContext(gdn_backend)
    if any(map(is_delta_net, model.modules())):
        check_delta_kernels(gdn_backend)
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _depends_on_length(child):
                setattr(parent, name, RopeOfEachSequence(child, context))
            elif is_delta_net(child):
                setattr(parent, name, PackedDeltaNet(child, context))
                replaced += 1
    _check_layers(model, replaced)
    for module in model.modules():
        object.__setattr__(module, CONTEXT_ATTRIBUTE, context)
    return context


def _check_layers(model: PreTrainedModel, delta_nets: int) -> None:
    """Every layer mixes tokens by attention, or is one of the delta nets that were replaced."""
    kinds = list(model.config.get_text_config().to_dict().get("layer_types") or ())
    unknown = set(kinds) - PACKABLE_LAYER_TYPES
    if delta_nets and kinds.count(DELTA_LAYER_TYPE) == delta_nets:
        unknown.discard(DELTA_LAYER_TYPE)
    convolutions = sum(isinstance(module, nn.Conv1d) for module in model.modules())
    if unknown or convolutions > delta_nets:
        found = ", ".join(sorted(unknown)) or "convolution"
        raise UserError(
            f"{type(model).__name__} has {found} layers, which this version cannot train: use a model whose layers are "
            "full or sliding-window attention, or gated delta nets of Qwen's"
        )


class RopeOfEachSequence(nn.Module):
    """Rotary embeddings whose frequencies follow the longest position they are given, a sequence at a time.

    Sequences of one length side by side share a call. `dynamic` keeps the frequencies of the longest sequence so far
    until it meets one that is short: position 0 alone is, so no sequence depends on those before it.
    """

    def __init__(self, rope: nn.Module, context: PackedContext) -> None:
        super().__init__()
        self.rope = rope
        self._context = context

    def forward(self, states: Tensor, position_ids: Tensor, **keywords: Any) -> Any:
        layout, ranks = self._context.layout, self._context.sharing
        assert layout is not None, "the rope of a packed row was asked for before its layout was set"
        own = slice(None)
        if ranks is not None:  # a rank's part may have the end of a sequence without its length, so all ranks make all
            own = slice(ranks.rank * position_ids.shape[-1], (ranks.rank + 1) * position_ids.shape[-1])
            whole = torch.cat([torch.arange(length, device=position_ids.device) for length in layout.lengths])
            position_ids = whole.expand(*position_ids.shape[:-1], -1)
        start = position_ids.new_zeros(1, 1)
        made = []
        for positions in position_ids.split([length * count for length, count in _runs(layout)], dim=-1):
            self.rope(states, start, **keywords)
            made.append(self.rope(states, positions, **keywords))
        if isinstance(made[0], Tensor):
            return torch.cat(made, dim=1)[:, own]
        return tuple(torch.cat(parts, dim=1)[:, own] for parts in zip(*made, strict=True))


def _depends_on_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that has other frequencies for long sequences, in some kind of layer."""
    kinds = module.__dict__.get("rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Boundaries and causality are the attention function's business."""
    return None


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, kv heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention functions; returns [1, T, heads, D]."""
    context: PackedContext = module.__dict__[CONTEXT_ATTRIBUTE]
    layout, ranks = context.read(), context.sharing
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if ranks is None:
        return _attention(query, key, value, layout, scale, sliding_window, softcap, s_aux), None
    query, key, value, s_aux = to_own_heads(query, key, value, s_aux, ranks)
    return to_own_tokens(_attention(query, key, value, layout, scale, sliding_window, softcap, s_aux), ranks), None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Of whole sequences: [1, heads, T, D] to [1, T, heads, D]."""
    half = query.dtype in HALF
    plain = softcap is None and s_aux is None and (sliding_window is None or _varlen_has_windows())
    if query.is_cuda and half and plain and query.shape[-1] == value.shape[-1]:
        return _varlen_attention(query[0], key[0], value[0], layout, scale, sliding_window)[None]
    pieces = [
        _causal_attention(q, k, v, scale, sliding_window, softcap, s_aux)
        for q, k, v in zip(
            *(_split_by_length(x[0].transpose(0, 1), layout) for x in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(pieces)[None]


def _runs(layout: PackedLayout) -> list[tuple[int, int]]:
    """(length, how many) of neighbouring sequences that have one length."""
    return [(length, len(list(run))) for length, run in groupby(layout.lengths)]


def _split_by_length(states: Tensor, layout: PackedLayout) -> Iterator[Tensor]:
    """[T, heads, D] to [n, heads, L, D] for every run of n neighbouring sequences of one length L.

    One split, not a slice for each run: the gradient of every slice would be as large as the whole row.
    """
    runs = _runs(layout)
    blocks = states.split([length * count for length, count in runs])
    for (length, count), block in zip(runs, blocks, strict=True):
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


def _varlen_has_windows() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """torch's variable-length flash attention; [heads, T, D] to [T, heads, D]. Its keywords differ between releases."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    before = -1 if window is None else window - 1  # a window counts the token itself
    keywords: dict[str, Any] = {"window_size": (before, 0)} if "window_size" in known else {"is_causal": True}
    if key.shape[0] != query.shape[0]:
        if "enable_gqa" in known:
            keywords["enable_gqa"] = True
        else:
            repeats = query.shape[0] // key.shape[0]
            key, value = key.repeat_interleave(repeats, dim=0), value.repeat_interleave(repeats, dim=0)
    if "scale" in known:
        keywords["scale"] = scale
    else:
        query = query * (scale * query.shape[-1] ** 0.5)
    q, k, v = (states.transpose(0, 1).contiguous() for states in (query, key, value))
    bounds, longest = layout.cu_seqlens, layout.max_length
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, **keywords)
    assert isinstance(output, Tensor)
    return output
