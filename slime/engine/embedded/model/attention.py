"""Attention over the KV slots, registered in transformers' attention interface.

Every layer's keys and values are in tensors `[kv_heads, slots, head_dim]`. A forward pass has the tokens of many
sequences in one row; `AttentionContext` has the slots that each token sees. Invariant: a query at position p of its
sequence sees exactly the positions <= p (or the last `window` of them), independent of the rest of the batch.

Indexers of sparse attention (DeepSeek V3.2, GLM-5) are replaced (`replace_indexers`). An indexer scores every earlier
token and selects the best `index_topk`. In a sequence of at most `index_topk` tokens it selects all of them, and the
engine limits its context to that length, so scores are not computed and the indexer's keys are not stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from slime.models.windows import WindowMasks, window_of

if TYPE_CHECKING:
    from slime.engine.embedded.model.prefill_kernels import ExtendTiles

_names = itertools.count()

MakeZeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a zeroed cache tensor of a shape and a dtype."""


class Rules(NamedTuple):
    """Attention parameters of a layer: softmax(cap(scale q k)) over a window, with an optional sink logit per head."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerShape:
    """KV cache shape of a layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass
class SpanGroup:
    """Sequences computed in one attention call: same number of query tokens, keys padded to the longest."""

    query_index: torch.Tensor  # [b * m], positions in the row of tokens
    slots: torch.Tensor  # [b * n], slots of the keys, padded with slot 0
    b: int
    m: int
    n: int
    key_len: torch.Tensor  # [b]
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    _biases: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask as a bias added to the scores, made once for all layers; torch would make it in each."""
        if window not in self._biases:
            mask = self.mask(window)
            self._biases[window] = (
                None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
            )
        return self._biases[window]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return `[b, 1, m, n]`, True where a key is visible; None when every key is."""
        if window in self._masks:
            return self._masks[window]
        mask = None
        if window is not None or self.m != 1 or not bool((self.key_len == self.n).all()):
            key = torch.arange(self.n)
            query = (self.key_len - self.m)[:, None] + torch.arange(self.m)  # [b, m], position of each query
            seen = key <= query[:, :, None]
            if window is not None:
                seen &= key > query[:, :, None] - window
            mask = seen[:, None]
        self._masks[window] = mask
        return mask


