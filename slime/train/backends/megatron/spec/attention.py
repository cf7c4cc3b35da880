"""Attention over packed rows in plain torch, with or without context parallelism.

Invariant: a token attends to earlier tokens of its own sequence and to nothing else. With n context-parallel ranks
every sequence has 2 n chunks of equal length, and rank r has chunks r and 2 n - 1 - r of each, so that all ranks have
the same work. Keys and values are gathered from all ranks; their gradients return to the ranks that sent them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from slime.errors import UserError
from slime.train.backends.attention import HALF, causal_attention
from slime.train.samples.packing import PackedLayout

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType


@dataclass
class PackedRowParams(PackedSeqParams):
    """Megatron's parameters of a packed row, with the layout as the host knows it, to avoid device synchronisation.

    The layout has the whole sequences, padding included, also where a rank has only a part of each. The rotary
    embedding in plain torch reads the lengths in every layer, those of the padded sequences first, so these are on the
    host. Transformer Engine's kernels require all bounds on the device. `picked` has the tokens that the indexers of
    sparse attention selected, by layer.
    """

    layout: PackedLayout | None = None
    picked: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: PackedLayout, *, on_host: bool = False) -> PackedRowParams:
        bounds, longest = layout.cu_seqlens, layout.max_length
        known = torch.tensor([0, *accumulate(layout.lengths)], dtype=torch.int32) if on_host else None
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=known,
            cu_seqlens_kv_padded=known,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=layout,
        )


class CoreAttention(MegatronModule):
    """Attention with the signature of Megatron's; inputs are [T, heads, D] of a packed row, or [S, B, heads, D]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_keywords: object,
    ) -> None:
        super().__init__(config)
        self.ranks = pg_collection.cp
        self.scale = softmax_scale
        windowed = config.window_size is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] + 1 if windowed else None  # Megatron's excludes the token itself
        sinks = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
            sinks = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            sinks.tensor_model_parallel = True  # type: ignore[attr-defined]
            sinks.partition_dim, sinks.partition_stride = 0, 1  # type: ignore[attr-defined]
        self.softmax_offset = sinks
        if self.ranks.size() > 1 and (self.window is not None or self.softmax_offset is not None):
            raise UserError(
                "--context-parallel-size above 1 needs full attention, and this model has sliding windows or attention "
                "sinks: set it to 1"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        if packed_seq_params is not None:
            return self._packed(query, key, value, row_layout(packed_seq_params), scale)
        length, count = query.shape[:2]
        q, k, v = (states.transpose(0, 1).flatten(0, 1) for states in (query, key, value))
        output = self._packed(q, k, v, uniform_layout(length * self.ranks.size(), count, query.device), scale)
        return output.unflatten(0, (count, length)).transpose(0, 1).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        if self.ranks.size() > 1:
            return zigzag_attention(query, key, value, layout, scale, self.ranks)
        return causal_attention(query, key, value, layout, scale, self.window, None, self.softmax_offset)


def row_layout(params: PackedSeqParams) -> PackedLayout:
    """Return the layout of a packed row; copies it from the device if the parameters are not from `RowParams.of`."""
    if isinstance(params, PackedRowParams) and params.layout is not None:
        return params.layout
    bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    lengths = tuple(bounds.diff().tolist())
    return PackedLayout(lengths, bounds, max(lengths))


def uniform_layout(length: int, count: int, device: torch.device) -> PackedLayout:
    bounds = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)
    return PackedLayout((length,) * count, bounds, length)


def zigzag_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, ranks: dist.ProcessGroup
) -> Tensor:
    """Compute the attention of this rank's chunks [T / n, heads, D] to all earlier keys."""
    rank, size = ranks.rank(), ranks.size()
    own = [length // size for length in layout.lengths]
    keys, values = (
        gather_from_sequence_parallel_region(states.contiguous(), group=ranks).unflatten(0, (size, -1)).split(own, 1)
        for states in (key, value)
    )
    outputs = []
    for q, k, v in zip(query.split(own), keys, values, strict=True):
        chunk = len(q) // 2
        k, v = _undo_zigzag(k, chunk), _undo_zigzag(v, chunk)
        for part, place in zip(q.split(chunk), (rank, 2 * size - 1 - rank), strict=True):
            seen = (place + 1) * chunk
            outputs.append(_attend_from_end(part, k[:seen], v[:seen], scale))
    return torch.cat(outputs)


def _undo_zigzag(gathered: Tensor, chunk: int) -> Tensor:
    """Order the chunks [n, 2 c, heads, D] of the ranks as the sequence [2 n c, heads, D].

    These are the first chunks of all ranks in order, then their last chunks in reverse order.
    """
    first, last = gathered.split(chunk, 1)
    return torch.cat([first.flatten(0, 1), last.flip(0).flatten(0, 1)])


def _attend_from_end(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute the causal attention of the last tokens of a sequence to the whole sequence; [L, heads, D]."""
    dtype = query.dtype
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    if not query.is_cuda and dtype in HALF:  # the CPU's backward takes four times as long in half precision
        q, k, v = q.float(), k.float(), v.float()
    if query.is_cuda:
        mask: Tensor = causal_lower_right(len(query), len(key))
    else:
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1).to(dtype)


class GatedSelfAttention(SelfAttention):
    """Attention with gated output that supports more tensor-parallel ranks than key heads.

    In that case Megatron computes queries and gates of a whole group on every rank that shares its key. It selects the
    rank's own heads from the queries, but keeps all gates; this class selects the gates too.
    """

    def get_query_key_value_tensors(self, *args: object, **keywords: object) -> tuple[Tensor, ...]:
        found = super().get_query_key_value_tensors(*args, **keywords)
        sharing = self.world_size // (self.config.num_query_groups or 1)
        if sharing <= 1 or len(found) < 4:
            return found
        *others, gate = found
        return (*others, gate.chunk(sharing, dim=2)[self.tp_group.rank() % sharing])
