"""Attention over packed rows, as an implementation of transformers' attention interface.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else, so every sequence of a packed row
gets the output that it would get alone. The sequence boundaries are in a `PackedContext` that the model's owner fills
before each forward and leaves in place until the next one; activation recompute during backward, in any thread of
autograd, therefore sees the boundaries of the forward it repeats (a backward always precedes the next forward).

With context parallelism a rank has a part of the row's tokens between the layers. Around attention the ranks exchange
tokens for heads and back (DeepSpeed's Ulysses), so each rank attends with some heads over all tokens, as a single rank
would: windows, caps and sinks belong to a head. Invariant: rank r has the r-th part of the tokens and the r-th part of
the heads; if the number of key heads is not a multiple of the number of ranks, key heads are repeated until it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from slime.errors import UserError
from slime.models.shape import check_context_parallel
from slime.models.windows import WindowMasks, window_of
from slime.train.backends.attention import causal_attention, equal_length_runs, picked_attention
from slime.train.backends.delta_kernels import check_delta_kernels
from slime.train.backends.fsdp.gated_delta_net import PackedDeltaNet, is_delta_net
from slime.train.backends.fsdp.packed_context import PackedContext, PackedIndexer, is_indexer
from slime.train.backends.fsdp.shared_prompt_ops import expand_to_row, select_first_copies
from slime.train.samples.packing import PackedLayout, SharedPrompts
from slime.train.topology import Ranks, exchange


def exchange_tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exchange this rank's tokens [1, heads, t, D] for this rank's heads [1, heads / n, T, D]; `sinks`: one a head."""
    heads, kv_heads = query.shape[1], key.shape[1]
    check_context_parallel(heads, ranks.size)
    repeats = ranks.size // math.gcd(kv_heads, ranks.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    by_rank = [states[0].transpose(0, 1).unflatten(1, (ranks.size, -1)) for states in (query, key, value)]
    flat = [states.flatten(2) for states in by_rank]  # [t, n, heads / n x D]: one exchange for all three
    received = exchange(torch.cat(flat, dim=2).transpose(0, 1), ranks).flatten(0, 1)
    own_query, own_key, own_value = (
        part.unflatten(1, states.shape[2:]).transpose(0, 1)[None]
        for part, states in zip(received.split([part.shape[2] for part in flat], dim=1), by_rank, strict=True)
    )
    own_sinks = None if sinks is None else sinks.unflatten(0, (ranks.size, -1))[ranks.rank]
    return own_query, own_key, own_value, own_sinks


def exchange_heads_for_tokens(output: Tensor, ranks: Ranks) -> Tensor:
    """Exchange this rank's heads [1, T, heads / n, D] for this rank's tokens [1, t, heads, D]."""
    received = exchange(output[0].unflatten(0, (ranks.size, -1)), ranks)  # [n, t, heads / n, D], in the heads' order
    return received.transpose(0, 1).flatten(1, 2)[None]


ATTENTION_NAME = "slime_packed"
CONTEXT_ATTRIBUTE = "slime_packed_context"
PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention"}
DELTA_LAYER_TYPE = "linear_attention"
INDEXED_LAYER_TYPE = "indexed_attention"