class GatheredGroup:
    """Keys and values of one group in every layer, copied out of the slots once and extended by one token per step.

    When a sequence leaves, the last one moves to its index, so the remaining data is not copied again.
    """

    def __init__(self, rows: list[int], span: SpanGroup, room: int) -> None:
        self.rows = rows
        self.span = span
        self._room = span.n + room
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [b, room, KV, D]
        self._first = torch.arange(span.b) * self._room
        self._newest = self._first + (span.key_len - 1)  # index of each member's newest token in a store
        self._in_order = _is_range(span.query_index.tolist())

    @property
    def full(self) -> bool:
        return self.span.n >= self._room

    def leave(self, gone: Collection[int]) -> None:
        """Remove the sequences in the table rows `gone`."""
        place, key_len = list(range(len(self.rows))), self.span.key_len.clone()
        for i in reversed(place.copy()):
            if self.rows[i] in gone:
                last = self.rows.pop()
                if i < len(self.rows):
                    self.rows[i] = last
                    key_len[i] = key_len[len(self.rows)]
                    for stores in self._stores.values():
                        for store in stores:
                            store[i].copy_(store[len(self.rows)])
        old = self.span
        b = len(self.rows)
        self._first = self._first[:b]
        self.span = SpanGroup(old.query_index[:b], old.slots, b, 1, int(key_len[:b].max()), key_len[:b])

    def grow(self, query_index: list[int]) -> None:
        """Extend every sequence by one token; `query_index` is their new position in the batch."""
        old = self.span
        self._in_order = _is_range(query_index)
        self.span = SpanGroup(torch.tensor(query_index), old.slots, old.b, 1, old.n + 1, old.key_len + 1)
        self._newest = self._first + old.key_len

    def pick(self, batch: torch.Tensor) -> torch.Tensor:
        """Select the members' part `[X, b, D]` of a batch tensor `[X, T, D]`."""
        return batch if self.is_whole(batch.shape[1]) else batch.index_select(1, self.span.query_index)

    def is_whole(self, count: int) -> bool:
        """True when the group is the whole batch of `count` sequences, in batch order."""
        return self._in_order and self.span.b == count

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens' k and v `[KV, T, D]`; returns views `[b, KV, n, D]` of the group's keys and values."""
        if layer not in self._stores:
            self._stores[layer] = (self._gather(keys), self._gather(values))
        b, n = self.span.b, self.span.n
        for store, fresh in zip(self._stores[layer], (k, v), strict=True):
            store.view(-1, *store.shape[2:]).index_copy_(0, self._newest, self.pick(fresh).transpose(0, 1))
        key_store, value_store = self._stores[layer]
        return key_store[:b, :n].transpose(1, 2), value_store[:b, :n].transpose(1, 2)

    def _gather(self, cache: torch.Tensor) -> torch.Tensor:
        span = self.span
        store = cache.new_empty(span.b, self._room, cache.shape[0], cache.shape[2])
        store[:, span.n :] = 0.0  # these are masked, but NaN would spread even so
        store[:, : span.n] = (
            cache.index_select(1, span.slots).view(cache.shape[0], span.b, span.n, -1).permute(1, 2, 0, 3)
        )
        return store


def _is_range(numbers: list[int]) -> bool:
    return numbers == list(range(len(numbers)))


class GatheredCache:
    """Gathered keys and values for CPU decode steps, reused between steps while the same sequences run.

    Without it every step would copy all keys and values out of their slots.
    """

    ROOM = 64  # tokens that a group can grow by before it is gathered again

    def __init__(self) -> None:
        self._lens: dict[int, int] = {}  # by table row
        self.groups: list[GatheredGroup] = []

    def advance(self, rows: Sequence[int], lens: Sequence[int], table: np.ndarray) -> None:
        """Update the groups for sequences in `rows` of `lens` tokens, the newest of which is computed in this step.

        New sequences or a full group require a new layout; sequences that left do not.
        """
        length, place = dict(zip(rows, lens, strict=True)), {row: i for i, row in enumerate(rows)}
        if any(self._lens.get(row, -1) + 1 != n for row, n in length.items()):
            self.groups = self._lay_out(rows, length, place, table)
        else:
            groups: list[GatheredGroup] = []
            for group in self.groups:
                gone = {row for row in group.rows if row not in place}
                if group.full or len(gone) == len(group.rows):
                    groups += self._lay_out([row for row in group.rows if row not in gone], length, place, table)
                    continue
                if gone:
                    group.leave(gone)
                group.grow([place[row] for row in group.rows])
                groups.append(group)
            self.groups = groups
        self._lens = length

    def _lay_out(
        self, rows: Sequence[int], length: dict[int, int], place: dict[int, int], table: np.ndarray
    ) -> list[GatheredGroup]:
        made = []
        for span in group_spans([1] * len(rows), [table[row, : length[row]] for row in rows], DECODE_SLACK):
            members = [rows[i] for i in span.query_index.tolist()]
            span.query_index = torch.tensor([place[row] for row in members])
            made.append(GatheredGroup(members, span, self.ROOM))
        return made

    def forget(self) -> None:
        self._lens, self.groups = {}, []


class PaddingLimit(NamedTuple):
    """Limit on the longest sequence of a group, relative to the shortest: a factor plus a number of tokens."""

    factor: float
    tokens: int


# Prefill copies and multiplies its padding. A decode step is short: another call costs more than some padding.
PREFILL_SLACK, DECODE_SLACK = PaddingLimit(1.25, 16), PaddingLimit(2.0, 256)


def group_spans(
    query_lens: Sequence[int], key_slots: Sequence[np.ndarray], slack: PaddingLimit, max_cells: int = 1 << 24
) -> list[SpanGroup]:
    """Group sequences of equal query length and similar key length; a single group keeps the given order."""
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    order = sorted(range(len(query_lens)), key=lambda i: (query_lens[i], len(key_slots[i])))
    groups: list[list[int]] = []
    for i in order:
        m, longest = query_lens[i], len(key_slots[i])
        if (
            groups
            and query_lens[groups[-1][0]] == m
            and longest <= slack.factor * len(key_slots[groups[-1][0]]) + slack.tokens
            and (len(groups[-1]) + 1) * m * longest <= max_cells
        ):
            groups[-1].append(i)
        else:
            groups.append([i])
    if len(groups) == 1:
        groups[0].sort()
    spans = []
    for members in groups:
        m = query_lens[members[0]]
        lens = np.array([len(key_slots[i]) for i in members])
        n = int(lens.max())
        slots = np.zeros((len(members), n), dtype=np.int64)
        for row, i in enumerate(members):
            slots[row, : lens[row]] = key_slots[i]
        query = torch.from_numpy((starts[members][:, None] + np.arange(m)).reshape(-1))
        flat = torch.from_numpy(slots.reshape(-1))
        spans.append(SpanGroup(query, flat, len(members), m, n, torch.from_numpy(lens)))
    return spans


class AttentionContext:
    """Attention state of the batch in flight: KV cache, slots, and how to attend. One per model runner."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}  # by layer
        self.keys: dict[int, torch.Tensor] = {}  # by layer
        self.values: dict[int, torch.Tensor] = {}
        self.attend: Callable[..., torch.Tensor] = self._probe
        self.is_probed = True  # during the first pass, until the shape and window of every layer are known
        self.opaque: Callable[..., torch.Tensor] | None = None  # CUDA: `attend` as one op for torch.compile
        self.slots: torch.Tensor = torch.empty(0, dtype=torch.int64, device=device)  # slot of each new token
        self.groups: list[SpanGroup] = []  # CPU, prefill
        self.window = GatheredCache()  # CPU, decode
        self.tiles: ExtendTiles  # CUDA, prefill; set by every extend step
        self.table: torch.Tensor = torch.empty(0, dtype=torch.int32, device=device)  # CUDA: slot by [row, position]
        self.rows: torch.Tensor = self.slots  # CUDA, decode: table row of each sequence
        self.lens: torch.Tensor = self.table  # CUDA, decode: length of each sequence, new token included

    def allocate(self, slots: int, dtype: torch.dtype, zeros: MakeZeros) -> None:
        """Allocate `slots` token slots, plus the padding slot 0, in every layer."""
        for layer, shape in self.shapes.items():
            for store, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                store[layer] = zeros((shape.kv_heads, slots + 1, dim), dtype)

    def free(self) -> None:
        self.keys, self.values = {}, {}
        self.window.forget()

    def _probe(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        """Record the shapes of each layer in the first forward pass."""
        self.shapes[layer] = LayerShape(k.shape[1], k.shape[3], v.shape[3])
        return q.new_zeros(q.shape[2], q.shape[1], v.shape[3])

    def _keep(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(1, self.slots, k[0])
        values.index_copy_(1, self.slots, v[0])
        return keys, values

    def decode_cpu(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        """Attend with one query per sequence, over the gathered keys and values."""
        keys, values = self._keep(layer, k, v)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        for group in self.window.groups:
            kg, vg = group.update(layer, k[0], v[0], keys, values)
            qg = group.pick(q[0]).transpose(0, 1)[:, :, None]
            mixed = _attention(qg, kg, vg, group.span, rules)[:, :, 0]
            if group.is_whole(q.shape[2]):
                return mixed
            out.index_copy_(0, group.span.query_index, mixed)
        return out

    def extend_cpu(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        """Attend for prompt tokens: q `[1, H, T, D]`, k and v `[1, KV, T, D]`; returns `[T, H, Dv]`."""
        keys, values = self._keep(layer, k, v)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        heads, kv_heads = q.shape[1], keys.shape[0]
        for group in self.groups:
            kg = keys.index_select(1, group.slots).view(kv_heads, group.b, group.n, -1).transpose(0, 1)
            vg = values.index_select(1, group.slots).view(kv_heads, group.b, group.n, -1).transpose(0, 1)
            qg = q[0].index_select(1, group.query_index).view(heads, group.b, group.m, -1).transpose(0, 1)
            mixed = _attention(qg, kg, vg, group, rules)
            out.index_copy_(0, group.query_index, mixed.transpose(1, 2).reshape(group.b * group.m, heads, -1))
        return out


def zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros; on the CPU their memory is allocated lazily, page by page at the first write."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: SpanGroup, rules: Rules) -> torch.Tensor:
    b, heads, m, _ = q.shape
    kv_heads = k.shape[1]
    if rules.softcap is not None or rules.sinks is not None:
        return _attention_spelled_out(q, k, v, span.mask(rules.window), rules)
    bias = span.bias(rules.window, q.dtype)
    if m == 1:  # the query heads of one kv head become query positions: no key is repeated
        grouped = q.reshape(b, kv_heads, heads // kv_heads, -1)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=rules.scale).reshape(b, heads, 1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=rules.scale, enable_gqa=heads != kv_heads)


def _attention_spelled_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rules: Rules
) -> torch.Tensor:
    """Attention in plain operations, with soft caps and sinks; a sink takes probability and contributes no value."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rules.sinks is not None:
        sink = rules.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(v.dtype), v)


def register_attention(context: AttentionContext, mask: torch.Tensor | None = None) -> str:
    """Register attention over `context` with transformers; returns the name of the implementation.

    The first pass reads each layer's window from its mask (`WindowMasks`); later passes read no mask. `mask` is passed
    to model code that requires one.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    windows = WindowMasks()

    def paged_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        layer: int = module.layer_idx  # type: ignore[assignment]
        if context.is_probed:
            context.windows[layer] = window_of(attention_mask, sliding_window)
        if context.opaque is not None and torch.compiler.is_compiling():
            mixed = context.opaque(query, key, value, layer, scale, softcap or 0.0, s_aux)
        else:
            mixed = context.attend(layer, query, key, value, Rules(scale, context.windows[layer], softcap, s_aux))
        return mixed[None], None

    def paged_mask(*_: object, local_size: int | None = None, **__: object) -> torch.Tensor | None:
        return windows(local_size=local_size) if context.is_probed and mask is None else mask

    name = f"slime_paged_{next(_names)}"
    AttentionInterface.register(name, paged_attention)
    AttentionMaskInterface.register(name, paged_mask)
    return name


class DenseIndexer(nn.Module):
    """Replaces an indexer that would select every token; has its parameters under their names."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in plain.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return a dummy index, which is not read: attention over slots sees every token of its sequence."""
        return hidden_states.new_zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)


def replace_indexers(model: nn.Module) -> bool:
    """Replace the indexers of a model by ones without scores; returns True when there were any."""
    found = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("Indexer") and hasattr(child, "index_topk"):
                setattr(parent, name, DenseIndexer(child))
                found = True
    return found