def register_packed_attention() -> None:
    """Register `attn_implementation="slime_packed"` with transformers; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)


def attach_context(model: PreTrainedModel, gdn_backend: str | None = None) -> PackedContext:
    """Give every module of the model the same context; raises UserError if a layer mixes tokens in an unknown way."""
    context = PackedContext(gdn_backend)
    if any(map(is_delta_net, model.modules())):
        check_delta_kernels(gdn_backend)
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _has_length_dependent_frequencies(child):
                setattr(parent, name, PerSequenceRope(child, context))
            elif is_delta_net(child):
                setattr(parent, name, PackedDeltaNet(child, context))
                replaced += 1
            elif is_indexer(child):
                setattr(parent, name, PackedIndexer(child, context))
                context.is_indexed = True
    # every layer must mix tokens by attention or be one of the delta nets that were replaced
    kinds = list(model.config.get_text_config().to_dict().get("layer_types") or ())
    unknown = set(kinds) - PACKABLE_LAYER_TYPES
    if replaced and kinds.count(DELTA_LAYER_TYPE) == replaced:
        unknown.discard(DELTA_LAYER_TYPE)
    if context.is_indexed:
        unknown.discard(INDEXED_LAYER_TYPE)
    convolutions = sum(isinstance(module, nn.Conv1d) for module in model.modules())
    if unknown or convolutions > replaced:
        found = ", ".join(sorted(unknown)) or "convolution"
        raise UserError(
            f"{type(model).__name__} has {found} layers, which this version cannot train: use a model whose layers are "
            "full or sliding-window attention, gated delta nets of Qwen's or GLM-5's sparse attention"
        )
    for module in model.modules():
        object.__setattr__(module, CONTEXT_ATTRIBUTE, context)
    return context


class PerSequenceRope(nn.Module):
    """Rotary embedding whose frequencies depend on the longest position, called for one sequence length at a time.

    Neighbouring sequences of one length share a call. `dynamic` keeps the frequencies of the longest sequence so far
    until it gets a short one, so a call with position 0 alone resets it and no sequence depends on earlier ones.
    """

    def __init__(self, rope: nn.Module, context: PackedContext) -> None:
        super().__init__()
        self.rope = rope
        self._context = context

    def forward(self, states: Tensor, position_ids: Tensor, **keywords: object) -> Tensor | tuple[Tensor, ...]:
        """Embeddings of this rank's positions, as the wrapped module returns them."""
        layout, ranks = self._context.layout, self._context.sharing
        assert layout is not None, "a rotary embedding ran before a packed layout was set"
        own = slice(None)
        if ranks is not None:  # a rank's part may be the end of a sequence without its length, so all ranks compute all
            own = slice(ranks.rank * position_ids.shape[-1], (ranks.rank + 1) * position_ids.shape[-1])
            whole = torch.cat([torch.arange(length, device=position_ids.device) for length in layout.lengths])
            position_ids = whole.expand(*position_ids.shape[:-1], -1)
        start = position_ids.new_zeros(1, 1)
        made = []
        for positions in position_ids.split([length * count for length, count in equal_length_runs(layout)], dim=-1):
            self.rope(states, start, **keywords)
            made.append(self.rope(states, positions, **keywords))
        if isinstance(made[0], Tensor):
            return torch.cat(made, dim=1)[:, own]
        return tuple(torch.cat(parts, dim=1)[:, own] for parts in zip(*made, strict=True))


def _has_length_dependent_frequencies(module: nn.Module) -> bool:
    """Return True for a rotary embedding with other frequencies for long sequences, in some kind of layer."""
    kinds = module.__dict__.get("rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


_window_masks = WindowMasks()


def packed_mask(*_args: object, config: object = None, local_size: int | None = None, **_kwargs: object) -> Tensor:
    """Mask that carries only the layers' window; the attention function handles boundaries and causality.

    Layers with sparse attention get zeros, since transformers slices their mask.
    """
    is_indexed = INDEXED_LAYER_TYPE in (vars(config).get("layer_types") or ())
    return torch.zeros(1, 1, 1, 1) if is_indexed else _window_masks(local_size=local_size)


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
    indices: Tensor | None = None,
    **_kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function with transformers' signature; returns [1, T, heads, D]. `indices`: an indexer's picks."""
    context = packed_context_of(module)
    layout, ranks = context.read(), context.sharing
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if context.is_indexed:
        if indices is None:
            raise UserError(
                "this release of transformers does not pass the picks of GLM-5's indexers to attention: "
                "install a newer one"
            )
        q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        return picked_attention(q, k, v, indices[0], layout, scale)[None], None
    window = window_of(attention_mask, sliding_window)
    if ranks is None:
        return _attend_whole_sequences(
            query, key, value, layout, scale, window, softcap, s_aux, shared=context.shared
        ), None
    query, key, value, s_aux = exchange_tokens_for_heads(query, key, value, s_aux, ranks)
    return exchange_heads_for_tokens(
        _attend_whole_sequences(query, key, value, layout, scale, window, softcap, s_aux), ranks
    ), None


def shared_prompt_attention(
    context: PackedContext, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend in a row with shared prompts: heads of all tokens [T, heads, D] to the computed tokens [t, heads, D]."""
    assert context.shared is not None
    return select_first_copies(causal_attention(query, key, value, context.read(), scale, window), context.shared)


def packed_context_of(module: nn.Module) -> PackedContext:
    """The context that `attach_context` gave the module."""
    context: PackedContext = module.__dict__[CONTEXT_ATTRIBUTE]
    return context


def _attend_whole_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    shared: SharedPrompts | None = None,
) -> Tensor:
    """Attend within whole sequences: [1, heads, T, D] to [1, T, heads, D]."""
    # no index: its gradient would be a copy
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if shared is None:
        return causal_attention(q, k, v, layout, scale, window, softcap, sinks)[None]
    q, k, v = (expand_to_row(states, shared) for states in (q, k, v))
    return select_first_copies(causal_attention(q, k, v, layout, scale, window, softcap, sinks), shared)[None]
